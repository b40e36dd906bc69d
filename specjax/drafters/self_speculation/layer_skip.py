"""Layer skipping: drafts with the target itself, without some of its sublayers. L1 with "chain".

Draft & Verify (self-speculative decoding), Zhang et al. 2023 (2309.08168). A sublayer that is
skipped passes its input on. The draft reads the target's keys and values of the committed text, so
it has no cache and no parameters; what it computes for its own tokens is dropped.

The authors stop a draft after an unsure token: ``control="matchness:0.8"`` (0.5 for sampling), with
drafts of up to 8 tokens. Their sampled variant drafts the most probable token by default and judges
it by the probability of drawing it; that is biased. Here a sampled draft is drawn from the
probabilities that it is judged by.

Which sublayers can be skipped depends on the model:
``python -m specjax.drafters.self_speculation.skip_search`` finds them. It also depends on the
text: with ``choices`` each row takes one of several sets, by the acceptance in its earlier rounds,
an idea of SWIFT (Xia et al. 2024, 2410.06916).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare, tree
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import growth
from specjax.drafters.growth import Begun, Nodes, Stepper
from specjax.drafters.growth.plans import Method
from specjax.drafters.self_speculation import _own_cache, _skip_sets
from specjax.drafters.self_speculation._own_cache import Inner
from specjax.drafters.shared_keys import TreeKeys
from specjax.prompt import check_window
from specjax.topology import shapes
from specjax.types import LM, Array, Context, Drafter, ModelParams, Verdict, no_params

# Several sets of skipped sublayers: each row drafts with the one that paid best in its text.
#
# The idea of SWIFT (Xia et al. 2024, 2410.06916) and its relatives, that the best set depends on
# the text, with sets that were found before. A row takes each set for a round, and then always the
# one with the highest upper confidence bound (UCB1, Auer et al. 2002) of its tokens per time. The
# choice depends on earlier rounds only, so the output law does not change.
#
# A pass computes the sets that some row of the batch has taken: at batch 1 one of them.


# The weight of the bound's uncertain part: rounds differ by about so much of a plain step's speed.
EXPLORE = 0.3


class State(struct.PyTreeNode):
    """Of each row: the set in use, and the measured rounds and tokens of all sets."""

    choice: Array  # i32[B] the set of the next draft
    rounds: Array  # f32[B,n] rounds with each set
    value: Array  # f32[B,n] the mean of tokens per time, in tokens per plain step


class Setup(NamedTuple):
    """The static settings."""

    models: tuple[LM, ...]  # the parts
    costs: tuple[float, ...]  # of a draft step with each, in plain steps
    depth: int  # M, draft steps in a round


def _init(setup: Setup, params: ModelParams, context: Context, *_: Any) -> State:
    shape = (context.length.shape[0], len(setup.models))
    return State(jnp.zeros(shape[:1], jnp.int32), jnp.zeros(shape), jnp.zeros(shape))


def _begin(setup: Setup, params: ModelParams, context: Context, kept: State) -> Begun:
    """``Stepper.begin``: the pending token has the first place of each set's block."""
    pass_, none = (params.target, context.pending[:, None], context.cache, None), (None,)
    logits, memory = _chosen(setup, kept.choice, pass_, none * len(setup.models))
    return Begun(logits[:, 0], kept, memory, reads=(context.cache, kept.choice))


def _step(
    setup: Setup, params: ModelParams, reads: tuple[Any, Array], nodes: Nodes, blocks: Any
) -> tuple[Array, Any]:
    cache, choice = reads
    return _chosen(setup, choice, (params.target, nodes.tokens, cache, nodes.layout), blocks)


def _chosen(
    setup: Setup, choice: Array, pass_: tuple[Any, ...], blocks: tuple[Any, ...]
) -> tuple[Array, tuple[Any, ...]]:
    """The logits of each row's set, and the memory of all; that of a set that no row took is 0.

    ``pass_`` has the arguments of ``LM.apply`` but the block.
    """
    logits, memories = None, []
    for index, (model, block) in enumerate(zip(setup.models, blocks, strict=True)):
        one = Bound(growth.logits_and_block, model, *pass_, block)
        own, memory = jax.lax.cond((choice == index).any(), one, Bound(tree.zeros, one))
        mine = (choice == index)[:, None, None]
        logits = own if logits is None else jnp.where(mine, own, logits)
        memories.append(memory)
    assert logits is not None
    return logits, tuple(memories)


def _commit(
    setup: Setup, params: ModelParams, kept: State, drafted: None, verdict: Verdict, *_: Any
) -> State:
    accepted = (verdict.path >= 0).sum(-1)
    times = 1 + setup.depth * jnp.asarray(setup.costs, jnp.float32)
    newest = (1 + accepted) / times[kept.choice]
    mine = jnp.arange(len(setup.models)) == kept.choice[:, None]
    rounds = kept.rounds + mine
    value = jnp.where(mine, kept.value + (newest[:, None] - kept.value) / rounds, kept.value)
    total = rounds.sum(-1, keepdims=True)
    bound = value + EXPLORE * jnp.sqrt(2 * jnp.log(total) / jnp.maximum(rounds, 1))
    choice = jnp.argmax(jnp.where(rounds == 0, jnp.inf, bound), -1).astype(jnp.int32)
    new = State(choice, rounds, value.astype(kept.value.dtype))
    return tree.where_rows(verdict.count > 0, new, kept)


REFERENCE = ("zhang2024draft", "xia2025swift")

GAMMA = 8


class Keys(TreeKeys):
    """The keys of ``layer_skip``."""

    skip_attention: str | os.PathLike | Sequence[int] = key(
        help='the layers whose attention is left out, as in "3-6,9"; "": none. Or the file of a '
        "search, skips.json, or its directory."
    )
    skip_mlp: str | os.PathLike | Sequence[int] = key(
        help="the layers whose feed-forward part is left out, in the same form"
    )
    choices: str | os.PathLike | Sequence[str | os.PathLike] = key(
        "",
        "files of further searches, separated by commas: each row drafts with the set that has "
        'paid best in its own text; "": one set for all',
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with the target without some attentions and feed-forward parts.

    Raises:
        UserError: layers that the target does not have, a set that leaves nothing, a shape that
            does not fit, drafts longer than a sliding window of the target.
    """
    chosen = _skip_sets.read(target, keys.skip_attention, keys.skip_mlp)
    more = _skip_sets.files_of(keys.choices)
    sets = [chosen, *(_skip_sets.read(target, file, file) for file in more)]
    assert target.layers is not None
    parts = tuple(dict.fromkeys([each.left(target.layers) for each in sets]))
    plan = growth.read(Method("layer_skip", shapes.chain(GAMMA), "iid", target.vocab_size), keys)
    if len(parts) == 1:
        inner, probs = Inner(target.with_part(parts[0])), Bound(_skip_sets.probs, target, parts[0])
        return _own_cache.build("layer_skip", inner, plan, probs=probs)
    void = {*_skip_sets.without_mlp(target)}
    sizes = [len(p.attention) + len({*p.mlp} - void) for p in parts]
    costs = tuple(size / (2 * target.layers - len(void)) for size in sizes)
    setup = Setup(tuple(map(target.with_part, parts)), costs, plan.growth.depth)
    begin, step, init, commit = (Bound(each, setup) for each in (_begin, _step, _init, _commit))
    stepper = Stepper(begin, step, init, commit, looped=True)
    drafter = growth.build("layer_skip", stepper, plan, no_params)
    check_window(target, drafter)
    # A draft step costs what those sets cost that the rows have taken.
    return drafter._replace(history=True, constant_cost=False)
