"""Models: Flax linen modules with pure init and apply."""
