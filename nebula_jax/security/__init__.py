"""Layer 4, security: connections that are authenticated and encrypted."""
