"""Keys that several drafters share. A method's ``Keys`` extends one of these classes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Self

from specjax import declare
from specjax.checks import ngrams
from specjax.control import Controller
from specjax.data.datastore import Store
from specjax.declare import key
from specjax.errors import UserError
from specjax.topology.shapes import Topology
from specjax.types import LM, Params


def stored_size(
    help: str, size: Callable[[Params], Any] | None = None, new: int | None = None, fact: str = ""
) -> Any:
    """A key that is a number which stored parameters show, as in ``declare.Facts``.

    0: as they have it, or ``new`` for new ones (None: the method finds it).
    """
    return key(0, help, least=0, new=new, size=size, fact=fact)


def stated_switch(help: str, fact: str) -> Any:
    """A key that is a boolean which config.json has under ``fact``; False where it is missing."""
    return key(False, help, fact=fact, missing=False)


def check_mask(mask_id: int | None, model: LM, what: str = "target") -> None:
    """Raises UserError for a key ``mask_id`` that is no token of the model, the ``what``."""
    if mask_id is not None and not 0 <= mask_id < model.vocab_size:
        raise UserError(f"mask_id is {mask_id}; the {what}'s tokens are 0..{model.vocab_size - 1}")


class TreeKeys(declare.Keys):
    """The shape of a draft, for every drafter with parameters (``drafters/growth``)."""

    gamma: int | None = key(
        None, "the length of a chain, instead of ``tree`` or ``nodes``", least=1
    )
    tree: Topology | str = key(
        "",
        'a shape ("4x2x1", "chain:4", ...), or "dynamic" (EAGLE-2), "beam" (ReDrafter\'s beam '
        'search), "search" (the best fixed shape of ``nodes`` nodes), or for heads that do not '
        'read the draft\'s tokens "best_first" (DDTree) or "best_parents" (JetSpec); "": the '
        'method\'s default, with ``nodes`` "search" if that is a fixed shape',
    )
    nodes: int = key(
        0,
        "nodes of a tree that depends on the context (0: 32, or as many as there can be; EAGLE-2 "
        "has 60 in 6 levels, with a top_k of 10), or of the paths of a beam search (0: room for "
        "all); else the size of the tree to search for, with the accuracies measured at the end of "
        "training; 0: no search",
        least=0,
    )
    depth: int = key(
        0, "levels of a dynamic, beam or best-first tree; 0: the number of heads, or 5", least=0
    )
    top_k: int = key(
        0,
        "dynamic: how many nodes of a level get children, and how many each; 0: 6. Beam: how many "
        "paths there are; 0: 6. Best-first: the most children of a node; 0: no limit. Best "
        "parents: the children of a node; 0: 6",
        least=0,
    )
    search: str = key(
        "optimal",
        'the search for a tree: "optimal" (Sequoia\'s dynamic program) or "greedy" (Medusa\'s: the '
        "likeliest next node)",
        choices=("optimal", "greedy"),
    )
    siblings: str = key(
        "",
        '"top_k" (the most probable tokens), or drawn from the drafter\'s probabilities: '
        '"without_replacement", "iid", or "coupled" (with the target\'s noise, for the rule '
        '"coupled"); "": the method\'s default',
        choices=("", "without_replacement", "iid", "top_k", "coupled"),
    )
    control: str | Controller = key(
        "",
        'ends a draft early: a controller and its numbers, as in "threshold:0.4"; "": every draft '
        "has full length",
    )


class StoredKeys(TreeKeys):
    """Trained parameters: where they come from, and the shape of a draft."""

    model: str | os.PathLike | None = key(
        None, "directory of them, trained by specjax or released by the authors of the method"
    )
    params: Params = key(
        None, "the parameters themselves, with the keys that they were made with", python=True
    )
    dtype: Any = key(
        None,
        "in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere, float16 on GPUs "
        "without bfloat16. Read float32 to train further",
        python=True,
    )


class HeadKeys(StoredKeys):
    """Heads on the target's features."""

    heads: int = key(
        0, "how many; 0: as in the files, or the method's default for new heads", least=0
    )


class NetworkKeys(StoredKeys):
    """A draft network over the target's features: its source, its sizes, the shape of a draft."""

    probe: bool = key(
        False,
        "decode some tokens under each reading that the files of ``model`` leave open, and draft "
        "with the best one",
    )
    heads: int = key(
        0,
        "attention heads; 0: as in the files, or the target's if new (at another width: width / "
        "``head_dim``)",
        least=0,
    )
    kv_heads: int = key(
        0, "key and value heads; 0: as in the files, or in the target's ratio if new", least=0
    )
    head_dim: int = key(
        0, "width of an attention head; 0: as in the files, or the target's if new", least=0
    )
    inner: int = key(
        0,
        "width of the feed-forward; 0: as in the files, or the target's if new (at another width: "
        "8/3 of it)",
        least=0,
    )
    qk_norm: bool = key(
        False,
        "whether a new network has a norm of each head's queries and keys; in files the tensors "
        "decide, and True is an error where they are missing",
    )


class StackedKeys(NetworkKeys):
    """A draft network of several decoder layers."""

    layers: int = key(0, "decoder layers; 0: as in the files, or 1 if new", least=0)


class EagleKeys(StackedKeys):
    """A draft network that reads the text one token ahead of the features."""

    shift: int = key(
        1,
        "1: a slot reads the token after that of its feature. 0 is an ablation: the token of its "
        "feature, so a node's children do not depend on its own token",
        least=0,
        most=1,
        fact="shift",
        missing=1,
    )


class LimitedKeys(declare.Keys):
    """Drafts that are proposed whole (``drafters/_limited``)."""

    control: str | Controller = key(
        "",
        "limits the drafts by what earlier rounds accepted: one of ``control.limiting``, as in "
        '"heuristic:5"; "": no limit',
    )

    def check(self) -> None:
        longest, shortest = (getattr(self, name, 1) for name in ("max_ngram", "min_ngram"))
        ngrams(longest, shortest)

    def settings(self) -> Self:
        """The keys as static settings of a program: without the controller and the data."""
        unread = {"control": "", "datastore": None, "memory": 0}
        own = {name: value for name, value in unread.items() if hasattr(self, name)}
        return dataclasses.replace(self, **own)


class DatastoreKeys(LimitedKeys):
    """Keys of the drafters that can look up earlier outputs (``lookup/_memory``)."""

    datastore: Store | str | os.PathLike | None = key(
        None, "texts to begin with: a ``Store``, its directory, or a recording (.jsonl)"
    )
    memory: int = key(
        65536,
        "tokens of earlier outputs that are kept in addition to the datastore, with ``learn``",
    )


def model_params(which: str) -> Any:
    """The key ``params`` beside a key ``model``, which is the ``which`` ("draft") model."""
    return key(None, f"the {which} model's parameters when ``model`` is an ``LM``", python=True)


class ModelKeys(declare.Keys):
    """A small language model that drafts."""

    model: LM | str | os.PathLike = key(
        help="the draft model: an ``LM``, or any model that ``hf.load`` takes"
    )
    gaps: bool = key(
        False,
        "whether other drafters may propose in some rounds; ``escalate`` sets it",
        python=True,
    )
    params: Params = model_params("draft")


class DraftKeys(ModelKeys, TreeKeys):
    """A small language model, and the shape of a draft."""
