"""Where settings come from: flags, the environment, a file; and what is said of wrong ones."""

import difflib
import os
import re
import tomllib
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BeforeValidator, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvcs.config.commands import SETTINGS
from kvcs.config.common import ENV_PREFIX, CommonSettings
from kvcs.config.readers import (
    Address,
    parse_datagram,
    parse_places,
    parse_service,
    parse_services,
    parse_uris,
)
from kvcs.errors import ConfigError

#: The file that is read if it exists and no other one is named.
DEFAULT_FILE = "kvcs.toml"
#: Variables of ours that are not settings: of this module, the connectors, scripts and tests.
_OTHER_VARIABLES = frozenset(
    {
        "KVCS_BENCH_BASELINE",
        "KVCS_COMPOSE_INSTALL",
        "KVCS_CONFIG",
        "KVCS_FUZZ_EACH_S",
        "KVCS_FUZZ_PROGRAM",
        "KVCS_FUZZ_SECONDS",
        "KVCS_FUZZ_SEED",
        "KVCS_MALICE_RUNS",
        "KVCS_MALICE_SEED",
        "KVCS_MODEL_DIR",
        "KVCS_PEER_PYTHON",
        "KVCS_PYTHON",
        "KVCS_SETUP_LOCKED",
        "KVCS_STORE_KILLS",
    }
)
#: What container platforms put into every environment for a service named kvcs.
_PLATFORM_VARIABLE = re.compile(r"KVCS_(.+_)?(PORT(_\d+.*|_.+)?|SERVICE_(HOST|PORT)(_.+)?)")

#: Second names of flags. In the environment and the file a setting has one name.
_ALSO: Mapping[str, tuple[str, ...]] = {
    "encodings": ("--codec",),
    "http_listen": ("--http",),
    "index_uri": ("--index",),
}
S = TypeVar("S", bound=CommonSettings)


class Origin(NamedTuple):
    """Where a value came from, in words for messages: ``--listen``, ``KVCS_LISTEN``, a file."""

    text: str


def add_settings(
    parser: ArgumentParser, cls: type[CommonSettings], *, but: Collection[str] = ()
) -> None:
    """Declare a flag for every setting that is not secret, and ``--config``; ``but`` these."""
    parser.allow_abbrev = False  # --scope-key must be an error, and not --scope-key-file
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=SUPPRESS,
        help=f"TOML file with settings (default: {DEFAULT_FILE} if there is one)",
    )
    group = parser.add_argument_group(
        "settings", f"also {ENV_PREFIX}NAME in the environment, or name = value in the file"
    )
    for name, field in cls.model_fields.items():
        if _is_secret(field) or name in but:
            continue
        options: dict[str, Any] = {"dest": name, "default": SUPPRESS, "help": _help(field)}
        if field.annotation is bool:
            options["action"] = BooleanOptionalAction
        else:
            options["metavar"] = _metavar(field)
            if _is_many(field):
                options["action"] = _Collect
        group.add_argument(_flag(name), *_ALSO.get(name, ()), **options)


class _Collect(Action):
    """Gather a flag that may be given several times, each with values separated by commas."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None
    ) -> None:
        gathered = [*getattr(namespace, self.dest, ())]
        gathered += [part.strip() for part in str(values).split(",") if part.strip()]
        setattr(namespace, self.dest, gathered)


def settings_from(cls: type[S], args: Namespace, *, environ: Mapping[str, str] | None = None) -> S:
    """Put together what flags, environment and file say.

    Args:
        cls: The settings of the command.
        args: What the parser made of the flags that :func:`add_settings` declared.
        environ: The environment; the process's by default.

    Raises:
        ConfigError: In one line: what is wrong, where it came from, what was expected.
    """
    variables = os.environ if environ is None else environ
    found: dict[str, tuple[Any, Origin]] = {}
    found |= _from_file(cls, getattr(args, "config", None) or variables.get("KVCS_CONFIG"))
    found |= _from_environment(cls, variables)
    found |= {
        name: (getattr(args, name), Origin(_flag(name)))
        for name in cls.model_fields
        if hasattr(args, name)
    }
    try:
        return cls(**{name: value for name, (value, _) in found.items()})
    except ValidationError as exc:
        raise ConfigError(
            "; ".join(_explain(cls, error, found) for error in exc.errors(include_url=False))
        ) from None


def origins_of(
    cls: type[CommonSettings], args: Namespace, *, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return, for each setting that is set at all, where its value comes from."""
    variables = os.environ if environ is None else environ
    found = _from_file(cls, getattr(args, "config", None) or variables.get("KVCS_CONFIG"))
    found |= _from_environment(cls, variables)
    told = {name: origin.text for name, (_, origin) in found.items()}
    return told | {name: _flag(name) for name in cls.model_fields if hasattr(args, name)}


