"""Small cases for proofs: tables as models, and one drafter of every kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafters
from specjax.data import datastore, ngram_tables
from specjax.drafters.draft_models import draft_tree
from specjax.testing.models import tabular
from specjax.topology.shapes import Topology
from specjax.types import LM, Drafter, ModelParams, Params

VOCAB = 3
PROMPT = [2, 1]
PROMPTS = (PROMPT, [0, 2], [1, 1], [0, 0])
# Eight nodes on three levels, with three, two, one and no children.
IRREGULAR = Topology((-1, -1, -1, 0, 0, 1, 3, 3))


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
    """Logits f[V+1,V,V] for ``tabular``, float64 where x64 is enabled.

    ``sparse``: in half of the contexts one token has probability 0.
    """
    logits = np.random.default_rng(seed).normal(size=(vocab + 1, vocab, vocab)) * 1.5
    if sparse:
        rng = np.random.default_rng(seed)
        for context in np.ndindex(logits.shape[:2]):
            if rng.random() < 0.5:
                logits[(*context, rng.integers(vocab))] = -np.inf
    return jnp.asarray(logits, jnp.result_type(float))


def without_first_node(drafter: Drafter) -> Drafter:
    """The same drafter; its first node, and so its descendants, are never valid."""

    def propose(params, keys, context, state):
        draft, state = drafter.propose(params, keys, context, state)
        return draft.replace(valid=draft.valid & (jnp.arange(drafter.nodes) > 0)), state

    return drafter._replace(propose=propose, name=f"{drafter.name}, ragged")


def _text(vocab: int) -> list[list[int]]:
    """Two documents, for drafters with a datastore."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, vocab, size).tolist() for size in (40, 24)]


def random_heads(
    name: str, target: LM, target_params: Params, seed: int = 0, scale: float = 1.0, **keys: Any
) -> Drafter:
    """Heads with normal parameters of this scale, norms and biases too, unlike their start values.

    ``keys`` are the keys of the drafter ``name``.
    """
    training = drafters.make(name, target, **keys).training
    assert training is not None and training.start is not None
    start = training.start
    like = jax.eval_shape(start, target_params, jax.random.key(0))
    draw = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: jnp.asarray(scale * draw.normal(size=x.shape), x.dtype), like)
    return drafters.make(name, target, params=params, **keys)


def _heads(name: str, **keys: Any) -> Callable[[LM], Drafter]:
    return lambda target: random_heads(
        name, target, jnp.zeros((target.vocab_size + 1,) + (target.vocab_size,) * 2), **keys
    )


def _escalate(target: LM, draft: LM) -> Drafter:
    lookup = drafters.make("prompt_lookup", target, gamma=3, max_ngram=2, min_ngram=2)
    model = drafters.make(
        "draft_model", target, model=draft, gamma=2, params=table(1, target.vocab_size), gaps=True
    )
    return drafters.make("escalate", target, drafters=[lookup, model])


def _controlled(target: LM, draft: LM) -> Drafter:
    keys = {
        "model": draft,
        "tree": "2x1",
        "siblings": "top_k",
        "params": table(1, target.vocab_size),
    }
    return drafters.make(
        "controlled", target, drafters=[drafters.make("draft_tree", target, **keys)], rate=0.6
    )


# Name -> its drafter, from the target and two draft models; ``case`` gives the parameters.
_MODELS: dict[str, Callable[[LM, LM, LM], Drafter]] = {
    "chain": lambda target, draft, other: drafters.make(
        "draft_model", target, model=draft, gamma=2
    ),
    "iid": lambda target, draft, other: draft_tree.make(
        target, model=draft, tree="2x1", siblings="iid"
    ),
    "independent": lambda target, *models: drafters.make(
        "specinfer", target, models=models, tree="chain:2"
    ),
    "without_replacement": lambda target, draft, other: draft_tree.make(
        target, model=draft, tree="2x1", siblings="without_replacement"
    ),
    "deterministic": lambda target, draft, other: draft_tree.make(
        target, model=draft, tree="2x1", siblings="top_k"
    ),
    "dynamic": lambda target, draft, other: drafters.make(
        "dynamic_tree", target, model=draft, nodes=5, depth=2, top_k=2
    ),
    "irregular": lambda target, draft, other: draft_tree.make(
        target, model=draft, tree=IRREGULAR, siblings="iid"
    ),
    "ragged": lambda target, draft, other: without_first_node(
        draft_tree.make(target, model=draft, tree="2x1", siblings="without_replacement")
    ),
}
_NO_MODEL: dict[str, Callable[[LM], Drafter]] = {
    "none": lambda target: drafters.make("none", target),
    "prompt_lookup": lambda target: drafters.make("prompt_lookup", target, gamma=2, max_ngram=2),
    "llma": lambda target: drafters.make(
        "llma", target, gamma=2, max_ngram=2, datastore=_text(target.vocab_size)
    ),
    "ngram_lm": lambda target: drafters.make(
        "ngram_lm",
        target,
        gamma=2,
        mode="sample",
        tables=ngram_tables.count(_text(target.vocab_size), target.vocab_size, successors=2),
    ),
    "jacobi": lambda target: drafters.make("jacobi", target, gamma=2),
    "lookahead": lambda target: drafters.make("lookahead", target, window=2, ngram=3, candidates=2),
    "token_recycling": lambda target: drafters.make("token_recycling", target, tree="2x1", top_k=2),
    "trie": lambda target: drafters.make("trie", target, nodes=4, depth=2, max_ngram=2, samples=8),
    "sam": lambda target: drafters.make(
        "sam",
        target,
        gamma=2,
        max_ngram=3,
        bias=1,
        datastore=datastore.build(_text(target.vocab_size)),
    ),
    "suffix": lambda target: drafters.make(
        "suffix", target, nodes=4, depth=2, max_ngram=4, samples=8
    ),
    "rest": lambda target: drafters.make(
        "rest",
        target,
        nodes=4,
        depth=2,
        max_ngram=3,
        samples=8,
        datastore=datastore.build(_text(target.vocab_size)),
    ),
    "escalate": lambda target: _escalate(target, models(target.vocab_size)[1]),
    "controlled": lambda target: _controlled(target, models(target.vocab_size)[1]),
    "medusa": _heads("medusa", heads=2, tree="2x1"),
    "hydra": _heads("hydra", heads=2, layers=2, tree="2x1", siblings="without_replacement"),
    "mlp_speculator": _heads("mlp_speculator", heads=2, inner=4, siblings="iid"),
    "bpd": _heads("bpd", heads=2),
}
NAMES = (*_NO_MODEL, *_MODELS)


@functools.cache
def _drafter(name: str, vocab: int) -> Drafter:
    target = models(vocab)[0]
    return _NO_MODEL[name](target) if name in _NO_MODEL else _MODELS[name](*models(vocab))


def case(name: str, vocab: int = VOCAB, sparse: bool = False, seed: int = 0) -> Case:
    """One of NAMES; a name always gives the same drafter object, so its programs are shared."""
    target = models(vocab)[0]
    drafter = _drafter(name, vocab)
    draft = table(seed + 1, vocab, sparse)
    if name in _NO_MODEL:
        draft = drafter.init_params(jax.random.key(seed))
    elif name == "independent":
        draft = (draft, table(seed + 2, vocab, sparse))
    return Case(name, target, drafter, ModelParams(table(seed, vocab), draft))


def family(name: str) -> str:
    """The family of the case's drafter: the name of its folder ("lookup", "heads"), or "none"."""
    method = _drafter(name, VOCAB).name.split(",")[0]
    return drafters.load(method).__name__.split(".")[2]
