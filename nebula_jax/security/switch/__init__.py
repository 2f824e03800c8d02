"""The switch of a lab: the only process with an outside address (section 2.4)."""
