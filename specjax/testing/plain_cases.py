"""Cases for rules: drafts without a model, deep, wide or empty; and cases by name."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.testing import cases, plain_drafts
from specjax.testing.cases import VOCAB, Case, table
from specjax.topology.shapes import Topology
from specjax.types import (
    CHAIN,
    DETERMINISTIC,
    IID,
    INDEPENDENT,
    WITHOUT_REPLACEMENT,
    ModelParams,
)

# A chain of four, and a tree of three levels with three siblings on each, not numbered by levels.
LONG_CHAIN = Topology((-1, 0, 1, 2))
DEEP_TREE = Topology((-1, -1, -1, 0, 0, 0, 3, 3, 3, 1, 9))
# Kind of siblings -> vocabulary with which all outcomes of its deep drafts are enumerated.
_DEEP = {CHAIN: 3, IID: 2, INDEPENDENT: 2, WITHOUT_REPLACEMENT: 3, DETERMINISTIC: 4}


def deep(siblings: str, *, holes: bool = False, sparse: bool = False, seed: int = 0) -> Case:
    """A chain of four nodes, or a tree of three levels with three siblings, of one kind.

    ``holes``: some nodes below valid ones are never valid.
    """
    vocab = _DEEP[siblings]
    chain = siblings == CHAIN
    shape = LONG_CHAIN if chain else DEEP_TREE
    drafter = plain_drafts.make(shape, siblings, ((2,) if chain else (4, 6, 9)) if holes else ())
    tables = jnp.stack([table(seed + 1 + k, vocab, sparse and k == 0) for k in range(3)])
    params = ModelParams(table(seed, vocab), tables)
    name = f"deep {siblings}" + ", holes" * holes + ", sparse" * sparse
    return Case(name, cases.models(vocab)[0], drafter, params)


def star(siblings: str, width: int, vocab: int = VOCAB, seed: int = 0) -> Case:
    """``width`` siblings below the pending token and nothing below them; 0: an empty draft."""
    shape = Topology((-1,) * width)
    tables = jnp.stack([table(seed + 1 + k, vocab) for k in range(3)])
    drafter = plain_drafts.make(shape, siblings)
    params = ModelParams(table(seed, vocab), tables)
    return Case(f"{width} {siblings}", cases.models(vocab)[0], drafter, params)


def named(name: str) -> Case:
    """One of ``cases.NAMES``, or "deep " with a kind of siblings and perhaps ", holes"."""
    if name.startswith("deep "):
        return deep(name[5:].removesuffix(", holes"), holes=name.endswith(", holes"))
    return cases.case(name)


def prompt(case: Case, tokens=cases.PROMPT) -> list[int]:
    """The tokens, in the vocabulary of the case."""
    return [token % case.target.vocab_size for token in tokens]
