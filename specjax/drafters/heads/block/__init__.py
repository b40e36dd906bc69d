"""A draft network that gives a whole block in one pass.

- ``block_head``: the method: keys, drafter, loss.
- ``_network``: the parameters and a pass; ``_corrections``: of its logits by drafted tokens.
- ``_files``: the layouts of stored heads.
"""
