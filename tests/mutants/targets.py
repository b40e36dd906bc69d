"""Wrong language models, each of which ``testing.check_lm`` must detect: model -> model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import tree
from specjax.types import LM


def _with_apply(change: Callable) -> Callable[[LM], LM]:
    """A mutant that calls ``change(lm, params, tokens, cache, layout, block)`` as its apply."""

    def mutant(lm: LM) -> LM:
        def apply(params, tokens, cache, layout=None, block=None):
            fed = 0 if block is None else block.size
            layout = tree.chain_layout(*tokens.shape, fed) if layout is None else layout
            return change(lm, params, tokens, cache, layout, block)

        return lm._replace(apply=apply)

    return mutant


def _one_position_late(lm, params, tokens, cache, layout, block):
    late = (cache.length > 0)[:, None] & (layout.depth >= 0)
    return lm.apply(params, tokens, cache, layout.replace(depth=layout.depth + late), block)


def _siblings_visible(lm, params, tokens, cache, layout, block):
    every = tree.chain_layout(
        tokens.shape[0], tokens.shape[1], layout.depth.shape[1] - tokens.shape[1]
    )
    return lm.apply(params, tokens, cache, layout.replace(visible=every.visible), block)


def _window_in_slots(lm, params, tokens, cache, layout, block):
    size = layout.depth.shape[1]
    slot = jnp.arange(size)
    near = slot > slot[size - tokens.shape[1] :, None] - lm.window
    return lm.apply(params, tokens, cache, layout.replace(visible=layout.visible & near), block)


def _logits_of_another_row(lm, params, tokens, cache, layout, block):
    out, new = lm.apply(params, tokens, cache, layout, block)
    return out._replace(logits=jnp.roll(out.logits, 1, 0)), new


def _positions_of_the_first_row(lm, params, tokens, cache, layout, block):
    first = cache.replace(length=jnp.broadcast_to(cache.length[0], cache.length.shape))
    return lm.apply(params, tokens, first, layout, block)


def _forgets_the_block(lm, params, tokens, cache, layout, block):
    hidden = layout.visible & (jnp.arange(layout.depth.shape[1]) >= 3)
    return lm.apply(
        params, tokens, cache, layout.replace(visible=hidden) if block else layout, block
    )


def _half_the_logits(lm, params, tokens, cache, layout, block):
    out, new = lm.apply(params, tokens, cache, layout, block)
    return out._replace(logits=out.logits.astype(jnp.float16)), new


def commits_in_order(lm: LM) -> LM:
    """The path of a commit is ignored."""
    return lm._replace(commit=lambda cache, block, count, path=None: lm.commit(cache, block, count))


def commits_at_least_one(lm: LM) -> LM:
    """A row of count 0 advances too."""

    def commit(cache, block, count, path=None):
        return lm.commit(cache, block, jnp.maximum(count, 1), path)

    return lm._replace(commit=commit)


def commits_the_batch_minimum(lm: LM) -> LM:
    """All rows advance by the smallest count."""

    def commit(cache, block, count, path=None):
        return lm.commit(cache, block, jnp.broadcast_to(count.min(), count.shape), path)

    return lm._replace(commit=commit)


def params_are_constants(params: Any) -> Callable[[LM], LM]:
    """The parameters of the first call are part of the program."""

    def mutant(lm: LM) -> LM:
        return lm._replace(apply=lambda _, *args, **keys: lm.apply(params, *args, **keys))

    return mutant


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Writable:
    """A cache whose content can be replaced."""

    cache: Any

    @property
    def length(self):
        return self.cache.length

    def tree_flatten(self):
        return (self.cache,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def apply_writes(lm: LM) -> LM:
    """``apply`` commits what it computed."""

    def apply(params, tokens, cache, layout=None, block=None):
        out, new = lm.apply(params, tokens, cache.cache, layout, block)
        cache.cache = lm.commit(cache.cache, new, jnp.ones_like(cache.length))
        return out, new

    return lm._replace(
        init_cache=lambda *sizes: Writable(lm.init_cache(*sizes)),
        apply=apply,
        commit=lambda cache, *args: Writable(lm.commit(cache.cache, *args)),
    )


# Name -> the mutant of a model with a sliding window, and the check that detects it.
TARGETS: dict[str, tuple[Callable[[LM], LM], str]] = {
    "a block after a text is one position late": (
        _with_apply(_one_position_late),
        "a block equals steps",
    ),
    "siblings are visible": (
        _with_apply(_siblings_visible),
        "a tree equals the chains of its paths",
    ),
    "the window is counted in slots": (
        _with_apply(_window_in_slots),
        "a tree equals the chains of its paths",
    ),
    "logits of another row": (
        _with_apply(_logits_of_another_row),
        "any other rows",
    ),
    "all rows have the positions of the first": (
        _with_apply(_positions_of_the_first_row),
        "rows of unequal length",
    ),
    "the block of earlier calls is not read": (
        _with_apply(_forgets_the_block),
        "a tree in two parts",
    ),
    "logits of half precision": (_with_apply(_half_the_logits), "what its functions return"),
    "commit takes nodes in order": (commits_in_order, "commit follows path and count"),
    "a row of count 0 advances": (commits_at_least_one, "commit follows path and count"),
    "rows advance by the smallest count": (
        commits_the_batch_minimum,
        "commit follows path and count",
    ),
    "apply writes the cache": (apply_writes, "apply changes nothing"),
}
