"""KVSP as this project means it, in KVSP's words: identifiers, layout, codecs, and HTTP.

The day KVSP's own text says otherwise, this package changes and nothing else does. Only
:mod:`kvcs.kvsp.http` knows a network; it stands above the profile, whose names it uses.
"""
