"""Block drafters: a small network drafts a whole block of tokens in one pass.

One component for DFlash and the drafters after it, which differ in a few switches:

- DFlash (2602.06036): the target's taps, fused once, are keys and values of every layer; the block
  is the pending token and masks, attends to itself in both directions, and its masks predict.
- DSpark (2607.05147, ``anchor``, ``correction="markov"``, ``confidence``): the pending token's
  place predicts too; a low-rank bias corrects each depth by the token drafted before it.
- JetSpec (2606.18394, ``causal``): attention inside the block is causal; ``tree="best_parents"``.
- Domino (2605.29707, ``anchor``, ``correction="gru"``): a GRU over the draft's tokens corrects.
- DFlare (2606.02091, ``context="mixed"``): each layer has its own mixture of the taps.

Without a correction the probabilities of a depth are the same on all paths, so best-first trees
(DDTree, 2604.12989) cost no further pass. The default is a sampled chain: the probabilities after
the correction are those that a token is drawn from. L1 with the rules for the draft's siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specjax.bound import Bound
from specjax.drafters._keys import StackedKeys
from specjax.drafters.heads import _block, _block_shape, _block_text, _given
from specjax.drafters.heads._block_network import Net
from specjax.types import LM, Drafter

REFERENCE = (
    "chen2026dflash",
    "cheng2026dspark",
    "hu2026jetspec",
    "huang2026domino",
    "zhang2026dflare",
)

SHARED = StackedKeys


def make(
    target: LM,
    *,
    taps: Sequence[int] | str = (),
    block: int = 0,
    context: str = "",
    causal: bool = False,
    anchor: bool | None = None,
    correction: str = "",
    rank: int = 0,
    state: int = 0,
    plain: int | None = None,
    confidence: bool = False,
    window: int = 0,
    mask_id: int | None = None,
    **shared: Any,
) -> Drafter:
    """Drafts with a block network.

    Keys but ``model`` and the shape of a draft are for a new network. Of a stored one the tensors
    and config.json decide, and another value is an error. Only ``anchor`` replaces what the files
    state, with a warning: some released files do not state it.

    Args:
        target: the model whose layers it reads, and whose embeddings and LM head it uses.
        taps: the layers, from 0, whose outputs it reads, as "1,5,9"; empty: as many as the network
            has, evenly spaced from 1 to L - 3 of L.
        block: places of a block, with the pending token's; 0: 8. It drafts block - 1 tokens, with
            ``anchor`` block.
        context: "shared" (one fusion of the taps, "") or "mixed" (one mixture for each layer).
        causal: whether a place attends only to the places before it.
        anchor: whether the pending token's place predicts, and each place the token after its own;
            None: as in the files, False for a new network.
        correction: "none" (""), "markov", "gated", "rnn" (DSpark) or "gru" (Domino).
        rank: of the correction; 0: 256.
        state: the width of the GRU; 0: the target's width.
        plain: how many first tokens the GRU does not correct; None: 1.
        confidence: whether it estimates that the next token is accepted, for ``control``.
        window: each layer but the last attends to less than so many positions before; 0: to all.
        mask_id: a token whose embedding the masks have; None: an embedding of their own.
        shared: the keys of ``StackedKeys``; without a shape a chain of full length, drawn from the
            probabilities ("iid").

    Raises:
        UserError: files without a network or of another target, sizes that differ from the files, a
            draft longer than the block, a mask_id outside the vocabulary, a tree that does not fit.
    """
    given = _given.read(_block.NAME, target, keys := StackedKeys(**shared))
    asked = (block, context, causal, anchor, correction, rank, state, plain, confidence, window)
    asked = dict(zip(_block_shape.KEYS, (*asked, mask_id), strict=True))
    shape = _block_shape.of(target, given, keys, taps, asked)
    ids = _block_shape.ids_of(target, given, shape)
    net = Net(shape, given.ends, _block_shape.dtype_of(given.params), ids)
    facts = _block_shape.facts(shape, ids)
    training = Bound(_block_text.training, target=target, facts=facts)
    return _block.build(target, net, keys, given, training)
