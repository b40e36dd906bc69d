"""Compiles the programs of specjax for TPUs and for NVIDIA GPUs, without one, and reads them.

    pip install "jax[tpu]==<the version of jax>"
    JAX_PLATFORMS=cpu PYTHONPATH=. python experiments/programs/run.py     (about 40 minutes)

    pip install "jax[cuda12]==<the version of jax>"       (5 GB, in an environment of its own)
    JAX_PLATFORMS=cpu PYTHONPATH=. python experiments/programs/run.py --gpu=h200.txtpb

libtpu compiles for a named topology with no device at all. The target has the shape of Llama 3.2
1B, the draft model 2 layers of width 1024; bfloat16, one row of text, a cache of 2048 tokens. Three
of four layers of the "hybrid" have the gated delta rule, and its passes the commits of
experiments/states. The layers of a "scanned" target are one loop; "8B" is Llama 3.1's shape. Of
each executable: the compiler's memory analysis and estimated cycles, and from its text the bytes
that one pass or round moves to and from main memory (in multiples of the weights and caches that it
must read), collectives, copies of buffers in the shape of a weight or a cache inside loops,
float32 results in the shape of bfloat16 weights, and transfers to the host.

Of a GPU's executable: the kernels, conditionals and turns of loops of one pass or round, and the
bytes that it reads and writes. A GPU is described by a file: a GpuTargetConfigProto as text, as in
``xla/backends/gpu/target_config/specs`` of OpenXLA.

Nothing is run: times on a chip are not known from this. Cycles are the compiler's estimates, of
computations only: transfers from main memory that run beside them are not in them.

Writes ``results.json`` beside this file: with ``--gpu`` its part "gpus", where rows of other GPUs
stay, else all others. XLA compiles for one kind of GPU in a process.
``--small`` compiles tiny shapes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.common import Stopwatch, checked, options, record, without_folder
from experiments.programs import facts, hlo, meshes, programs
from experiments.programs.programs import Made, Size
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import layers
from specjax.sharding import make_mesh

CHIPS = ("v5e", "v5p", "v6e")
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LARGE = {"v5e": "v5e:4x4", "v5p": "v5p:2x2x4", "v6e": "v6e:4x4"}
PASSES = (1, 6, 8, 16)
FORMS = ("pass", "updates", "states")  # of the commit of recurrent layers: experiments/states
PLUGIN = "jax-cuda12-plugin"
TIMES = frozenset({"compile_seconds"})


class Case(NamedTuple):
    """One program for one kind of chip."""

    program: str
    chip: str
    make: Callable[[], Made]
    mesh: str = "1 chip"


@cache
def devices(topology: str) -> list[Any]:
    """The devices of a topology. Raises UserError without libtpu."""
    # Otherwise libtpu asks a server of Google Cloud for its machine's metadata, and waits.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        version("libtpu")
    except PackageNotFoundError:
        raise UserError(
            f'libtpu is not installed; pip install "jax[tpu]=={jax.__version__}"'
        ) from None
    return list(topologies.get_topology_desc(topology, "tpu").devices)


def cases(size: Size, chips: Sequence[str]) -> list[Case]:
    """All programs, in the order in which they are compiled; fewer for all chips but the first."""
    listed = []
    for chip in chips:
        one, first = devices(TOPOLOGIES[chip])[0], chip == chips[0]
        made: dict[str, Callable[[], Made]] = {
            f"pass over {n}": partial(programs.forward, size, one, n)
            for n in (PASSES if first else PASSES[:2])
        }
        made["plain loop"] = partial(programs.autoregressive, size, one)
        made["chain loop"] = partial(programs.loop, size, one, "chain")
        if first:
            for form in FORMS:
                made[f"hybrid over 6, {form}"] = partial(programs.hybrid, size, one, 6, form)
            made["prefill"] = partial(programs.prefill, size, one)
            made["nested loop"] = partial(programs.loop, size, one, "nested")
            made["tree loop"] = partial(programs.loop, size, one, "tree")
            for name in programs.HEADS:
                made[f"{name} loop"] = partial(programs.loop, size, one, name)
            made["training step"] = partial(programs.training, size, one)
        listed += [Case(name, chip, make) for name, make in made.items()]
    return listed + _scanned(size, chips) + _on_meshes(size, chips[0])


def _scanned(size: Size, chips: Sequence[str]) -> list[Case]:
    """Layers as a loop and written out; one verify width and those of a lookup.

    For the target on the first chip, and for the 8B shape on one with enough memory.
    """
    listed = []
    large = size._replace(target=size.large)
    for name, shape, chip in (("", size, chips[0]), ("8B ", large, chips[-1])):
        one = devices(TOPOLOGIES[chip])[0]
        for scan in (False, True):
            own, of = shape._replace(scan=scan), f"{name}{'scanned ' if scan else ''}"
            made: dict[str, Callable[[], Made]] = {
                f"{of}lookup loop": partial(programs.loop, own, one, "lookup"),
                f"{of}lookup loop, one width": partial(
                    programs.loop, own, one, "lookup", widths=(1 + programs.GAMMA,)
                ),
            }
            if scan or name:  # the others are listed already
                made |= {
                    f"{of}pass over {n}": partial(programs.forward, own, one, n) for n in (1, 6)
                }
                made[f"{of}plain loop"] = partial(programs.autoregressive, own, one)
            listed += [Case(program, chip, make) for program, make in made.items()]
    return listed


def _on_meshes(size: Size, chip: str) -> list[Case]:
    """Programs on 4 and on 16 chips."""
    four, sixteen = TOPOLOGIES[chip], LARGE[chip]
    makes: list[tuple[str, str, str, Callable]] = [
        ("plain loop", "data:4", four, meshes.autoregressive),
        ("chain loop", "data:4", four, partial(meshes.loop, method="chain")),
        ("plain loop", "tensor:4", four, meshes.autoregressive),
        ("chain loop", "tensor:4", four, partial(meshes.loop, method="chain")),
        ("training step", "data:4", four, meshes.training),
        ("training step", "fsdp:4", four, meshes.training),
        ("plain loop", "data:16", sixteen, meshes.autoregressive),
        ("plain loop", "data:2,tensor:8", sixteen, meshes.autoregressive),
        ("training step", "data:4,fsdp:4", sixteen, meshes.training),
    ]
    return [
        Case(name, chip, partial(make, size, make_mesh(text, devices(where))), text)
        for name, text, where, make in makes
    ]


def gpu(config: Path) -> Any:
    """A GPU with the target configuration of a file. Raises UserError without CUDA's plugin."""
    if not config.is_file():
        raise UserError(f"there is no file {config}; give a GpuTargetConfigProto as text")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    from jax._src import xla_bridge  # jax has no public function for it

    # The plugin registers itself, and cannot start without a driver.
    with contextlib.suppress(Exception):
        xla_bridge.discover_pjrt_plugins()
    try:
        more = {"target_config": config.read_text(encoding="utf-8"), "topology": "1x1x1"}
        return topologies.get_topology_desc(config.stem, "cuda", **more).devices[0]
    # Without the plugin JAX raises NotImplementedError; the plugin refuses a wrong file.
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise UserError(
            f'{config}: {str(error).splitlines()[0]}; pip install "jax[cuda12]=={jax.__version__}"'
        ) from None


