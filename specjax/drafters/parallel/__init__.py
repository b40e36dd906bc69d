"""Drafters that guess several positions in parallel with the target itself."""
