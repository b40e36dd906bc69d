"""Prefill and the decode loops with the rows of a batch divided among devices.

Each part of the rows runs ``specjax.decode`` unchanged: it chooses its own verify widths and stops
by itself. If the mesh divides rows only, all parts are one program (``shard_map``) without any
communication. If it divides matrices too, every part is a program of its own on its own devices,
in which XLA divides the work of each pass by the shardings of parameters and caches: in one program
for all parts, XLA would exchange data between parts (for example in one permutation over all
devices) inside loops and conditionals that only some of the parts enter.

The text of a row is that of one device: noise is keyed by the row's own number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from specjax import decode, outcome
from specjax.bound import Bound
from specjax.errors import UserError
from specjax.outcome import EosId
from specjax.prompt import checked, make_prefill
from specjax.sampling import Sampling
from specjax.sharding import groups, states
from specjax.sharding.mesh import DATA, with_all_axes
from specjax.sharding.rules import check_decoding, check_placed, put, shardings
from specjax.sharding.states import Specs
from specjax.step import Widths
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams, Records

ROWS, ROUNDS = PartitionSpec(DATA), PartitionSpec(None, DATA)
WHOLE = PartitionSpec()


def prefill(
    mesh: Mesh,
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompt: Any,
    lengths: Any,
    keys: jax.Array,
    *,
    max_len: int,
    sampling: Sampling | None = None,
    limit: Any = None,
    chunk: int = 256,
    logprobs: bool | str = False,
) -> DecodeState:
    """``decode.prefill`` on a mesh; the arrays of the state are divided among its devices.

    The arguments are those of ``decode.prefill`` and have all rows; with several processes, all
    have the same. ``params`` are those of ``place``.

    Raises UserError as ``decode.prefill`` does, and for rows or a target that cannot be divided.
    """
    mesh = with_all_axes(mesh)
    check_decoding(mesh, target)
    check_placed(mesh, params)
    check_rows(mesh, prompt.shape[0])
    arrays = checked(target, drafter, prompt, lengths, limit, keys, sampling, max_len)
    arrays = put(mesh, arrays, jax.tree.map(lambda _: ROWS, arrays))
    options = (target, drafter, max_len, chunk, logprobs)
    specs = _specs(mesh, options, *states.abstract((params, arrays)))
    return groups.run(mesh, _prefill_program, (options, specs), (params, *arrays))


def check_rows(mesh: Mesh, rows: int) -> None:
    """Raises UserError for a number of rows that the mesh cannot divide."""
    if rows % mesh.shape[DATA]:
        raise UserError(
            f"a batch of {rows} rows cannot be divided among data:{mesh.shape[DATA]}; "
            f"take a multiple of {mesh.shape[DATA]}"
        )


@functools.lru_cache(maxsize=256)
def _specs(mesh: Mesh, options: tuple, leaves: tuple, treedef: Any) -> Specs:
    """The specs of a state. Kept, because finding them traces the prefill twice."""
    params, arrays = jax.tree.unflatten(treedef, leaves)
    return states.specs(mesh, options[1], make_prefill(*options), params, arrays)


@functools.lru_cache(maxsize=256)
def _prefill_program(mesh: Mesh, options: tuple, specs: Specs) -> Callable:
    arrays = (WHOLE, ROWS, ROWS, ROWS, ROWS, ROWS)
    parts = _by_rows(mesh, make_prefill(*options), arrays, specs.rows)
    return jax.jit(parts, out_shardings=shardings(mesh, specs.whole))


def generate(
    mesh: Mesh,
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    *,
    max_steps: int,
    eos_id: EosId = None,
    verify_widths: Widths = None,
) -> tuple[DecodeState, Records]:
    """``decode.generate`` on a mesh: every part of the rows runs until its rows are done.

    ``state`` is that of ``prefill`` on the same mesh, and is donated. Raises UserError as
    ``decode.generate`` does, and for a state that is not on the mesh.
    """
    decode.check_state(drafter, accept, state, with_all_axes(mesh).shape[DATA])
    widths = verify_widths if verify_widths is None else tuple(verify_widths)
    settings = {"max_steps": max_steps, "verify_widths": widths}
    loop = Bound(decode.generate, target, drafter, accept, **settings)
    return _run(mesh, loop, params, state, eos_id)


def autoregressive(
    mesh: Mesh,
    target: LM,
    params: ModelParams,
    state: DecodeState,
    *,
    max_steps: int,
    eos_id: EosId = None,
) -> DecodeState:
    """``decode.autoregressive`` on a mesh. ``state`` as in ``generate``, also donated."""
    return _run(mesh, Bound(_plain, target, max_steps), params, state, eos_id)[0]


def _plain(
    target: LM, max_steps: int, params: ModelParams, state: DecodeState, eos_id: EosId
) -> tuple[DecodeState, tuple]:
    settings = {"max_steps": max_steps, "eos_id": eos_id}
    return decode.autoregressive(target, params, state, **settings), ()


def _run(
    mesh: Mesh, loop: Bound, params: ModelParams, state: DecodeState, eos_id: EosId
) -> tuple[DecodeState, Any]:
    """The result of ``loop(params, state, eos_id=...)`` for all rows: a state, and records."""
    mesh = with_all_axes(mesh)
    check_placed(mesh, params)
    arguments = (params, state, outcome.stop_ids(eos_id))
    static = (loop, states.specs_of(mesh, state))
    state, rounds, records = groups.run(mesh, _program, static, arguments)
    return state.replace(round=groups.latest(mesh)(rounds)), records


@functools.lru_cache(maxsize=256)
def _program(mesh: Mesh, loop: Bound, specs: Specs) -> Callable:
    def one(params, state, eos_id):
        state, records = loop(params, state, eos_id=eos_id)
        return state, state.round[None], records

    out = (specs.rows, ROWS, ROUNDS)
    parts = _by_rows(mesh, one, (WHOLE, specs.rows, WHOLE), out)
    out = shardings(mesh, (specs.whole, ROWS, ROUNDS))
    return jax.jit(parts, donate_argnums=1, out_shardings=out)


def _by_rows(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """``function`` for each part of the rows; if there is one part, for all devices together."""
    if mesh.shape[DATA] == 1:

        def together(*arguments):
            # The models see that XLA divides their matrices (``models.layers.in_float32``).
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return function(*arguments)

        return together
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


# The decode loops of one device or of a mesh, with the same arguments.


class Loops(NamedTuple):
    """The functions of ``specjax.decode`` with these names."""

    prefill: Callable[..., DecodeState]
    generate: Callable
    autoregressive: Callable[..., DecodeState]


def loops(mesh: Mesh | None) -> Loops:
    """The loops of one device (None), or those that divide the rows among a mesh's devices."""
    if mesh is None:
        return Loops(decode.prefill, decode.generate, decode.autoregressive)
    bind = functools.partial
    return Loops(bind(prefill, mesh), bind(generate, mesh), bind(autoregressive, mesh))


def on_host(state: DecodeState) -> DecodeState:
    """The state with what ``decode.check`` and ``decode.outputs`` read on the host, whole."""
    tokens, length, failed = groups.fetch((state.tokens, state.length, state.failed))
    return state.replace(tokens=tokens, length=length, failed=failed)
