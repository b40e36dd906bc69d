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
from specjax.drafters.draft_models import spire_model as spire
from specjax.drafters.draft_models.spire_model import SpireConfig
from specjax.models import lm
from specjax.models.token_bytes import of_tokens
from specjax.testing.models import keyed, random_table, tabular, tiny, tiny_config, tiny_t5
from specjax.testing.plain_cases import IRREGULAR, PROMPT, REPEATED, VOCAB, Case, deep
from specjax.types import LM, Drafter, ModelParams, Params

__all__ = ["IRREGULAR", "PROMPT", "REPEATED", "VOCAB", "Case"]

PROMPTS = (PROMPT, [0, 2], [1, 1], [0, 0])
# Keys that several cases have.
PAIRS = {"tree": "2x1", "siblings": "without_replacement"}
SKIPPED = {"skip_attention": (1,), "skip_mlp": (0,)}
MATCHNESS = "matchness:0.4,0.4,0.3,0.3"


class Models(NamedTuple):
    """What the cases are made of."""

    target: LM
    draft: LM
    other: LM  # a second draft model
    params: tuple[Params, ...]  # of the three


def models(vocab: int = VOCAB) -> tuple[LM, LM, LM]:
    """Target and two draft models."""
    return tabular(vocab), tabular(vocab, "draft"), tabular(vocab, "other draft")


def table(seed: int, vocab: int = VOCAB, sparse: bool = False) -> jax.Array:
    """``testing.random_table``, with the vocabulary of the cases."""
    return random_table(seed, vocab, sparse=sparse)


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


Keys = dict[str, Any] | Callable[[Models], dict[str, Any]]
Entry = tuple[str, Keys] | Callable[[Models], Drafter]
"""The name of a drafter and its keys, which may depend on the models; or what makes it."""

