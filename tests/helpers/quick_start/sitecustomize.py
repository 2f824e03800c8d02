"""Imports without garbage collections, which take a quarter of a short process's time.

Python imports this at its start if it is on its path. Every command calls `gc.freeze`
once it has imported all: from there on it collects, though less often than Python's
700 objects. JAX makes many that live on, and looks through its own at each collection.
"""

import gc

_freeze = gc.freeze


def freeze():
    _freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


gc.disable()
gc.freeze = freeze
