"""Many devices: meshes, where parameters are stored, decoding with the rows divided.

    mesh = sharding.make_mesh("data:4,tensor:2")
    params = sharding.place(mesh, target, params)
    state = sharding.prefill(mesh, target, drafter, params, prompt, lengths, keys, max_len=512)
    state, records = sharding.generate(mesh, target, drafter, rule, params, state, max_steps=256)

The axis "data" divides the rows of a batch: every part runs the loop of ``specjax.decode`` by
itself, without communication, and stops by itself. The axis "tensor" divides the matrices of the
models and their caches. The axis "fsdp" is for training: it divides rows as well as parameters and
the state of the optimiser.
"""

from specjax.sharding.decoding import autoregressive, generate, loops, on_host, prefill
from specjax.sharding.groups import fetch, first_part, slowest
from specjax.sharding.mesh import AXES, DATA, FSDP, TENSOR, make_mesh, parse
from specjax.sharding.processes import (
    Preemption,
    check_same,
    check_shared,
    first_alone,
    first_error,
    is_first,
    of_first,
)
from specjax.sharding.processes import start as start_processes
from specjax.sharding.rules import (
    param_specs,
    place,
    place_draft,
    place_target,
    put_leaf,
    shardings,
)

__all__ = [
    "AXES",
    "DATA",
    "FSDP",
    "TENSOR",
    "Preemption",
    "autoregressive",
    "check_same",
    "check_shared",
    "fetch",
    "first_alone",
    "first_error",
    "first_part",
    "generate",
    "is_first",
    "loops",
    "make_mesh",
    "of_first",
    "on_host",
    "param_specs",
    "parse",
    "place",
    "place_draft",
    "place_target",
    "prefill",
    "put_leaf",
    "shardings",
    "slowest",
    "start_processes",
]
