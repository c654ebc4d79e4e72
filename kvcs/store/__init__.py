"""Where tensors come from (:mod:`kvcs.store.source`) and go to (:mod:`kvcs.store.sink`)."""
