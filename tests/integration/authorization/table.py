"""What each request gets for each token: the table of docs/authorization.md, which is tested."""

COLUMNS = (
    "none",
    "other scope",
    "expired",
    "other audience",
    "revoked",
    "shorter prefix",
    "right",
)
_REFUSED = (
    "UNAUTHORIZED",
    "UNAUTHORIZED",
    "EXPIRED_AUTH_TOKEN",
    "MALFORMED_AUTH_TOKEN",
    "UNAUTHORIZED",
    "UNAUTHORIZED",
    "yes",
)
#: A SETUP names nothing that could be in another scope; an update without a token is judged by
#: that of its request.
EXPECTED = {
    "SETUP": (_REFUSED[0], "yes", *_REFUSED[2:5], "yes", "yes"),
    "SUBSCRIBE": _REFUSED,
    "FETCH": _REFUSED,
    "TRACK_STATUS": _REFUSED,
    "SUBSCRIBE_NAMESPACE": _REFUSED,
    "SUBSCRIBE_TRACKS": _REFUSED,
    "PUBLISH_NAMESPACE": _REFUSED,
    "PUBLISH": _REFUSED,
    "REQUEST_UPDATE": ("yes", *_REFUSED[1:]),
}


def rendered() -> str:
    """Return the table in Markdown."""
    lines = ["| |" + "|".join(f" {column} " for column in COLUMNS) + "|", "|---" * 8 + "|"]
    for name, cells in EXPECTED.items():
        lines.append(f"| {name} |" + "|".join(f" {cell} " for cell in cells) + "|")
    return "\n".join(lines) + "\n"