_MAIN: dict[str, Entry] = {
    "none": ("none", {}),
    "prompt_lookup": ("prompt_lookup", {"gamma": 2, "max_ngram": 2}),
    "llma": (
        "llma",
        lambda models: {"gamma": 2, "max_ngram": 2, "datastore": _text(models.target.vocab_size)},
    ),
    "ngram_lm": (
        "ngram_lm",
        lambda models: {"gamma": 2, "mode": "sample", "tables": _ngrams(models.target.vocab_size)},
    ),
    "jacobi": ("jacobi", {"gamma": 2}),
    "lookahead": ("lookahead", {"window": 2, "ngram": 3, "candidates": 2}),
    "token_recycling": ("token_recycling", {"tree": "2x1", "top_k": 2}),
    "trie": ("trie", {"nodes": 4, "depth": 2, "max_ngram": 2, "samples": 8}),
    "sam": (
        "sam",
        lambda models: {"gamma": 2, "min_match": 1, "max_ngram": 3, "bias": 1, **_store(models)},
    ),
    "suffix": ("suffix", {"nodes": 4, "depth": 2, "max_ngram": 4, "samples": 8}),
    "rest": (
        "rest",
        lambda models: {"nodes": 4, "depth": 2, "max_ngram": 3, "samples": 8, **_store(models)},
    ),
    "early_exit": ("early_exit", {"exit_layer": 1, "gamma": 2}),
    "early_exit reuse": ("early_exit", {"exit_layer": 1, "gamma": 2, "reuse": True}),
    "early_exit tree": ("early_exit", {"exit_layer": 1, **PAIRS}),
    "spire": ("spire", lambda models: {"gamma": 2, **_spire(models)}),
    "spire tree": (
        "spire",
        lambda models: {"tree": "2x1", "siblings": "iid", **_spire(models)},
    ),
    "layer_skip": ("layer_skip", {"gamma": 2, **SKIPPED}),
    "layer_skip matchness": ("layer_skip", {"gamma": 2, "control": MATCHNESS, **SKIPPED}),
    "layer_skip tree": ("layer_skip", {"control": MATCHNESS, **PAIRS, **SKIPPED}),
}
# Name of the case -> (name of the drafter, its keys); their parameters are random.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "early_exit layer": ("early_exit", {"exit_layer": 1, "adapter": "layer", "gamma": 2}),
    "early_exit linear": (
        "early_exit",
        {"exit_layer": 1, "adapter": "linear", "head": "own", "nodes": 4, "tree": "dynamic"}
        | {"depth": 2},
    ),
    "medusa": ("medusa", {"heads": 2, "tree": "2x1"}),
    "hydra": (
        "hydra",
        {"heads": 2, "layers": 2, **PAIRS},
    ),
    "mlp_speculator": ("mlp_speculator", {"heads": 2, "inner": 4, "siblings": "iid"}),
    "bpd": ("bpd", {"heads": 2}),
    "redrafter": ("redrafter", {"heads": 2, "layers": 1, "top_k": 2}),
    "redrafter chain": ("redrafter", {"layers": 1, "tree": "chain:2", "siblings": "iid"}),
    "eagle": ("eagle", {**PAIRS}),
    "eagle chain": ("eagle", {"gamma": 2, "siblings": "iid"}),
    "eagle dynamic": ("eagle", {"nodes": 5, "depth": 2, "top_k": 2}),
    "eagle3": ("eagle3", {"nodes": 4, "depth": 2, "top_k": 2, "draft_ids": (0, 2)}),
    "eagle3 chain": (
        "eagle3",
        {"gamma": 2, "siblings": "iid", "control": "threshold:0.4", "norm_output": True},
    ),
    "eagle3 tree": (
        "eagle3",
        {"tree": "2x1", "siblings": "iid", "draft_ids": (0, 2), "fc_norm": True, "layers": 2},
    ),
    "p_eagle": ("eagle3", {"parallel": 2, "layers": 2, "draft_ids": (0, 2), "fc_norm": True}),
    "p_eagle tree": (
        "eagle3",
        {"parallel": 2, "layers": 1, "tree": "best_parents", "nodes": 4, "top_k": 2},
    ),
    "block_head": ("block_head", {"block": 3}),
    # The logits are corrected by the draft's tokens.
    "block_head markov": (
        "block_head",
        {"block": 2, "anchor": True, "correction": "rnn", "rank": 4, "confidence": True}
        | {"tree": "2x1", "siblings": "iid", "control": "calibrated"},
    ),
    "block_head tree": (
        "block_head",
        {"causal": True, "tree": "best_parents", "nodes": 4, "top_k": 2},
    ),
    "mtp_module": (
        "mtp_module",
        {"modules": 2, **PAIRS},
    ),
    "mtp_module chain": (
        "mtp_module",
        {"gamma": 2, "siblings": "iid", "hidden": "raw", "control": "threshold:0.4"},
    ),
    "mtp_module dynamic": (
        "mtp_module",
        {"modules": 2, "tree": "dynamic", "nodes": 5, "depth": 2, "top_k": 2},
    ),
    "mtp": ("mtp", {"heads": 2, "siblings": "iid", "control": "threshold:0.4"}),
    "mtp tree": ("mtp", {"heads": 2, "tree": "best_first", "nodes": 4}),
    "mtp fixed": ("mtp", {"heads": 2, **PAIRS}),
    # Two blocks in each.
    "falcon": ("falcon", {"block": 1, "gamma": 2, "siblings": "iid"}),
    "falcon blocks": ("falcon", {"gamma": 4, "siblings": "iid"}),
    "falcon tree": (
        "falcon",
        {"block": 1, **PAIRS, "control": "threshold:0.4"},
    ),
    "falcon dynamic": ("falcon", {"nodes": 6, "depth": 4, "top_k": 2}),
    "pass": ("pass", {"heads": 2}),
    "pass tree": ("pass", {"heads": 2, "tree": "best_first", "nodes": 5}),
    "pass merged": (
        "pass",
        {"heads": 2, "calls": 1, **PAIRS},
    ),
}


