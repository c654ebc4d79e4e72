"""Results on standard output: one JSON object a line for programs, one line for people."""

import sys
from typing import Any

import orjson


class Output:
    """Where a subcommand tells what happened.

    Args:
        as_json: One JSON object a line, with the member ``event``. Without it, the same in
            words; identifiers are shortened to 8 digits then.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def tell(self, event: str, **values: Any) -> None:
        """Tell one event and flush, so that whoever reads sees it now."""
        if self.as_json:
            self.write({"event": event, **values})
            return
        shown = " ".join(
            f"{name}={_short(value)}" for name, value in values.items() if value is not None
        )
        print(f"{event.replace('-', ' ')}: {shown}" if shown else event, flush=True)

    def write(self, line: dict[str, Any]) -> None:
        """Write one JSON object."""
        sys.stdout.buffer.write(orjson.dumps(line) + b"\n")
        sys.stdout.flush()


def _short(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    is_identifier = len(text) >= 32 and all(c in "0123456789abcdef" for c in text)
    return text[:8] if is_identifier else text
