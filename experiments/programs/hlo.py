"""Reads the text of a compiled program (XLA's HLO): its computations and instructions.

Only text is read: no compiler and no device is needed. The form is that of
``jax.stages.Compiled.as_text()``. What is derived from it is in ``facts.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1,
    "f8e5m2": 1,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z]+\d*(?:e\d+m\d+(?:fn)?)?)\[([\d,<=]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")


class Array(NamedTuple):
    """A buffer: its type, its shape and the memory that it is in."""

    dtype: str
    dims: tuple[int, ...]
    memory: int = 0  # 0: main memory; other numbers are on the chip, 5 is the host's

    @property
    def bytes(self) -> float:
        return BYTES.get(self.dtype, 0) * math.prod(self.dims)


class Instruction(NamedTuple):
    """One instruction of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of its result: one, or those of a tuple
    operands: tuple[str, ...]  # of a parameter its number, of a constant its value
    attributes: str  # the rest of the line
    root: bool = False

    def called(self, *kinds: str) -> list[str]:
        """The names of the computations that it calls as one of ``kinds``, e.g. "body"."""
        names = [name for kind, name in _CALLED.findall(self.attributes) if kind in kinds]
        if "branch" in kinds:
            branches = _BRANCHES.search(self.attributes)
            names += _NAME.findall(branches[1]) if branches else []
        return names

    def number(self, key: str) -> int | None:
        """A number of its configuration, e.g. "estimated_cycles"; None: it has none."""
        found = re.search(rf'"{key}":(?:\{{"n":)?"(\d+)"', self.attributes)
        return int(found[1]) if found else None


class Computation(NamedTuple):
    """Instructions in order, by name."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.root)

    def parameter(self, index: int) -> Instruction | None:
        """The instruction of a parameter; None: there is no such one."""
        return next(
            (
                each
                for each in self.instructions.values()
                if each.opcode == "parameter" and each.operands == (str(index),)
            ),
            None,
        )

    def users(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions.values() if name in each.operands]


class Program(NamedTuple):
    """All computations, and the name of the first one."""

    computations: dict[str, Computation]
    entry: str

    def of(self, instruction: Instruction, *kinds: str) -> list[Computation]:
        """The computations that an instruction calls as one of ``kinds``."""
        return [self.computations[name] for name in instruction.called(*kinds)]


def read(text: str) -> Program:
    """The program of a text. Raises ValueError for a text without an entry."""
    computations: dict[str, Computation] = {}
    entry, now = None, None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            now = Computation(header[2], {})
            computations[now.name] = now
            entry = now.name if header[1] else entry
        elif line.startswith("}"):
            now = None
        elif now is not None and " = " in line:
            instruction = _instruction(line.strip())
            now.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text has no ENTRY computation; it must be that of a compiled program")
    return Program(computations, entry)


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape's text, such as "(f32[2,3]{1,0:S(1)}, s32[])"."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        memory = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
        found.append(Array(dtype, sizes, int(memory[1]) if memory else 0))
    return tuple(found)


def _instruction(line: str) -> Instruction:
    root = line.startswith("ROOT ")
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    inside, attributes = rest[: end - 1], rest[end:]
    operands = (inside,) if opcode in ("parameter", "constant") else tuple(_NAME.findall(inside))
    return Instruction(name.lstrip("%"), opcode, arrays(shape), operands, attributes, root)


def _closing(text: str) -> int:
    """The place after the parenthesis that closes the first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def walk(program: Program) -> Iterator[tuple[Computation, Instruction, bool]]:
    """Every instruction that is executed by itself, and whether it is inside a loop.

    Instructions inside fusions are parts of one instruction and are not listed.
    """
    seen: set[tuple[str, bool]] = set()

    def visit(name: str, looped: bool) -> Iterator[tuple[Computation, Instruction, bool]]:
        if (name, looped) in seen:
            return
        seen.add((name, looped))
        computation = program.computations[name]
        for each in computation.instructions.values():
            yield computation, each, looped
            for called in subprograms(each):
                yield from visit(called, looped or each.opcode == "while")

    return visit(program.entry, False)


def subprograms(each: Instruction) -> list[str]:
    """The computations that are executed by themselves when ``each`` is."""
    if each.opcode == "while":
        return each.called("condition", "body")
    if each.opcode == "conditional":
        return each.called("branch", "true_computation", "false_computation")
    if each.opcode in ("call", "async-start"):
        return each.called("to_apply", "calls")
    return []
