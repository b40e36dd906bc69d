"""Keys that several drafters share, declared once.

A method's module sets ``SHARED = HeadKeys``, and its ``make(target, *, own_key=..., **shared)``
begins with ``keys = HeadKeys(**shared)``. ``specjax.registry`` reads the names and types from here.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from specjax.data.datastore import Store
from specjax.topology.shapes import Topology
from specjax.types import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeKeys:
    """The shape of a draft, for every drafter with parameters (``drafters/_growth``)."""

    # A shape as ``topology.shapes.parse`` reads it, or "dynamic" (EAGLE-2), "beam" (ReDrafter's
    # beam search), or for heads that do not read the draft's tokens "best_first" (DDTree) or
    # "best_parents" (JetSpec), or "search": the best fixed shape of ``nodes`` nodes. "" is the
    # method's default; with ``nodes`` "search" if the default is a fixed shape.
    tree: Topology | str = ""
    # Nodes of a tree that depends on the context (0: 32, or as many as there can be), or of the
    # paths of a beam search (0: room for all); else the size of the tree to search for, with the
    # accuracies measured at the end of training; 0: no search.
    nodes: int = 0
    # Levels of a dynamic, beam or best-first tree; 0: the number of heads, or 5.
    depth: int = 0
    # Dynamic: how many nodes of a level get children, and how many each; 0: 6. Beam: how many paths
    # there are; 0: 6. Best-first: the most children of a node; 0: no limit. Best parents: the
    # children of a node; 0: 6.
    top_k: int = 0
    # The search: "optimal" (Sequoia's dynamic program) or "greedy" (Medusa's: the likeliest next
    # node).
    search: str = "optimal"
    # "top_k" (the most probable tokens), or drawn from the drafter's probabilities:
    # "without_replacement" or "iid". "" is the method's default.
    siblings: str = ""
    # Ends a draft early: a controller and its numbers, as ``control.parse`` reads it
    # ("threshold:0.4"). "": every draft has full length.
    control: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadKeys(TreeKeys):
    """Heads on the target's features: where they come from, and the shape of a draft."""

    # Directory of heads, trained by specjax or released by the authors of the method.
    model: str | os.PathLike | None = None
    # Number of heads; 0: as in the files, or the method's default for new heads.
    heads: int = 0
    # The heads' parameters, instead of ``model``.
    params: Params = None
    # dtype in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere. Read float32 to
    # train the heads further.
    dtype: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkKeys(TreeKeys):
    """A draft network over the target's features: its source, its sizes, the shape of a draft."""

    # Directory of a network, trained by specjax or released by the authors of the method.
    model: str | os.PathLike | None = None
    # Its parameters, instead of ``model``, with the keys that the network was made with: the
    # tensors do not show all of them.
    params: Params = None
    # dtype in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere. Read float32 to
    # train the network further.
    dtype: Any = None
    # A chain of so many tokens, instead of ``tree`` or ``nodes``; None: not given.
    gamma: int | None = None
    # Sizes of a new network; 0: as in the files, or the default that is named. Attention heads:
    # width / ``head_dim``.
    heads: int = 0
    # Key and value heads: ``heads``.
    kv_heads: int = 0
    # Width of an attention head: the largest even divisor of the width up to 64.
    head_dim: int = 0
    # Width of the feed-forward: 8/3 of the width.
    inner: int = 0
    # Whether a new network has a norm of each head's queries and keys; in files the tensors decide,
    # and True is an error where they are missing.
    qk_norm: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedKeys(NetworkKeys):
    """A draft network of several decoder layers."""

    # Decoder layers of a new network; 0: as in the files, or 1.
    layers: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleKeys(StackedKeys):
    """A draft network that reads the text one token ahead of the features."""

    # 1: a slot reads the token after that of its feature. 0 is an ablation: the token of its
    # feature, so a node's children do not depend on its own token.
    shift: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatastoreKeys:
    """Keys of the drafters that can look up earlier outputs (``lookup/_memory.py``)."""

    # Texts to begin with: a ``Store``, its directory, or a recording (.jsonl). None: no text.
    datastore: Store | str | os.PathLike | None = None
    # Tokens of earlier outputs that are kept in addition to the datastore, with ``learn``.
    memory: int = 65536
    # Limits the drafts by what earlier rounds accepted: one of the controllers in
    # ``control.limiting``, as ``control.parse`` reads it ("heuristic:5"). "": no limit.
    control: str = ""
