"""An early exit and its adapter, from the keys and from files."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _given, _prefix
from specjax.drafters.heads._given import Given
from specjax.drafters.self_speculation import _exit_adapter
from specjax.drafters.self_speculation._exit_adapter import (
    LAYER,
    LINEAR,
    NONE,
    NORM,
    Adapter,
    Shape,
)
from specjax.errors import UserError
from specjax.models.hf_config import value_of
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, Params, Sublayers


class Asked(NamedTuple):
    """The keys of ``early_exit`` that define the exit; 0 and "": not given."""

    exit_layer: int
    adapter: str
    head: str
    head_dim: int

    @property
    def trained(self) -> bool:
        """Whether they ask for parameters."""
        return self.adapter not in ("", NONE) or self.head == "own"


def read(
    target: LM, asked: Asked, model: str | os.PathLike | None, params: Params, dtype: Any
) -> tuple[Adapter, Params, dict[str, Any]]:
    """The exit, its parameters (None: none yet), and config.json of its files ({}: no files).

    Raises UserError.
    """
    given = Given(None, None, {})  # pyright: ignore[reportArgumentType]
    if model or params is not None or dtype is not None or asked.trained:
        given = _given.read("early_exit", target, HeadKeys(model=model, params=params, dtype=dtype))
    kind, own_head = asked.adapter or NONE, asked.head == "own"
    if given.params is not None:
        kind, own_head = _agreed(asked, given.params)
    if asked.head_dim and kind != LAYER:
        raise UserError(
            f"head_dim is {asked.head_dim} and has no effect on the adapter {kind!r}; leave it out"
        )
    layer = _exit_layer(target, asked.exit_layer, given.config)
    config = _config(target, asked, given, kind)
    shape = Shape(kind, config, target.vocab_size if own_head else None)
    if given.params is not None:
        _check_leaves(shape, given.params)
    part = target.with_part(Sublayers(tuple(range(layer)), tuple(range(layer))))
    if kind != NONE:
        part = part.with_taps((layer - 1,))
    return Adapter(shape, layer, part, given.ends), given.params, given.config


def _agreed(asked: Asked, params: Params) -> tuple[str, bool]:
    """The kind of adapter of these parameters, and whether they have a head. Raises UserError."""
    marks = {LAYER: "attention", LINEAR: "linear", NORM: "norm"}
    kind = next((kind for kind, module in marks.items() if module in params), NONE)
    head = "own" if "head" in params else "shared"
    for key, value, stored in (("adapter", asked.adapter, kind), ("head", asked.head, head)):
        if value not in ("", stored):
            raise UserError(
                f"{key} is {value!r}, and the given parameters have {stored!r}; leave it out"
            )
    return kind, head == "own"


def _check_leaves(shape: Shape, params: Params) -> None:
    """Raises UserError unless ``params`` have exactly the leaves of an adapter of this shape."""
    wanted, has = (
        jax.tree.map(jnp.shape, leaves) for leaves in (_exit_adapter.leaves(shape), params)
    )
    if shape.trained and wanted != has:
        raise UserError(
            f"the parameters are not those of an adapter {shape.kind!r} of early_exit; give the "
            "parameters of one"
        )


def _exit_layer(target: LM, asked: int, config: dict[str, Any]) -> int:
    """The number of layers that are computed. Raises UserError."""
    if target.layers is None or target.part is None:
        target.with_part(Sublayers((), ()))
        raise UserError(f"{target.name} does not state how many layers it has")
    stored = value_of(config, "exit_layer", int, 0) if config else 0
    if stored and asked not in (0, stored):
        raise UserError(
            f"exit_layer is {asked}, and the given adapter is for {stored}; leave it out"
        )
    layer = stored or asked or max(target.layers // 4, 1)
    if not 1 <= layer <= target.layers:
        raise UserError(
            f"exit_layer is {layer}, and {target.name} has {target.layers} layers; give 1 to "
            f"{target.layers}"
        )
    return layer


def _config(target: LM, asked: Asked, given: Given, kind: str) -> TransformerConfig:
    """The shape of the adapter's norms and attention: of the files, or of a new one."""
    width = target.width or 2
    new = _prefix.new(width, asked.head_dim)
    if kind == NONE or given.params is None:
        return new
    eps = value_of(given.config, "rms_norm_eps", float, _prefix.EPS)
    if kind != LAYER:
        return dataclasses.replace(new, norm_eps=eps)
    queries, keys = (given.params["attention"][name]["kernel"].shape[1] for name in ("q", "k"))
    stored = given.config or {"head_dim": new.head_dim}
    dim = _prefix.stored_head_dim(stored, asked.head_dim, queries, keys, "the adapter")
    theta = value_of(given.config, "rope_theta", float, _prefix.THETA)
    return dataclasses.replace(
        _prefix.layer(width, dim, queries // dim, keys // dim, 0), norm_eps=eps, rope_theta=theta
    )
