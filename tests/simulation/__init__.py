"""A deterministic simulation of whole runs, with faults."""
