"""Publishing caches: what, in which order, to whom; and the process that does it."""
