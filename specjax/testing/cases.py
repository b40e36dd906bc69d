"""Small cases for proofs: tables as models, and one drafter of every kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafters
from specjax.bound import Bound
from specjax.data import datastore, ngram_tables
from specjax.drafters.draft_models import draft_tree
from specjax.testing import head_cases, nested_cases, view_cases, vocabulary_cases
from specjax.testing.keyed import keyed
from specjax.testing.models import tabular, tiny, tiny_spire, tiny_t5
from specjax.topology.shapes import Topology
from specjax.types import LM, Drafter, ModelParams, Params

VOCAB = 3
PROMPT = [2, 1]
PROMPTS = (PROMPT, [0, 2], [1, 1], [0, 0])
# Its last two tokens occurred before, so lookups draft.
REPEATED = [0, 2, 1, 0, 2, 1]
# Eight nodes on three levels, with three, two, one and no children.
IRREGULAR = Topology((-1, -1, -1, 0, 0, 1, 3, 3))


class Case(NamedTuple):
    """A drafter with its models."""

    name: str
    target: LM
    drafter: Drafter
    params: ModelParams


class Models(NamedTuple):
    """What the cases are made of."""

    target: LM
    draft: LM
    other: LM  # a second draft model
    params: tuple[Params, ...]  # of the three


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
    propose = Bound(_without_first, drafter)
    return drafter._replace(propose=propose, name=f"{drafter.name}, ragged", whole=False)


def _without_first(drafter: Drafter, params, keys, context, state):
    draft, state = drafter.propose(params, keys, context, state)
    return draft.replace(valid=draft.valid & (jnp.arange(drafter.nodes) > 0)), state


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


def _heads(name: str, **keys: Any) -> Callable[[LM, Models], Drafter]:
    return lambda target, models: random_heads(name, target, models.params[0], **keys)


def _skipping(**keys: Any) -> Callable[[LM, Models], Drafter]:
    """A draft without two sublayers: layers that tables and the real decoder both have."""
    own = {"skip_attention": (1,), "skip_mlp": (0,)}
    return lambda target, models: drafters.make("layer_skip", target, **own, **keys)


def _spire(target: LM, **keys: Any) -> Drafter:
    model, params = tiny_spire(1, vocab_size=target.vocab_size, width=16)
    return drafters.make("spire", target, model=model, params=params, **keys)


# Name -> its drafter, from the target and two draft models; ``case`` gives the parameters.
_MODELS: dict[str, Callable[[LM, LM, LM], Drafter]] = {
    "chain": lambda target, draft, other: drafters.make(
        "draft_model", target, model=draft, gamma=2
    ),
    "iid": lambda target, draft, other: draft_tree.make(
        target, model=draft, tree="2x1", siblings="iid"
    ),
    "pard": lambda target, draft, other: drafters.make(
        "pard", target, model=draft, gamma=2, mask_id=0
    ),
    "pard tree": lambda target, draft, other: drafters.make(
        "pard", target, model=draft, mask_id=0, tree="best_first", nodes=4, depth=2
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
_NO_MODEL: dict[str, Callable[[LM, Models], Drafter]] = {
    "none": lambda target, models: drafters.make("none", target),
    "prompt_lookup": lambda target, models: drafters.make(
        "prompt_lookup", target, gamma=2, max_ngram=2
    ),
    "llma": lambda target, models: drafters.make(
        "llma", target, gamma=2, max_ngram=2, datastore=_text(target.vocab_size)
    ),
    "ngram_lm": lambda target, models: drafters.make(
        "ngram_lm",
        target,
        gamma=2,
        mode="sample",
        tables=ngram_tables.count(_text(target.vocab_size), target.vocab_size, successors=2),
    ),
    "jacobi": lambda target, models: drafters.make("jacobi", target, gamma=2),
    "lookahead": lambda target, models: drafters.make(
        "lookahead", target, window=2, ngram=3, candidates=2
    ),
    "token_recycling": lambda target, models: drafters.make(
        "token_recycling", target, tree="2x1", top_k=2
    ),
    "trie": lambda target, models: drafters.make(
        "trie", target, nodes=4, depth=2, max_ngram=2, samples=8
    ),
    "sam": lambda target, models: drafters.make(
        "sam",
        target,
        gamma=2,
        min_match=1,
        max_ngram=3,
        bias=1,
        datastore=datastore.build(_text(target.vocab_size)),
    ),
    "suffix": lambda target, models: drafters.make(
        "suffix", target, nodes=4, depth=2, max_ngram=4, samples=8
    ),
    "rest": lambda target, models: drafters.make(
        "rest",
        target,
        nodes=4,
        depth=2,
        max_ngram=3,
        samples=8,
        datastore=datastore.build(_text(target.vocab_size)),
    ),
    "early_exit": lambda target, models: drafters.make("early_exit", target, exit_layer=1, gamma=2),
    "early_exit reuse": lambda target, models: drafters.make(
        "early_exit", target, exit_layer=1, gamma=2, reuse=True
    ),
    "early_exit tree": lambda target, models: drafters.make(
        "early_exit", target, exit_layer=1, tree="2x1", siblings="without_replacement"
    ),
    "spire": lambda target, models: _spire(target, gamma=2),
    "spire tree": lambda target, models: _spire(target, tree="2x1", siblings="iid"),
    "layer_skip": _skipping(gamma=2),
    "layer_skip matchness": _skipping(gamma=2, control="matchness:0.4,0.4,0.3,0.3"),
    "layer_skip tree": _skipping(
        tree="2x1", siblings="without_replacement", control="matchness:0.4,0.4,0.3,0.3"
    ),
}
# These draft for encoder-decoder models alone.
_OF_ENCODERS: dict[str, Callable[[LM, Models], Drafter]] = {
    "spec_drafter": _heads("spec_drafter", block=2, encoder_layers=1, scale=0.5),
    "spec_drafter tree": _heads("spec_drafter", block=2, tree="best_first", nodes=4, scale=0.5),
    "spec_drafter siblings": _heads(
        "spec_drafter", block=2, tree="2x1", siblings="without_replacement", scale=0.5
    ),
}
ENCODER_NAMES = tuple(_OF_ENCODERS)
_NO_MODEL |= {name: _heads(method, **keys) for name, (method, keys) in head_cases.KEYS.items()}
_NO_MODEL |= nested_cases.NO_MODEL | view_cases.NO_MODEL
_MODELS |= view_cases.MODELS | vocabulary_cases.MODELS
NAMES = (*_NO_MODEL, *_MODELS)


def _tables(name: str, vocab: int) -> tuple[LM, LM, LM]:
    """The tables of a case: target and two draft models."""
    if name not in view_cases.NAMES:
        return models(vocab)
    return keyed(vocab), keyed(vocab, "draft"), keyed(vocab, "other draft")


@functools.cache
def _drafter(name: str, vocab: int) -> Drafter:
    tables = (jnp.zeros((vocab + 1, vocab, vocab)), table(1, vocab), table(2, vocab))
    return _build(name, Models(*_tables(name, vocab), tables))


def _build(name: str, models: Models) -> Drafter:
    if name in _NO_MODEL or name in _OF_ENCODERS:
        return (_NO_MODEL | _OF_ENCODERS)[name](models.target, models)
    return _MODELS[name](models.target, models.draft, models.other)


@functools.cache
def real(name: str) -> Case:
    """One of NAMES with real decoders: the target, and as draft models smaller ones."""
    sizes = {"vocab_size": VOCAB, "width": 16}
    target, params = tiny("llama", 0, **sizes)
    draft, first = tiny("gpt2", 1, layers=1, **sizes)
    other, second = tiny("llama", 2, layers=1, **sizes)
    drafter = _build(name, Models(target, draft, other, (params, first, second)))
    own = (first, second) if name == "independent" else first
    own = drafter.init_params(jax.random.key(0)) if name in _NO_MODEL else own
    return Case(name, target, drafter, ModelParams(params, own))


@functools.cache
def with_encoder(name: str) -> Case:
    """One of NAMES or ENCODER_NAMES with encoder-decoder models.

    The draft models are smaller ones.
    """
    target, params = tiny_t5(0, vocab_size=VOCAB)
    small = {"vocab_size": VOCAB, "num_layers": 1}
    draft, first = tiny_t5(1, **small)
    other, second = tiny_t5(2, gated=True, activation="gelu_tanh", scale_logits=False, **small)
    drafter = _build(name, Models(target, draft, other, (params, first, second)))
    own = (first, second) if name == "independent" else first
    own = own if name in _MODELS else drafter.init_params(jax.random.key(0))
    return Case(name, target, drafter, ModelParams(params, own))


def case(name: str, vocab: int = VOCAB, sparse: bool = False, seed: int = 0) -> Case:
    """One of NAMES; a name always gives the same drafter object, so its programs are shared."""
    target = _tables(name, vocab)[0]
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
