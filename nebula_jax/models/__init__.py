"""What is trained: Flax linen modules with pure init and apply."""
