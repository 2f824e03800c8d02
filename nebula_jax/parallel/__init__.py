"""Layer 2, parallelisation: within a cluster, and between clusters."""
