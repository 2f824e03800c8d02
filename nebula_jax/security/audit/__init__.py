"""The audit log of a lab, which nobody can change unnoticed (section 2.4)."""