def tiny_spire(
    seed: int = 0, sinks: int = 1, window: int = 3, scale: float = 8.0, **shape
) -> tuple[LM, dict]:
    """A random SPIRe draft model with feedback memory, and its params.

    Its cache has four slots, so texts of a few tokens do not fit; ``scale`` as in ``tiny``.
    """
    config = SpireConfig(tiny_config(**shape), sinks, window)
    params = lm.init_params(config.decoder, jax.random.key(seed))
    params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)
    return spire.from_config(config), spire.with_memory(config, params)


def _spire(models: Models) -> dict[str, Any]:
    model, params = tiny_spire(1, vocab_size=models.target.vocab_size, width=16)
    return {"model": model, "params": params}


def _store(models: Models) -> dict[str, Any]:
    return {"datastore": datastore.build(_text(models.target.vocab_size))}


def _ngrams(vocab: int) -> Any:
    return ngram_tables.count(_text(vocab), vocab, successors=2)


def _draft(models: Models) -> dict[str, Any]:
    return {"model": models.draft, "params": models.params[1]}


def _escalate(models: Models) -> Drafter:
    lookup = drafters.make("prompt_lookup", models.target, gamma=3, max_ngram=2, min_ngram=2)
    model = drafters.make("draft_model", models.target, gamma=2, gaps=True, **_draft(models))
    return drafters.make("escalate", models.target, drafters=[lookup, model])


def _controlled(models: Models) -> Drafter:
    keys = {"tree": "2x1", "siblings": "top_k", **_draft(models)}
    inner = drafters.make("draft_tree", models.target, **keys)
    return drafters.make("controlled", models.target, drafters=[inner], rate=0.6)


def _cascade(lengths: str) -> Entry:
    return "cascade", lambda models: {
        "models": [models.draft, models.other],
        "params": models.params[1:],
        "lengths": lengths,
    }


def _staged(models: Models) -> Drafter:
    lookup = drafters.make("prompt_lookup", models.target, gamma=2, max_ngram=2)
    return drafters.make("staged", models.target, drafters=[lookup], gamma=2, **_draft(models))


# Drafters that contain other drafters, or a draft model with a rule of its own.
_NESTED: dict[str, Entry] = {
    "escalate": _escalate,
    "controlled": _controlled,
    # Three levels: the second model and the lookup draft for the first one.
    "cascade": _cascade("2,0,0;1,0;1"),
    # A part of each model, then one of the lookup.
    "cascade in parts": _cascade("1,1,1;0,1;1"),
    "staged": _staged,
    "bild": ("bild", lambda models: {"gamma": 2, "fallback": 0.5, **_draft(models)}),
}
# Drafters that read a part of the target's keys and values: of most texts they leave out tokens.
_VIEWS: dict[str, Entry] = {
    "magicdec": ("magicdec", {"budget": 3, "sinks": 1, "gamma": 2}),
    "magicdec tree": (
        "magicdec",
        {"view": "retrieval", "budget": 2, "chunk": 2, "refresh": 2, **PAIRS},
    ),
    "magicdec snapkv": (
        "magicdec",
        {"view": "snapkv", "budget": 3, "window": 1, "queries": 2, "pool": 1, "gamma": 2},
    ),
}
_TRIFORCE = {"gamma": 2, "budget": 2, "chunk": 2, "refresh": 2, "model_budget": 2, "sinks": 1}


def tokens(vocab: int) -> tuple[bytes, ...]:
    """The bytes of the target's tokens, where the draft model has another vocabulary.

    Two tokens are shared, under other ids; one token of the target is written as two of the
    draft's, and with "slrs" as one too.
    """
    return (b"a", b"b", b"ab", *(bytes([99 + i]) for i in range(vocab - 3)))


def draft_tokens(vocab: int, last: bytes = b"?") -> tuple[bytes, ...]:
    """The bytes of the draft's tokens."""
    return (b"b", b"a", last, *reversed(tokens(vocab)[3:]))


def spelled(model: LM, texts: tuple[bytes, ...]) -> LM:
    """The model with this text for each token."""
    return model._replace(token_bytes=of_tokens(repr(texts), texts))


