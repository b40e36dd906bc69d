"""Drafters that draft with the target's own layers or its own cache."""
