"""The life of a run, without flags: what it reports when it ends."""
