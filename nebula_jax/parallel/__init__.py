"""Layer 2, parallelization: within a cluster, and between clusters."""