def gpu_cases(size: Size, config: Path) -> list[Case]:
    """All programs for a GPU."""
    one = gpu(config)
    made = {f"pass over {n}": partial(programs.forward, size, one, n) for n in PASSES}
    for form in FORMS:
        made[f"hybrid over 6, {form}"] = partial(programs.hybrid, size, one, 6, form)
    made["plain loop"] = partial(programs.autoregressive, size, one)
    for name in ("chain", "tree", "nested", *programs.HEADS):
        made[f"{name} loop"] = partial(programs.loop, size, one, name, turns=True)
    return [Case(name, config.stem, make) for name, make in made.items()]


class Compiled(NamedTuple):
    """A compiled program."""

    made: Made
    seconds: float
    executable: Any  # jax.stages.Compiled
    program: hlo.Program
    part: str | None  # the computation that is one round; None: the program is one pass


def compiled_for(platform: str, case: Case) -> Compiled:
    """The program of a case, compiled for "tpu" or "cuda"."""
    began = time.perf_counter()
    made = case.make()
    executable = made.traced.lower(lowering_platforms=(platform,)).compile()
    seconds = time.perf_counter() - began
    program = hlo.read(executable.as_text())
    part = facts.main_loop(program) if made.loop else None
    return Compiled(made, seconds, executable, program, part)


