"""``python -m kvcs``: the same as ``kvcs``."""

from kvcs.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
