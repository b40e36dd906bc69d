"""Training of draft models, heads and targets.

- ``recipes``: what each objective trains on; ``recipes.heads`` is that of all heads.
- The losses: of language models in ``objectives``, of a head in its own folder
  (``specjax.drafters.heads.eagle._loss`` for EAGLE-3).
- ``loop`` runs the steps, ``update`` computes one, ``checkpoint`` stores the state.
- ``evaluate`` and ``examine`` measure what was learnt, ``online`` trains while it decodes.
- ``settings``: the keys of a configuration.
"""
