"""How a method joins an objective that trains a model: ``DISTILLED`` or ``PRETRAINED`` in its file.

Training knows no method: it reads these declarations from the module that ``config.drafter.name``
names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specjax import declare, drafters
from specjax.types import LM, Params


class Distilled(NamedTuple):
    """How objective distill trains the draft model of a method."""

    keys: type[declare.Keys]  # of config.drafter
    # () -> the module of its draft models: ``shape_of(decoder, keys)``, ``with_memory(shape,
    # params)``, ``from_config``, ``load``, ``save``. None: they are plain decoders.
    network: Callable[[], Any] | None = None
    # (target, keys) -> the keys of its drafter, whose own loss is trained. None: the divergence
    # between the probs of both models.
    drafter: Callable[[LM, Any], dict[str, Any]] | None = None
    # (keys of the drafter) -> further keys of the model's config.json. None: there are none.
    facts: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


class Pretrained(NamedTuple):
    """How objective pretrain trains heads of a method together with their target."""

    loss: Mapping[str, Any]  # keys of their loss without which its labels would not be the text
    allowed: tuple[str, ...]  # the keys of their loss that fit labels from the text
    # (target, key, keys of the drafter) -> their first parameters beside a random target. None:
    # those of ``Training.start``.
    first: Callable[[LM, Any, Mapping[str, Any]], Params] | None = None


def distilled(name: str) -> Distilled | None:
    """How the method joins objective distill; None: it does not. Raises UserError."""
    return getattr(drafters.load(name), "DISTILLED", None)


def pretrained(name: str) -> Pretrained | None:
    """How the method joins objective pretrain; None: it does not. Raises UserError."""
    return getattr(drafters.load(name), "PRETRAINED", None)
