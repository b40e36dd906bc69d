"""Falcon: the draft network that gives some tokens in one pass.

- ``falcon``: the method: keys, drafter, stored layout.
- ``_network``: the parameters and a pass; ``_loss``: the loss of its blocks.
"""
