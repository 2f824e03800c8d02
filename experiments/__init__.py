"""One short, readable file per experiment, each with its own training loop."""
