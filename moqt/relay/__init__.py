"""A MOQT relay: passes Tracks on, from whoever publishes them to whoever wants them.

It understands nothing of what it carries. What decides is pure (:mod:`moqt.relay.routes`,
:mod:`moqt.relay.merge`, :mod:`moqt.relay.cache`); connections and waits are in
:mod:`moqt.relay.server` and :mod:`moqt.relay.upstream`.
"""
