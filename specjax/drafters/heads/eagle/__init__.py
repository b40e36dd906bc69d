"""Draft networks over the target's features: EAGLE-1 to EAGLE-3, and modules of released models."""
