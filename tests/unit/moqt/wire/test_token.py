import pytest
from hypothesis import given
from hypothesis import strategies as st

from moqt.codepoints import MAX_VI64, SessionErrorCode, TokenAliasType
from moqt.errors import KeyValueFormattingError, UsageError
from moqt.wire.messages.setup import Setup
from moqt.wire.token import AuthorizationToken

NUMBERS = st.integers(0, MAX_VI64)
VALUES = st.binary(max_size=40)
TOKENS = st.one_of(
    NUMBERS.map(AuthorizationToken.delete),
    st.builds(AuthorizationToken.register, NUMBERS, NUMBERS, VALUES),
    NUMBERS.map(AuthorizationToken.use_alias),
    st.builds(AuthorizationToken.use_value, NUMBERS, VALUES),
)


@given(TOKENS)
def test_every_kind_round_trips(token: AuthorizationToken) -> None:
    assert AuthorizationToken.decode(token.encode()) == token


@pytest.mark.parametrize("text", ["", "00", "02", "0400", "0100", "03", "000100", "020100"])
def test_what_is_no_token_closes_with_its_own_code(text: str) -> None:
    with pytest.raises(KeyValueFormattingError) as caught:
        AuthorizationToken.decode(bytes.fromhex(text))

    assert caught.value.code is SessionErrorCode.KEY_VALUE_FORMATTING_ERROR


@pytest.mark.parametrize(
    ("kind", "alias", "token_type", "value"),
    [
        (TokenAliasType.DELETE, None, None, b""),
        (TokenAliasType.DELETE, 1, 0, b""),
        (TokenAliasType.USE_ALIAS, 1, None, b"x"),
        (TokenAliasType.USE_VALUE, 1, 0, b"x"),
        (TokenAliasType.REGISTER, 1, None, b""),
    ],
)
def test_a_token_has_exactly_the_fields_of_its_kind(
    kind: TokenAliasType, alias: int | None, token_type: int | None, value: bytes
) -> None:
    with pytest.raises(UsageError):
        AuthorizationToken(kind, alias, token_type, value)


def test_a_registered_token_takes_its_value_and_16_octets_of_the_cache() -> None:
    assert AuthorizationToken.register(1, 0, b"secret").cache_octets == 22


def test_a_secret_is_never_printed() -> None:
    token = AuthorizationToken.register(1, 0, b"hunter2")
    setup = Setup.of(path="/kv", tokens=(token,))

    assert "hunter2" not in repr(token)
    assert "hunter2" not in repr(setup)
    assert "/kv" in repr(setup)
