"""Settings: each is declared once, with its type, bounds, default and help.

A flag beats the environment (``KVCS_NAME``), which beats the file (``kvcs.toml``, or the one that
``--config`` or ``KVCS_CONFIG`` names). In the file, settings stand at the top, for every command,
or in a table named after the command: ``[produce]``, ``[consume]``; the table wins.

What is wrong is refused before anything starts, in one line that names the setting, where it came
from, what was found and what was expected. A name that nobody knows is wrong, too. Secrets have no
flag, since command lines are public on a machine, and no message shows one.
"""

from kvcs.config.access import Access
from kvcs.config.commands import (
    SETTINGS,
    BenchSettings,
    ConsumerSettings,
    IndexSettings,
    PingSettings,
    ProducerSettings,
    RelaySettings,
    StoreSettings,
)
from kvcs.config.common import (
    ENV_PREFIX,
    CommonSettings,
    IndexedSettings,
    ListeningSettings,
    ScopedSettings,
    Settings,
)
from kvcs.config.readers import (
    Address,
    parse_address,
    parse_datagram,
    parse_list,
    parse_octets,
    parse_service,
    parse_uri,
)
from kvcs.config.sources import (
    DEFAULT_FILE,
    Origin,
    add_settings,
    origins_of,
    settings_from,
)

__all__ = [
    "DEFAULT_FILE",
    "ENV_PREFIX",
    "SETTINGS",
    "Access",
    "Address",
    "BenchSettings",
    "CommonSettings",
    "ConsumerSettings",
    "IndexSettings",
    "IndexedSettings",
    "ListeningSettings",
    "Origin",
    "PingSettings",
    "ProducerSettings",
    "RelaySettings",
    "ScopedSettings",
    "Settings",
    "StoreSettings",
    "add_settings",
    "origins_of",
    "parse_address",
    "parse_datagram",
    "parse_list",
    "parse_octets",
    "parse_service",
    "parse_uri",
    "settings_from",
]
