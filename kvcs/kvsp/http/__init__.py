"""KVSP over HTTP: blocks served to who asks for them, and an index of who holds which.

The wire form is this project's own; ``docs/kvsp-http.md`` says it for people,
``docs/kvsp-http.openapi.json`` for programs. Its parts:

* pure: what is named how (:mod:`~kvcs.kvsp.http.names`, :mod:`~kvcs.kvsp.http.uris`), what HTTP
  demands of an answer (:mod:`~kvcs.kvsp.http.conditions`, :mod:`~kvcs.kvsp.http.digests`,
  :mod:`~kvcs.kvsp.http.problems`), who may (:mod:`~kvcs.kvsp.http.tokens`), many sections in one
  answer (:mod:`~kvcs.kvsp.http.frames`), what an index knows (:mod:`~kvcs.kvsp.http.directory`,
  :mod:`~kvcs.kvsp.http.records`), what is due of a lease (:mod:`~kvcs.kvsp.http.leases`);
* shell: the services and their clients. Only they know the library that carries HTTP.
"""
