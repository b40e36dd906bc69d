"""Layer skipping: drafts with the target itself, without some of its sublayers. L1 with "chain".

Draft & Verify (self-speculative decoding), Zhang et al. 2023 (2309.08168). A sublayer that is
skipped passes its input on. The draft reads the target's keys and values of the committed text, so
it has no cache and no parameters; what it computes for its own tokens is dropped.

The authors stop a draft after an unsure token: ``control="matchness:0.8"`` (0.5 for sampling), with
drafts of up to 8 tokens. Their sampled variant drafts the most probable token by default and judges
it by the probability of drawing it; that is biased. Here a sampled draft is drawn from the
probabilities that it is judged by.

Which sublayers can be skipped depends on the model: ``python -m specjax.bench.skip_search`` finds
them. It also depends on the text: with ``choices`` each row takes one of several sets, by the
acceptance in its earlier rounds, an idea of SWIFT (Xia et al. 2024, 2410.06916).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from specjax.bound import Bound
from specjax.checks import whole
from specjax.drafters import _growth
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import TreeKeys
from specjax.drafters.self_speculation import _own_cache, _skip_choice, _skip_sets, _skip_text
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import LM, Drafter

REFERENCE = ("zhang2024draft", "xia2025swift")

SHARED = TreeKeys
GAMMA = 8


def make(
    target: LM,
    *,
    skip_attention: str | os.PathLike | Sequence[int],
    skip_mlp: str | os.PathLike | Sequence[int],
    choices: str | os.PathLike | Sequence[str | os.PathLike] = "",
    gamma: int | None = None,
    **shared: Any,
) -> Drafter:
    """Drafts with the target without some attentions and feed-forward parts.

    Args:
        target: the model to be accelerated.
        skip_attention: the layers whose attention is left out, as in "3-6,9"; "": none. Or the
            file of a search, skips.json, or its directory.
        skip_mlp: the layers whose feed-forward part is left out, in the same form.
        choices: files of further searches, separated by commas: each row drafts with the set that
            has paid best in its own text; "": one set for all.
        gamma: draft tokens per round of a chain; None: 8.
        shared: the keys of ``TreeKeys``; the default is a chain, drawn from the draft's
            probabilities ("iid").

    Raises:
        UserError: layers that the target does not have, a set that leaves nothing, a shape that
            does not fit.
    """
    keys = TreeKeys(**shared)
    if gamma is not None and (keys.tree or keys.nodes):
        raise UserError(f"gamma is {gamma} and a tree is given too; give one of them")
    gamma = GAMMA if gamma is None else whole("gamma", gamma, 1)
    chosen = _skip_sets.read(target, skip_attention, skip_mlp)
    more = _skip_sets.files_of(choices)
    sets = [chosen, *(_skip_sets.read(target, file, file) for file in more)]
    assert target.layers is not None
    layers = target.layers
    parts = list(dict.fromkeys(each.left(layers) for each in sets))
    plan = _growth.read(Method("layer_skip", shapes.chain(gamma), "iid", target.vocab_size), keys)
    if len(parts) > 1:
        return _skip_choice.build(target, tuple(parts), plan)
    return _own_cache.build(
        "layer_skip",
        _own_cache.Inner(target.with_part(parts[0])),
        plan,
        probs=Bound(_skip_text.probs, target, parts[0]),
    )
