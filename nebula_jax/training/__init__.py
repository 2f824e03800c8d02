"""Layer 1, training optimisation: objectives, and where a model is cut."""
