"""Drafters with trained heads on the target's features.

- ``multi``: heads on the last feature. ``eagle``, ``block``, ``falcon``: draft networks.
- ``_along_text``: what drafts along a text predict, and where labels count.
- ``_depth_loss``: the loss of such drafts; ``_masked_text``: that of masks (P-EAGLE, PARD).
- ``_prefix``: a decoder layer over features, with its own cache. ``_shape``: sizes and taps of a
  network. ``_vocabulary``: a draft vocabulary.
"""