def _other_vocabulary(vocabulary: str, **keys: Any) -> Entry:
    def make(models: Models) -> Drafter:
        target, draft = models.target, models.draft
        last = b"ab" if vocabulary == "slrs" else b"?"
        return drafters.make(
            "draft_model",
            spelled(target, tokens(target.vocab_size)),
            model=spelled(draft, draft_tokens(draft.vocab_size, last)),
            vocabulary=vocabulary,
            **keys,
        )

    return make


def _tree(siblings: str, tree: Any = "2x1") -> Callable[[Models], Drafter]:
    return lambda models: draft_tree.make(
        models.target, model=models.draft, tree=tree, siblings=siblings
    )


def _model(method: str, **keys: Any) -> Entry:
    return method, lambda models: {"model": models.draft, **keys}


# Drafters with draft models; ``case`` gives the parameters.
_MODELS: dict[str, Entry] = {
    "chain": _model("draft_model", gamma=2),
    "iid": _tree("iid"),
    "pard": _model("pard", gamma=2, mask_id=0),
    "pard tree": _model("pard", mask_id=0, tree="best_first", nodes=4, depth=2),
    "independent": (
        "specinfer",
        lambda models: {"models": (models.draft, models.other), "tree": "chain:2"},
    ),
    "without_replacement": _tree("without_replacement"),
    "deterministic": _tree("top_k"),
    "dynamic": _model("dynamic_tree", nodes=5, depth=2, top_k=2),
    "irregular": _tree("iid", IRREGULAR),
    "ragged": lambda models: without_first_node(_tree("without_replacement")(models)),
    "triforce": _model("triforce", **_TRIFORCE),
    "tli": _other_vocabulary("tli", gamma=2),
    "tli tree": _other_vocabulary("tli", **PAIRS),
    "slem": _other_vocabulary("slem", gamma=2),
    "slrs": _other_vocabulary("slrs", gamma=2),
}
# These draft for encoder-decoder models alone.
_OF_ENCODERS: dict[str, dict[str, Any]] = {
    "spec_drafter": {"block": 2, "encoder_layers": 1},
    "spec_drafter tree": {"block": 2, "tree": "best_first", "nodes": 4},
    "spec_drafter siblings": {"block": 2, **PAIRS},
}
ENCODER_NAMES = tuple(_OF_ENCODERS)
_NO_MODEL = _MAIN | HEADS | _NESTED | _VIEWS
_READ_A_PART = (*_VIEWS, "triforce")
NAMES = (*_NO_MODEL, *_MODELS)


def _tables(name: str, vocab: int) -> tuple[LM, LM, LM]:
    """The tables of a case: target and two draft models."""
    if name not in _READ_A_PART:
        return models(vocab)
    return keyed(vocab), keyed(vocab, "draft"), keyed(vocab, "other draft")


@functools.cache
def _drafter(name: str, vocab: int) -> Drafter:
    tables = (jnp.zeros((vocab + 1, vocab, vocab)), table(1, vocab), table(2, vocab))
    return _build(name, Models(*_tables(name, vocab), tables))


def _build(name: str, models: Models) -> Drafter:
    if name in _OF_ENCODERS:
        own = {"scale": 0.5, **_OF_ENCODERS[name]}
        return random_heads("spec_drafter", models.target, models.params[0], **own)
    if name in HEADS:
        method, keys = HEADS[name]
        return random_heads(method, models.target, models.params[0], **keys)
    entry = (_NO_MODEL | _MODELS)[name]
    if callable(entry):
        return entry(models)
    method, keys = entry
    return drafters.make(method, models.target, **(keys(models) if callable(keys) else keys))


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


def named(name: str) -> Case:
    """One of NAMES, or "deep " with a kind of siblings and perhaps ", holes"."""
    if name.startswith("deep "):
        return deep(name[5:].removesuffix(", holes"), holes=name.endswith(", holes"))
    return case(name)


def family(name: str) -> str:
    """The family of the case's drafter: the name of its folder ("lookup", "heads"), or "none"."""
    method = _drafter(name, VOCAB).name.split(",")[0]
    return drafters.load(method).__name__.split(".")[2]