def _from_environment(
    cls: type[CommonSettings], variables: Mapping[str, str]
) -> dict[str, tuple[Any, Origin]]:
    found: dict[str, tuple[Any, Origin]] = {}
    known = {f"{ENV_PREFIX}{name.upper()}" for name in _all_names()} | _OTHER_VARIABLES
    for variable, value in variables.items():
        if not variable.startswith(ENV_PREFIX) or _PLATFORM_VARIABLE.fullmatch(variable):
            continue
        if variable not in known:
            raise ConfigError(f"{variable} is not a setting{_suggest(variable, known)}")
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in cls.model_fields:
            found[name] = value, Origin(variable)
    return found


def _from_file(cls: type[CommonSettings], named: str | None) -> dict[str, tuple[Any, Origin]]:
    path = Path(named or DEFAULT_FILE)
    try:
        members = tomllib.loads(path.read_text())
    except FileNotFoundError as exc:
        if named is None:
            return {}
        raise ConfigError(f"settings file {path}: {exc.strerror}") from None
    except OSError as exc:
        raise ConfigError(f"settings file {path}: {exc.strerror or exc}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"settings file {path}: not TOML: {exc}") from None
    tables = {other.table: other for other in SETTINGS}
    found: dict[str, tuple[Any, Origin]] = {}
    for name, value in members.items():
        if name in tables and isinstance(value, dict):
            continue
        _check_known(path, name, _all_names(), tables)
        if name in cls.model_fields:
            found[name] = value, Origin(str(path))
    for table, other in tables.items():
        inner = members.get(table, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"settings file {path}: {table} is not a table, expected [{table}]")
        for name, value in inner.items():
            _check_known(path, name, other.model_fields, ())
            if other.table == cls.table:
                found[name] = value, Origin(f"{path} [{table}]")
    return found


def _check_known(path: Path, name: str, known: Iterable[str], tables: Iterable[str]) -> None:
    if name not in set(known):
        raise ConfigError(
            f"settings file {path}: {name} is not a setting{_suggest(name, [*known, *tables])}"
        )


def _all_names() -> set[str]:
    return {name for cls in SETTINGS for name in cls.model_fields}


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _explain(
    cls: type[CommonSettings], error: ErrorDetails, found: Mapping[str, tuple[Any, Origin]]
) -> str:
    """Put one complaint of the validator in our words."""
    message = error["msg"].removeprefix("Value error, ")
    message = message.replace("Input should be", "expected")
    if not error["loc"]:
        return message  # a check of several settings, which names them itself
    name = str(error["loc"][0])
    field = cls.model_fields.get(name)
    if error["type"] == "missing":
        return f"{name} is not set ({_flag(name)} or {ENV_PREFIX}{name.upper()}): {_help(field)}"
    if field is None:
        return f"{name} is not a setting{_suggest(name, cls.model_fields)}"
    value, origin = found.get(name, ("", Origin("default")))
    shown = "a value" if _is_secret(field) else f"{value!r:.100}"
    if not message.startswith("expected") and "expected" not in message:
        message = f"expected otherwise: {message}"
    return f"{name} is {shown} (from {origin.text}), {message}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(field: FieldInfo | None) -> str:
    if field is None:
        return ""
    default = field.get_default()
    if field.is_required() or default is None or default == ():
        return field.description or ""
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{field.description} (default: {shown})"


def _metavar(field: FieldInfo) -> str:
    kinds = _kinds(field.annotation)
    readers = [m.func for m in field.metadata if isinstance(m, BeforeValidator)]
    if parse_datagram in readers:
        return "auto|N"
    if Address in kinds:
        return "HOST:PORT"
    if Path in kinds:
        return "FILE"
    if get_origin(field.annotation) is Literal:
        return "|".join(get_args(field.annotation))
    if int in kinds:
        return "N"
    if {parse_uris, parse_service, parse_services, parse_places} & set(readers):
        return "URI"
    return "SECONDS" if float in kinds else "TEXT"


def _is_many(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _is_secret(field: FieldInfo) -> bool:
    return SecretStr in _kinds(field.annotation)


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of."""
    return {annotation}.union(*(_kinds(part) for part in get_args(annotation)))
