"""Who may have a Track, and what is told to those who discover.

Publishers that announced themselves are asked first, by :mod:`moqt.relay.routes`; relays further
up are asked for what none of them has.
"""

from collections.abc import Collection

from moqt.aio import MoqtConnection
from moqt.names import TrackNamespace
from moqt.relay.routes import Routes
from moqt.relay.upstream import Upstream
from moqt.session.discovery import NamespaceDirectory


class Neighbours:
    """The sessions that can be asked for Tracks."""

    def __init__(self) -> None:
        self.own = NamespaceDirectory()
        """What can be had here."""

        self.known = NamespaceDirectory()
        """And what relays further up tell of."""

        self._both = _Both(self.own, self.known)
        self.routes: Routes[MoqtConnection] = Routes(self._both)
        self._upstreams: list[Upstream] = []

    def add_upstream(self, upstream: Upstream) -> None:
        """Ask another relay, too, while there is a session with it."""
        self._upstreams.append(upstream)

    def publishers(
        self, namespace: TrackNamespace, *, besides: Collection[MoqtConnection] = ()
    ) -> list[MoqtConnection]:
        """Return who is to be asked for a Track of ``namespace``, none of ``besides``."""

        def may_be_asked(connection: MoqtConnection) -> bool:
            return (
                connection not in besides
                and connection.closed is None
                and not connection.session.is_going_away
            )

        found = self.routes.publishers_of(namespace, may_be_asked)
        if found:
            return found
        above = [upstream.connection for upstream in self._upstreams]
        return [c for c in above if c is not None and may_be_asked(c)]

    def directory_for(self, connection: MoqtConnection) -> NamespaceDirectory:
        """Return what a session is told of: a relay further up hears nothing of its own."""
        is_upstream = any(upstream.connection is connection for upstream in self._upstreams)
        return self.own if is_upstream else self.known

    def announce(self, namespace: TrackNamespace) -> None:
        """Tell that Tracks of ``namespace`` can be had here although nobody publishes them."""
        self._both.add(namespace)

    def withdraw(self, namespace: TrackNamespace) -> None:
        """Take back one :meth:`announce`."""
        self._both.remove(namespace)


class _Both(NamespaceDirectory):
    """Tells two directories of what is added and removed."""

    def __init__(self, *directories: NamespaceDirectory) -> None:
        super().__init__()
        self._directories = directories

    def add(self, namespace: TrackNamespace) -> None:
        for directory in self._directories:
            directory.add(namespace)

    def remove(self, namespace: TrackNamespace) -> None:
        for directory in self._directories:
            directory.remove(namespace)
