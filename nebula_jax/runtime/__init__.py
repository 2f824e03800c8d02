"""The life of a run, without flags: for our experiments and for loops of your own."""
