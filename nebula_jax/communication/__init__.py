"""Layer 3, communication: what crosses, how, and over what kind of line."""
