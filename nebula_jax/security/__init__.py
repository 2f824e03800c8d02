"""Layer 4, security: who may speak, and that nobody else can listen."""
