"""What the text of a compiled program shows: traffic, cycles, collectives, copies, transfers.

Estimates are the compiler's own (``estimated_cycles``). They leave out transfers that run beside
the computation, so a pass cannot be faster than its bytes divided by the memory's bandwidth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from experiments.programs import hlo
from experiments.programs.hlo import Array, Computation, Instruction, Program

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
HOST = 5  # the number of the host's memory in a layout
TRANSFERS = ("infeed", "outfeed", "send", "recv")
# They move no data by themselves.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "iota", "optimization-barrier",
}  # fmt: skip
_PARTS = ("dynamic-slice", "slice", "gather")


class Sums(NamedTuple):
    """Bytes to and from main memory, and estimated cycles."""

    read: float = 0.0
    written: float = 0.0
    cycles: float = 0.0

    def __add__(self, other: Sums) -> Sums:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> Sums:
        return Sums(*(count * each for each in self))


def sums(program: Program, name: str | None = None, layers: int | None = None) -> Sums:
    """Bytes and cycles of a computation; by default the whole program.

    A loop counts as often as the compiler's known trip count, otherwise once. Programs for TPUs
    have none: a loop that ends at the number ``layers`` is that over layers. Of the branches of a
    conditional the one with the most cycles and bytes counts.
    """
    computation = program.computations[name or program.entry]
    total = Sums()
    for each in computation.instructions.values():
        inner = [sums(program, called, layers) for called in hlo.subprograms(each)]
        if each.opcode == "conditional":
            total += max(inner, key=lambda one: (one.cycles, one.read + one.written))
        elif inner:
            often = each.number("known_trip_count") or 1
            if layers and each.opcode == "while" and _ends_at(program, each, layers):
                often = layers
            for one in inner:
                total += one.times(often)
        if each.opcode not in ("while", "conditional", "call"):
            total += _cost(program, computation, each)
    return total


def _ends_at(program: Program, loop: Instruction, turns: int) -> bool:
    """Whether the condition of a loop is a comparison with this number and nothing else."""
    (condition,) = program.of(loop, "condition")
    values = [each for each in condition.instructions.values() if each.opcode == "constant"]
    return condition.root.opcode == "compare" and [x.operands for x in values] == [(str(turns),)]


def main_loop(program: Program) -> str | None:
    """The name of a round: the body of the loop that moves the most bytes; None: there is none."""
    loops = [each for _, each, looped in hlo.walk(program) if each.opcode == "while" and not looped]

    def moved(name: str) -> float:
        one = sums(program, name)
        return one.read + one.written

    return max((each.called("body")[0] for each in loops), key=moved, default=None)


class Launches(NamedTuple):
    """What a GPU starts one after the other. A conditional or a loop may wait for the host."""

    kernels: int = 0
    conditionals: int = 0
    loops: int = 0  # their turns


def launches(program: Program, name: str | None = None) -> Launches:
    """The launches of a computation; by default of the whole program. Loops count as in ``sums``.

    Of the branches of a conditional the one with the most kernels counts.
    """
    total, (kernel, conditional, turn) = np.zeros(3, int), np.eye(3, dtype=int)
    for each in program.computations[name or program.entry].instructions.values():
        inner = np.array([launches(program, called) for called in hlo.subprograms(each)], int)
        if each.opcode == "conditional":
            total += conditional + max(inner.tolist())
        elif each.opcode == "while":
            often = each.number("known_trip_count") or 1
            total += often * (inner.sum(0) + turn)
        elif len(inner):
            total += inner.sum(0)
        elif each.opcode not in _FREE and not each.opcode.endswith("-done"):
            total += kernel
    return Launches(*total.tolist())


def _cost(program: Program, computation: Computation, each: Instruction) -> Sums:
    cycles = each.number("estimated_cycles") or 0
    if each.opcode in _FREE or each.opcode.endswith("-done"):
        return Sums(0.0, 0.0, cycles)
    if each.opcode.endswith("-start"):
        return Sums(*_transfer(each), cycles)
    read = sum(
        _read(program, computation, each, place, operand)
        for place, operand in enumerate(each.operands)
    )
    return Sums(read, _written(program, computation, each), cycles)


def _transfer(each: Instruction) -> tuple[float, float]:
    """Bytes read and written by a copy or slice that runs beside the computation."""
    if not re.match(r"(copy|slice)-start", each.opcode) or len(each.arrays) < 2:
        size = sum(array.bytes for array in each.arrays if array.memory == 0)
        return size / 2, size / 2
    # copy-start gives (destination, source, context), slice-start ((source), destination, ...).
    first, second = each.arrays[:2]
    to, source = (first, second) if each.opcode == "copy-start" else (second, first)
    moved = min(to.bytes, source.bytes)
    return _in_main(source) * moved, _in_main(to) * moved


def _in_main(array: Array) -> bool:
    return array.memory == 0


def _main(arrays: Iterable[Array]) -> float:
    return sum(array.bytes for array in arrays if _in_main(array))


def _operand(computation: Computation, name: str) -> tuple[Array, ...]:
    found = computation.instructions.get(name)
    return found.arrays if found else ()


def _read(
    program: Program, computation: Computation, each: Instruction, place: int, operand: str
) -> float:
    """Bytes of main memory that an instruction reads of one operand."""
    size = _main(_operand(computation, operand))
    if not size:
        return 0.0
    return min(size, _part(program, each, place, size))


def _part(program: Program, each: Instruction, place: int, size: float) -> float:
    """How much of an operand is read: of a slice or a gather only the result."""
    if each.opcode in _PARTS and place == 0:
        return sum(array.bytes for array in each.arrays)
    if each.opcode == "dynamic-update-slice" and place == 0:
        return 0.0
    if each.opcode == "fusion":
        inside = program.of(each, "calls")[0]
        parameter = inside.parameter(place)
        return size if parameter is None else _part_inside(program, inside, parameter.name, size)
    return size


def _part_inside(program: Program, inside: Computation, name: str, size: float) -> float:
    read = 0.0
    for user in inside.users(name):
        if user.opcode in ("bitcast", "get-tuple-element"):
            read += size if user.root else _part_inside(program, inside, user.name, size)
        else:
            read += _part(program, user, user.operands.index(name), size)
    return min(read, size)


def _written(program: Program, computation: Computation, each: Instruction) -> float:
    """Bytes of main memory that an instruction writes: of an update in place only the update."""
    size = _main(each.arrays)
    return min(size, _written_by(program, computation, each)) if size else 0.0


def _written_by(program: Program, inside: Computation, each: Instruction) -> float:
    if each.opcode == "tuple":
        parts = (inside.instructions.get(name) for name in each.operands)
        return sum(_written_by(program, inside, part) for part in parts if part)
    if each.opcode == "bitcast":
        return _written_by(program, inside, inside.instructions[each.operands[0]])
    if each.opcode == "dynamic-update-slice":
        return sum(array.bytes for array in _operand(inside, each.operands[1]))
    if each.opcode == "fusion":
        within = program.of(each, "calls")[0]
        return _written_by(program, within, within.root)
    return sum(array.bytes for array in each.arrays)


def collectives(program: Program) -> dict[str, Any]:
    """The number of exchanges between devices inside and outside loops, and their kinds."""
    counts: dict[str, Any] = {"inside_loops": 0, "outside_loops": 0, "kinds": {}}
    for _, each, looped in hlo.walk(program):
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            counts["inside_loops" if looped else "outside_loops"] += 1
            counts["kinds"][kind] = counts["kinds"].get(kind, 0) + 1
    return counts


def _like(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Callable[[Array], bool]:
    """Whether an array has one of these types and shapes, in any order of its dimensions."""
    known = {(dtype, _sorted(dims)) for dtype, dims in shapes}
    return lambda array: (array.dtype, _sorted(array.dims)) in known


def _sorted(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size > 1))


def copies(program: Program, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """Copies inside loops of whole buffers with these types and shapes, by where they go.

    "within_main": from main memory to main memory. "to_chip": what is read next is fetched early.
    "from_chip": a buffer was fetched, changed on the chip, and is written back.
    """
    like = _like(shapes)
    counts = {"within_main": 0, "to_chip": 0, "from_chip": 0}
    for computation, each, looped in hlo.walk(program):
        source = [a for name in each.operands[:1] for a in _operand(computation, name) if like(a)]
        if looped and source and like(each.arrays[0]) and _copies(program, each):
            kind = "within_main" if _in_main(source[0]) else "from_chip"
            counts[kind if _in_main(each.arrays[0]) else "to_chip"] += 1
    return counts


def _copies(program: Program, each: Instruction) -> bool:
    if each.opcode == "fusion":
        inside = program.of(each, "calls")[0]
        root = inside.root
        while root.opcode == "bitcast":
            root = inside.instructions[root.operands[0]]
        return root.opcode in ("copy", "transpose")
    return each.opcode in ("copy", "copy-start", "transpose")


def wider_copies(program: Program, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """float32 results in the shape of a bfloat16 weight: a matrix of the arguments, no cache."""
    matrices = [dims for dtype, dims in shapes if dtype == "bf16" and len(dims) == 2]
    like = _like(("f32", dims) for dims in matrices)
    skipped = _FREE | {"get-tuple-element"}
    return sum(
        any(like(array) for array in each.arrays)
        for _, each, _ in hlo.walk(program)
        if each.opcode not in skipped and not each.opcode.endswith("-done")
    )


def transfers(program: Program) -> int:
    """Instructions that send to the host or receive from it."""
    count = 0
    for _, each, _ in hlo.walk(program):
        named = each.opcode.removesuffix("-done") in TRANSFERS
        moved = each.opcode not in _FREE and any(a.memory == HOST for a in each.arrays)
        called = each.opcode == "custom-call" and re.search(
            r'custom_call_target="[^"]*([Hh]ost|callback)', each.attributes
        )
        count += bool(named or moved or called)
    return count
