"""The MOQT session without I/O: octets and intentions in, events and commands out.

:class:`~moqt.session.core.Session` is the door; :mod:`moqt.session.events` is what it tells,
:mod:`moqt.session.commands` what it asks of the transport, and
:class:`~moqt.session.localtrack.LocalTrack` what an application publishes through it.
"""
