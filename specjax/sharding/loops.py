"""The decode loops of one device or of a mesh, with the same arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from specjax import decode
from specjax.sharding import decoding, groups
from specjax.types import DecodeState


class Loops(NamedTuple):
    """The functions of ``specjax.decode`` with these names."""

    prefill: Callable[..., DecodeState]
    generate: Callable
    autoregressive: Callable[..., DecodeState]


def loops(mesh: Mesh | None) -> Loops:
    """The loops of one device (None), or those that divide the rows among a mesh's devices."""
    if mesh is None:
        return Loops(decode.prefill, decode.generate, decode.autoregressive)
    return Loops(
        functools.partial(decoding.prefill, mesh),
        functools.partial(decoding.generate, mesh),
        functools.partial(decoding.autoregressive, mesh),
    )


def on_host(state: DecodeState) -> DecodeState:
    """The state with what ``decode.check`` and ``decode.outputs`` read on the host, whole."""
    tokens, length, failed = groups.fetch((state.tokens, state.length, state.failed))
    return state.replace(tokens=tokens, length=length, failed=failed)
