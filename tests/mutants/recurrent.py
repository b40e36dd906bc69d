"""Mistakes of the block and the commit of recurrent layers: (patch, model) -> the wrong model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from mutants.patches import instead
from specjax import cache as kv
from specjax import tree
from specjax.models import recurrent, transformer
from specjax.types import LM


def _patched(owner: Any, name: str, wrong: Callable) -> Callable[[Any, LM], LM]:
    def mutant(patch: Any, model: LM) -> LM:
        instead(owner, name, wrong)(patch)
        return model

    return mutant


def _states_advance_by(change: Callable) -> Callable[[Any, LM], LM]:
    """States take another number of tokens than keys and values do."""

    def mutant(_: Any, model: LM) -> LM:
        def commit(cache, block, count, path=None):
            after, number = model.commit(cache, block, count, path), change(count)
            kept, _ = tree.accepted(block, number, path)
            pairs = zip(cache.states, kept.updates, strict=True)
            return after.replace(states=tuple(kv.advanced(*pair, number) for pair in pairs))

        return model._replace(commit=commit)

    return mutant


def _siblings_leak(right, tokens, layout, memory, fed=None):
    before = jnp.tril(jnp.ones_like(layout.visible), layout.depth.shape[1] - tokens.k.shape[1])
    return right(tokens, layout.replace(visible=before), memory, fed)


def _one_earlier(right, layout, width):
    return jnp.maximum(right(layout, width) - 1, 0)


def _over_nodes(right, layout, width):
    new, fed = layout.visible.shape[1], layout.depth.shape[1] - layout.visible.shape[1]
    at = fed + jnp.arange(new)[:, None] + jnp.arange(width - 1)
    return jnp.broadcast_to(at, (len(layout.depth), *at.shape))


def _short_window(right, state, kept, count):
    shorter = right(state, kept, jnp.maximum(count - 1, 0))
    return right(state, kept, count).replace(window=shorter.window)


def _decays_always(right, state, kept, count):
    still = (count == 0)[:, None, None]
    return right(state, kept.replace(decay=jnp.where(still, -0.01, kept.decay)), count)


def _in_reverse(right, state, kept, count):
    names = ("keys", "values", "decay")
    other = kept.replace(**{name: getattr(kept, name)[:, ::-1] for name in names})
    return right(state, kept, count).replace(memory=right(state, other, count).memory)


def _bfloat16(right, state, kept, count):
    after = right(state, kept, count)
    return after.replace(memory=after.memory.astype(jnp.bfloat16).astype(after.memory.dtype))


def _without_ancestors(right, tokens, layout, memory, fed=None):
    alone = jnp.eye(layout.depth.shape[1], dtype=bool)[-tokens.k.shape[1] :]
    alone = layout.replace(visible=jnp.broadcast_to(alone, layout.visible.shape))
    return right(tokens, layout, memory, fed)[0], right(tokens, alone, memory, fed)[1]


MUTANTS: dict[str, Callable[[Any, LM], LM]] = {
    "the state is advanced by a rejected token": _states_advance_by(
        lambda count: jnp.where(count > 0, count + 1, 0)
    ),
    "the state of a finished row moves": _states_advance_by(lambda count: jnp.maximum(count, 1)),
    "a sibling's state leaks": _patched(recurrent, "delta_rule", _siblings_leak),
    "the convolution reads one input earlier": _patched(transformer, "places", _one_earlier),
    "the convolution reads nodes in order": _patched(transformer, "places", _over_nodes),
    "the window of the convolution is one token late": _patched(kv, "advanced", _short_window),
    "a commit of count 0 decays the state": _patched(kv, "advanced", _decays_always),
    "the path is replayed in reverse": _patched(kv, "advanced", _in_reverse),
    "the state is bfloat16": _patched(kv, "advanced", _bfloat16),
    "an update forgets the path before it": _patched(recurrent, "delta_rule", _without_ancestors),
}
