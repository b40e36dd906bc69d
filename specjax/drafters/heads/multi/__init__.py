"""Heads that read the target's last feature: one for each depth, or one cell for all.

- ``medusa``, ``hydra``, ``bpd``, ``mlp_speculator``, ``mtp``, ``redrafter``: the methods.
- ``_heads``: the drafter and the loss that they share.
"""
