"""Grows a draft from what a method can compute: one growth for draft models and heads.

A method is a ``Stepper``: the logits after the pending token, and the logits and the memory of
further nodes. ``build`` makes the drafter: it grows the draft in the shape of a ``Plan``, asks the
controller, and gives the accepted nodes back to the stepper.

- ``stepper``: what a method provides.
- ``plans``: from keys to the shape of a draft.
- ``siblings``: the children of nodes, and how they are drawn.
- ``chain``, ``levels``, ``pool``: the growth of a chain in one compiled loop, of a tree of a fixed
  shape, and of a tree whose shape depends on the context.
- ``drafter``: the functions of a round.
"""

from specjax.drafters._growth.drafter import build, pausing
from specjax.drafters._growth.plans import Fixed, Plan, Pooled, read
from specjax.drafters._growth.siblings import KINDS, children
from specjax.drafters._growth.stepper import Begun, Drafted, Nodes, State, Stepper, at

__all__ = [
    "KINDS",
    "Begun",
    "Drafted",
    "Fixed",
    "Nodes",
    "Plan",
    "Pooled",
    "State",
    "Stepper",
    "at",
    "build",
    "children",
    "pausing",
    "read",
]
