"""Layer 4, its processes: an organization's switch, and the way to it (section 2.4)."""
