"""Grows a draft from what a method can compute: one growth for draft models and heads.

A method is a ``Stepper``: the logits after the pending token, and the logits and the memory of
further nodes. ``build`` makes the drafter: it grows the draft in the shape of a ``Plan``, asks the
controller, and gives the accepted nodes back to the stepper.

- ``stepper``: what a method provides.
- ``plans``: from keys to the shape of a draft.
- ``siblings``: the children of nodes, and how they are drawn.
- ``levels``: the growth of a tree of a fixed shape.
- ``drafter``: the functions of a round; the growth of a chain in one compiled loop, and of a tree
  whose shape depends on the context.
"""

from specjax.drafters.growth.drafter import build, rest, updated
from specjax.drafters.growth.plans import Fixed, Plan, Pooled, read
from specjax.drafters.growth.siblings import KINDS, draw, family
from specjax.drafters.growth.stepper import (
    Begun,
    Drafted,
    Job,
    Nodes,
    Rows,
    State,
    Stepper,
    at,
    fed_to_target,
    lacking,
    logits_and_block,
    next_layout,
    room,
    step_at_depth,
    step_of_model,
)
