"""KVSP as this project means it, in KVSP's words: identifiers, layout, codecs. No network.

The day KVSP's own text says otherwise, this package changes and nothing else does.
"""
