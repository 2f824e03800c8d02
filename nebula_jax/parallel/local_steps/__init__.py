"""Local steps: every cluster trains a replica, and rounds average them."""
