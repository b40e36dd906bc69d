"""Small cases for proofs: tables as models, and one drafter of every kind.

A method's cases are in its own test file: ``MATRIX``, a literal dict of name -> (drafter, keys,
rules of its pairs that run by default). Files below tests/drafters are read, not imported. A value
that begins with "@" is one of ``_value``; "drafters" are pairs (drafter, keys).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from mutants import maps

from specjax import accept, drafters, registry
from specjax.bound import Bound
from specjax.data import datastore, ngram_tables
from specjax.drafters.draft_models import draft_tree
from specjax.drafters.draft_models import spire_model as spire
from specjax.drafters.draft_models.spire_model import SpireConfig
from specjax.models import lm
from specjax.models.token_bytes import TokenBytes
from specjax.testing.models import keyed, random_table, tabular, tiny, tiny_config, tiny_t5
from specjax.testing.plain_cases import IRREGULAR, PROMPT, REPEATED, VOCAB, Case, deep
from specjax.types import LM, Drafter, ModelParams, Params

__all__ = ["IRREGULAR", "PROMPT", "REPEATED", "VOCAB", "Case"]

PROMPTS = (PROMPT, [0, 2], [1, 1], [0, 0])
PAIRS = {"tree": "2x1", "siblings": "without_replacement"}


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
    drawn = jax.tree.map(lambda x: (scale * draw.normal(size=x.shape)).astype(x.dtype), like)
    # Not jnp.asarray, which compiles a program for every shape.
    params = jax.device_put(drawn)
    return drafters.make(name, target, params=params, **keys)


class Entry(NamedTuple):
    """A case as its file declares it."""

    drafter: str
    keys: dict[str, Any]
    rules: tuple[str, ...]  # of the pairs that run by default


def _declared() -> dict[str, Entry]:
    """The cases of all methods, in the order of their files."""
    found = {"none": Entry("none", {}, ("chain",))}
    for file in sorted(Path(__file__).parent.glob("drafters/*/test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MATRIX":
                for name, entry in ast.literal_eval(node.value).items():
                    assert name not in found, f"{file}: {name} is there twice"
                    found[name] = Entry(*entry)
    return found


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


def _value(value: Any, models: Models) -> Any:
    """A value of a key of ``MATRIX``."""
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    vocab = models.target.vocab_size
    return {
        "@draft": lambda: models.draft,
        "@draft params": lambda: models.params[1],
        "@drafts": lambda: (models.draft, models.other),
        "@drafts params": lambda: models.params[1:],
        "@text": lambda: _text(vocab),
        "@datastore": lambda: datastore.build(_text(vocab)),
        "@tables": lambda: ngram_tables.count(_text(vocab), vocab, successors=2),
        "@spire": lambda: tiny_spire(1, vocab_size=vocab, width=16)[0],
        "@spire params": lambda: tiny_spire(1, vocab_size=vocab, width=16)[1],
    }[value]()


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
    return model._replace(token_bytes=TokenBytes(repr(texts), texts))


def _other_vocabulary(vocabulary: str, **keys: Any) -> Callable[[Models], Drafter]:
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


def _tree(siblings: str, tree: Any) -> Callable[[Models], Drafter]:
    return lambda models: draft_tree.make(
        models.target, model=models.draft, tree=tree, siblings=siblings
    )


# Cases that no literal declares: they differ from others in topology, or in the models' texts.
_MADE: dict[str, tuple[Callable[[Models], Drafter], tuple[str, ...]]] = {
    "irregular": (_tree("iid", IRREGULAR), ()),
    "ragged": (lambda models: without_first_node(_tree("without_replacement", "2x1")(models)), ()),
    "tli": (_other_vocabulary("tli", gamma=2), ("chain",)),
    "tli tree": (_other_vocabulary("tli", **PAIRS), ()),
    "slem": (_other_vocabulary("slem", gamma=2), ()),
    "slrs": (_other_vocabulary("slrs", gamma=2), ()),
}
_DECLARED = _declared()
# Name -> rules of its pairs that run by default.
RULES = {name: entry.rules for name, entry in _DECLARED.items()}
RULES |= {name: rules for name, (_, rules) in _MADE.items()}
# These draft for encoder-decoder models alone.
ENCODER_NAMES = tuple(name for name, each in _DECLARED.items() if each.drafter == "spec_drafter")
# Drafters with draft models alone; ``case`` gives the parameters.
MODELS = tuple(
    name
    for name in RULES
    if name in _MADE
    or ({"model", "models"} & set(keys := _DECLARED[name].keys) and "params" not in keys)
)
NAMES = tuple(name for name in RULES if name not in ENCODER_NAMES)
# Drafters that read a part of the target's keys and values: of most texts they leave out tokens.
_READ_A_PART = tuple(name for name, each in _DECLARED.items() if "budget" in each.keys)


# Further settings with which a case drafts.
SETTINGS = {"forced": {"grammar": maps.AUTOMATON, "vocab_size": VOCAB}}
# These cases differ from another one in topology alone: one rule is enough for each.
ONLY = {"irregular": ("recursive",), "ragged": ("traversal",)}


# Pairs of the drafters of encoder-decoder models, in tests/test_encoder_decoder.py.
ENCODER_PAIRS = (
    ("spec_drafter", "chain"),
    ("spec_drafter tree", "match"),
    ("spec_drafter siblings", "recursive"),
)


def drafter_of(name: str) -> str:
    """The drafter of a case."""
    return _DECLARED[name].drafter if name in _DECLARED else case(name).drafter.name.split(",")[0]


def pairs() -> list[tuple[str, str, bool]]:
    """(case, rule, whether it runs by default) of all pairs but ``ENCODER_PAIRS``."""
    rules = {name: accept.load(name) for name in accept.names()}
    result = []
    for name in NAMES:
        siblings = case(name).drafter.siblings
        for rule in ONLY.get(name, rules):
            if siblings in rules[rule].siblings:
                result.append((name, rule, rule in RULES[name]))
    return result


def _tables(name: str, vocab: int) -> tuple[LM, LM, LM]:
    """The tables of a case: target and two draft models."""
    if name not in _READ_A_PART:
        return models(vocab)
    return keyed(vocab), keyed(vocab, "draft"), keyed(vocab, "other draft")


@functools.cache
def _drafter(name: str, vocab: int, **more: Any) -> Drafter:
    tables = (jnp.zeros((vocab + 1, vocab, vocab)), table(1, vocab), table(2, vocab))
    return build(name, Models(*_tables(name, vocab), tables), **more)


def limited(name: str, control: str) -> Case:
    """A case whose drafter has this controller."""
    return case(name)._replace(drafter=_drafter(name, VOCAB, control=control))


# The first case of each method that takes a controller.
CONTROLLED = {
    each.drafter: name
    for name, each in reversed(_DECLARED.items())
    if "control" in registry.keys_of(drafters.load(each.drafter)) and name not in ENCODER_NAMES
}


def build(name: str, models: Models, **more: Any) -> Drafter:
    """The drafter of a case, for these models, with ``more`` keys; heads have random parameters."""
    if name in _MADE:
        return _MADE[name][0](models)
    method, keys, _ = _DECLARED[name]
    keys = {key: _value(value, models) for key, value in keys.items()} | more
    if inner := keys.get("drafters"):
        keys["drafters"] = [
            drafters.make(other, models.target, **{k: _value(v, models) for k, v in own.items()})
            for other, own in inner
        ]
    drafter = drafters.make(method, models.target, **keys)
    training = drafter.training
    if training is None or training.start is None or "model" in keys:
        return drafter
    scale = 0.5 if name in ENCODER_NAMES else 1.0
    return random_heads(method, models.target, models.params[0], scale=scale, **keys)


@functools.cache
def real(name: str, family: str = "llama", layers: int = 1, dtype: Any = jnp.float32) -> Case:
    """One of NAMES with real decoders: the target, and as draft models smaller ones.

    ``family`` is that of the target and of a draft model; ``layers`` are those of draft models.
    """
    sizes = {"vocab_size": VOCAB, "width": 16, "dtype": dtype}
    target, params = tiny(family, 0, **sizes)
    draft, first = tiny("gpt2" if family == "llama" else family, 1, layers=layers, **sizes)
    other, second = tiny("llama", 2, layers=1, **sizes)
    drafter = build(name, Models(target, draft, other, (params, first, second)))
    own = (first, second) if name == "independent" else first
    own = drafter.init_params(jax.random.key(0)) if name not in MODELS else own
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
    drafter = build(name, Models(target, draft, other, (params, first, second)))
    own = (first, second) if name == "independent" else first
    own = own if name in MODELS else drafter.init_params(jax.random.key(0))
    return Case(name, target, drafter, ModelParams(params, own))


def case(name: str, vocab: int = VOCAB, sparse: bool = False, seed: int = 0) -> Case:
    """One of NAMES; a name always gives the same drafter object, so its programs are shared."""
    target = _tables(name, vocab)[0]
    drafter = _drafter(name, vocab)
    draft = table(seed + 1, vocab, sparse)
    if name not in MODELS:
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
