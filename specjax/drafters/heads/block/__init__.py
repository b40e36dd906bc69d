"""A draft network that gives a whole block in one pass."""
