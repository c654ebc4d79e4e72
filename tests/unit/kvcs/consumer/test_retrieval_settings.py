from math import inf
from typing import Any

import pytest

from kvcs.consumer.settings import RetrievalSettings
from kvcs.errors import ConfigError


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"connections": 0}, "connections is 0, expected more than 0"),
        ({"connections": 17}, "connections is 17, expected 16 or less"),
        ({"recompute_tokens_per_s": 0.0}, "recompute_tokens_per_s is 0.0, expected a number of"),
        ({"recompute_tokens_per_s": inf}, "recompute_tokens_per_s is inf, expected a number of"),
        ({"spread_wait_s": -1.0}, "spread_wait_s is -1.0, expected 0 or more"),
        ({"fetch": "often"}, "fetch is 'often', expected auto, never or always"),
        ({"octets_per_s": 0.0}, "octets_per_s is 0.0, expected more than 0"),
        ({"octets_per_s": float("nan")}, "octets_per_s is nan, expected more than 0"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_what_was_expected(
    changed: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RetrievalSettings(**changed)

    assert complaint in str(caught.value)


@pytest.mark.parametrize("connections", [1, 16])
def test_there_may_be_1_to_16_connections(connections: int) -> None:
    assert RetrievalSettings(connections=connections).connections == connections
