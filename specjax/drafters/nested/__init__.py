"""Drafters that contain other drafters."""
