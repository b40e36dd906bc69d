"""The programs of experiments/programs on several chips."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.programs import programs
from experiments.programs.programs import Made, Pair, Size
from specjax import accept, decode, outcome, prompt, sharding
from specjax.bound import Bound
from specjax.sharding import decoding, states
from specjax.train.placement import Placement
from specjax.train.settings import Settings
from specjax.train.update import compile_programs
from specjax.types import ModelParams


def _divided(mesh: Mesh, made: Pair, size: Size) -> tuple[ModelParams, Any, Any, Any]:
    """Parameters, a state with one row for each part of the rows, stop ids, and the specs."""
    sizes = dict(mesh.shape)
    arrays = programs.prompts(size, sizes["data"])
    start = prompt.make_prefill(made.target, made.drafter, size.text, 256, False)
    specs = states.specs(mesh, made.drafter, start, made.params, arrays)
    placed = [sharding.shardings(mesh, sharding.param_specs(each, sizes)) for each in made.params]
    params = ModelParams(
        *(programs.on(at, each) for at, each in zip(placed, made.params, strict=True))
    )
    state = jax.eval_shape(start, made.params, *arrays)
    state = programs.on(sharding.shardings(mesh, specs.whole), state)
    stop = programs.on(
        NamedSharding(mesh, PartitionSpec()), jax.eval_shape(lambda: outcome.stop_ids(2))
    )
    return params, state, stop, specs


def part_of(mesh: Mesh) -> Mesh:
    """The mesh of one program: as ``sharding.generate``, one per part if matrices are divided."""
    parts = mesh.shape["data"]
    if parts in (1, mesh.size):
        return mesh
    pieces = np.split(mesh.devices, parts, axis=mesh.axis_names.index("data"))
    return Mesh(pieces[0], mesh.axis_names, axis_types=mesh.axis_types)


def loop(size: Size, mesh: Mesh, method: str) -> Made:
    """The loop of ``sharding.generate`` on a mesh, or on one part of it."""
    made, mesh = programs.pair(method, size), part_of(mesh)
    params, state, stop, specs = _divided(mesh, made, size)
    rule = accept.load(accept.default_rule(made.drafter))
    settings = {"max_steps": size.text - size.prompt, "verify_widths": None}
    run = Bound(decode.generate, made.target, made.drafter, rule, **settings)
    program: Any = decoding._program(mesh, run, specs)
    shapes = programs.shapes_of(params, programs.caches(state))
    traced = program.trace(params, state, stop)
    return Made(traced, programs.needed(made, params, state), shapes, loop=True)


def autoregressive(size: Size, mesh: Mesh) -> Made:
    """The loop of ``sharding.autoregressive`` on a mesh, or on one part of it."""
    made, mesh = programs.pair("plain", size), part_of(mesh)
    params, state, stop, specs = _divided(mesh, made, size)
    run = Bound(decoding._plain, made.target, size.text - size.prompt)
    program: Any = decoding._program(mesh, run, specs)
    traced = program.trace(params, state, stop)
    return Made(
        traced,
        programs.needed(made, params, state),
        programs.shapes_of(params, programs.caches(state)),
        loop=True,
    )


def training(size: Size, mesh: Mesh) -> Made:
    """The same step as ``specjax.train`` compiles it for a mesh."""
    placement = Placement(mesh)
    loss, optimiser, state = programs.loss_and_state(size)
    stored = placement.state(state)
    settings = Settings(precision="bfloat16")
    compiled = compile_programs(loss, None, None, optimiser, settings, placement, stored)
    state = programs.on(stored, state)
    batch = programs.on(placement.rows, programs.batch_of(size, placement.parts))
    key = programs.on(placement.everywhere, jax.eval_shape(lambda: jax.random.key(0)))
    program: Any = compiled.advance
    traced = program.trace(state, {}, batch, key)
    return Made(traced, programs.nbytes(state), programs.shapes_of(state["params"]))
