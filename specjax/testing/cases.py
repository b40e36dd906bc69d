"""Small cases on which rules and drafters are proven: tables as models, one drafter of every kind."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafters
from specjax.drafters import draft_tree
from specjax.testing.models import tabular
from specjax.topology import Topology
from specjax.types import LM, Drafter, ModelParams

VOCAB = 3
PROMPT = [2, 1]
PROMPTS = (PROMPT, [0, 2], [1, 1], [0, 0])
IRREGULAR = Topology((-1, -1, -1, 0, 0, 1, 3, 3))  # eight nodes, three levels, no two alike


class Case(NamedTuple):
    """A drafter with its models."""

    name: str
    target: LM
    drafter: Drafter
    params: ModelParams


@functools.cache
def models(vocab: int = VOCAB) -> tuple[LM, LM, LM]:
    """Target and two draft models."""
    return tabular(vocab), tabular(vocab, "draft"), tabular(vocab, "other draft")


def table(seed: int, vocab: int = VOCAB, sparse: bool = False) -> jax.Array:
    """Logits f[V+1,V,V] in the widest float that is enabled; ``sparse``: in half of the contexts one token is impossible."""
    logits = np.random.default_rng(seed).normal(size=(vocab + 1, vocab, vocab)) * 1.5
    if sparse:
        rng = np.random.default_rng(seed)
        for context in np.ndindex(logits.shape[:2]):
            if rng.random() < 0.5:
                logits[(*context, rng.integers(vocab))] = -np.inf
    return jnp.asarray(logits, jnp.result_type(float))


def without_the_eldest(drafter: Drafter) -> Drafter:
    """The same drafter with its first node withdrawn, and what hangs below it, whatever was drawn."""

    def propose(params, keys, context, state):
        draft, state = drafter.propose(params, keys, context, state)
        return draft.replace(valid=draft.valid & (jnp.arange(drafter.nodes) > 0)), state

    return drafter._replace(propose=propose, name=f"{drafter.name}, ragged")


@functools.cache
def _drafter(name: str, vocab: int) -> Drafter:
    target, draft, other = models(vocab)
    if name in ("none", "prompt_lookup"):
        return drafters.make(name, target, **({"gamma": 2, "max_ngram": 2} if name == "prompt_lookup" else {}))
    if name == "chain":
        return drafters.make("draft_model", target, model=draft, gamma=2)
    if name == "dynamic":
        return drafters.make("dynamic_tree", target, model=draft, nodes=5, depth=2, top_k=2)
    if name == "independent":
        return drafters.make("specinfer", target, models=(draft, other), tree="chain:2")
    if name == "irregular":
        return draft_tree.make(target, model=draft, tree=IRREGULAR, siblings="iid")
    if name == "ragged":
        return without_the_eldest(draft_tree.make(target, model=draft, tree="2x1", siblings="without_replacement"))
    kind = "top_k" if name == "deterministic" else name
    return draft_tree.make(target, model=draft, tree="2x1", siblings=kind)


NAMES = (
    "none",
    "prompt_lookup",
    "chain",
    "iid",
    "independent",
    "without_replacement",
    "deterministic",
    "dynamic",
    "irregular",
    "ragged",
)


def case(name: str, vocab: int = VOCAB, sparse: bool = False, seed: int = 0) -> Case:
    """One of NAMES; the same objects every time, so that nothing is compiled twice."""
    target = models(vocab)[0]
    made = _drafter(name, vocab)
    draft = table(seed + 1, vocab, sparse)
    if name in ("none", "prompt_lookup"):
        draft = {}
    elif name == "independent":
        draft = (draft, table(seed + 2, vocab, sparse))
    return Case(name, target, made, ModelParams(table(seed, vocab), draft))
