"""Text to train on."""

from __future__ import annotations

from flax import struct

from specjax.types.model import Array


class Features(struct.PyTreeNode):
    """What a target computed for the T tokens of a text, stored: parts of its ``Output``."""

    hidden: Array  # [B,T,E]
    taps: tuple[Array, ...] = ()  # [B,T,E] each


class Batch(struct.PyTreeNode):
    """Text to train on. Position t of the T that a model is fed has the label ``tokens[:, t + 1]``.

    Padding and prompts are not labels. Attention stays inside one document.
    """

    tokens: Array  # i32[B,T+1]
    labelled: Array | None = None  # bool[B,T+1] tokens that may be a label; None = all
    segments: Array | None = None  # i32[B,T+1] number of the document; None = one per row
    # Of the first T tokens; None: a loss that needs them runs the target.
    features: Features | None = None
    # i32[B] the number of the training step, from 0, the same in every row: for a loss that changes
    # during training. None: the loss does not depend on it.
    step: Array | None = None
    # i32[B,T+1] the depth of a draft, from 0, that a label is for: a loss of several depths counts
    # it at this depth only. None: labels are for all depths.
    depths: Array | None = None
    # i32[B] the place of the token with which an encoder-decoder model begins its output: no draft
    # begins before it. None: drafts begin everywhere.
    output: Array | None = None
