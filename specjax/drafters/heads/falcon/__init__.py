"""Falcon: the draft network that gives some tokens in one pass."""
