"""Layer 1, training optimization: objectives, and where a model is cut."""
