"""Heads that read the target's last feature: one for each depth, or one cell for all."""
