"""Drafters with trained heads on the target's features."""
