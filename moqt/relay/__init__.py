"""A MOQT relay: passes Tracks on, from whoever publishes them to whoever wants them.

It understands nothing of what it carries. What a Track is, who is asked for it and what is let go
of is pure (:mod:`moqt.relay.merge`, :mod:`moqt.relay.routes`, :mod:`moqt.relay.cache`); the other
files act on sessions. :mod:`moqt.relay.server` puts them together.
"""
