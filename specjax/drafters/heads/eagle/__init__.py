"""Draft networks over the target's features: EAGLE-1 to EAGLE-3, and modules of released models.

- ``eagle``, ``eagle3``, ``mtp_module``: the methods, with their keys.
- ``_network``: the parameters and a pass of the network.
- ``_drafter``: the stepper; ``drafters.growth`` grows the draft with it.
- ``_loss``: the loss of unrolled drafts (that of P-EAGLE is in ``heads._masked_text``).
- ``_files``: the layouts of stored heads.
"""