def gpu_row(case: Case) -> dict[str, Any]:
    """Compiles a program for a GPU; what its executable shows."""
    made, seconds, executable, program, part = compiled_for("cuda", case)
    moved = facts.sums(program, part)
    return {
        "program": case.program,
        "chip": case.chip,
        "compile_seconds": seconds,
        "needed_bytes": made.needed,
        "read_bytes": moved.read,
        "written_bytes": moved.written,
        "traffic": (moved.read + moved.written) / made.needed,
        **facts.launches(program, part)._asdict(),
        "copies": facts.copies(program, made.shapes)["within_main"],
        "temporary_bytes": executable.memory_analysis().temp_size_in_bytes,
    }


def row(case: Case) -> dict[str, Any]:
    """Compiles a program for a TPU; what its executable shows."""
    made, seconds, executable, program, name = compiled_for("tpu", case)
    part = facts.sums(program, name, made.layers)
    memory = executable.memory_analysis()
    return {
        "program": case.program,
        "chip": case.chip,
        "mesh": case.mesh,
        "compile_seconds": seconds,
        "needed_bytes": made.needed,
        "main_memory_bytes": part.read + part.written,
        "traffic": (part.read + part.written) / made.needed,
        "compiler_bytes": executable.cost_analysis()["bytes accessed"],
        "estimated_cycles": part.cycles,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "collectives": facts.collectives(program),
        "copies_in_loops": facts.copies(program, made.shapes),
        "float32_of_bfloat16": facts.wider_copies(program, made.shapes),
        "host_transfers": facts.transfers(program),
    }


def line(result: dict[str, Any]) -> str:
    """One line of the output."""
    copies = result["copies_in_loops"]
    return (
        f"{result['program']:14} {result['chip']:4} {result['mesh']:16} "
        f"{result['estimated_cycles'] / 1e6:8.3f} M cycles  {result['traffic']:5.2f}x traffic  "
        f"{result['temporary_bytes'] / 2**20:8.1f} MiB temporary  "
        f"collectives {result['collectives']['inside_loops']}"
        f"+{result['collectives']['outside_loops']}  copies {copies['within_main']}"
        f"+{copies['from_chip']}+{copies['to_chip']}  float32 {result['float32_of_bfloat16']}  "
        f"host {result['host_transfers']}  {result['compile_seconds']:.0f} s"
    )


def gpu_line(result: dict[str, Any]) -> str:
    """One line of the output."""
    return (
        f"{result['program']:14} {result['chip']:12} {result['kernels']:5} kernels  "
        f"{result['conditionals']} conditionals  {result['loops']} turns of loops  "
        f"read {result['read_bytes'] / 1e9:5.2f} GB  written {result['written_bytes'] / 1e9:5.2f}  "
        f"{result['traffic']:5.2f}x traffic  copies {result['copies']}  "
        f"{result['compile_seconds']:.0f} s"
    )


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    parser.add_argument("--small", action="store_true", help="tiny shapes, for a test")
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--gpu", type=Path, help="the file of a GPU")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names of programs")
    args = parser.parse_args(argv)
    stopwatch = Stopwatch(keep=args.busy == "keep")
    layers.compile_ahead_for("cuda" if args.gpu else "tpu")
    size = programs.small() if args.small else Size()
    listed = gpu_cases(size, args.gpu) if args.gpu else cases(size, args.chips)
    read, spell = (gpu_row, gpu_line) if args.gpu else (row, line)
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    earlier = (before.get("gpus") or {}).get("rows", []) if args.gpu else []
    kept = [one for one in earlier if one["chip"] != args.gpu.stem]
    rows = []
    for case in listed:
        if any(text in f"{case.program}, {case.mesh}" for text in args.only):
            try:
                rows.append(read(case))
            except jax.errors.JaxRuntimeError as error:  # XLA asks some devices for what it needs
                print(f"{case.program}, {case.chip}: left out; {str(error).splitlines()[0]}")
                continue
            print(spell(rows[-1]), flush=True)
            named = [without_folder(each) for each in argv]
            own = {"rows": kept + rows, "small": args.small}
            result = own | record(__file__, named, stopwatch)
            result["versions"]["plugin"] = version(PLUGIN if args.gpu else "libtpu")
            result = checked(result, stopwatch, TIMES)
            gpus = result if args.gpu else before.get("gpus")
            write_json(args.out, (before if args.gpu else result) | {"gpus": gpus})


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
