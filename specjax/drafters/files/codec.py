"""How the head files of a method are read and written: its tensor names, and what else is its own.

A method with released files, or with files that specjax writes in a form of their own, has an
attribute ``CODEC``. Its tables say where each tensor of a file is among our parameters; one table
is used for reading and for writing. A ``Rule`` stands for one tensor, or for several with numbers:

    Rule("{i}.{2j+1}.weight", "block.kernel[{i},{j}]", "D D", True)

``{i}`` is an index from 0, ``{I}`` the number of values of i, ``{2j+1}`` a number that follows from
an index. Numbers in brackets are indices along the stacked axes of a leaf. "D D" are the tensor's
own dimensions as letters; the first tensor with a letter defines its size, and "3D" is three times
D. Linear weights are (out, in) in files and (in, out) here, which is what True says.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from specjax import registry
from specjax.errors import UserError

Leaves = dict[tuple, Any]
Sizes = Mapping[str, int]  # of the letters
Config = dict[str, Any]  # config.json
Facts = Callable[[], Config]
Written = tuple[Config, dict[str, np.ndarray]]
Shapes = Mapping[tuple, tuple[int, ...]]
# Name in the file -> a function that reads the tensor.
Tensors = dict[str, Callable[[], np.ndarray]]
# The key of config.json for what specjax states without a dialect.
OWN = "specjax"
_NUMBER = re.compile(r"\{(\d*)([a-zA-Z])(?:\+(\d+))?\}")


class Place(NamedTuple):
    """The place of a file's tensor among the parameters."""

    path: tuple[str, ...]  # the leaf
    at: tuple[int, ...]  # index along its leading axes
    dims: str  # of the tensor in the parameters
    transposed: bool = False  # the file has the transposed tensor


# Name in the file -> its place.
Layout = dict[str, Place]


class Rule(NamedTuple):
    """The tensors of a file with one form of name.

    ``parts`` are names of optional parts that the tensors belong to: a tensor of a part shows that
    the part is there, and then all of its tensors must be. With "?part" the rule holds only where
    the part is there, with "!part" only where it is not, and its tensors show nothing of that part.
    """

    name: str
    place: str
    dims: str
    transposed: bool = False
    parts: str = ""

    def holds(self, present: Collection[str]) -> bool:
        """Whether files with these parts have the tensors."""
        return all(
            part[1:] not in present if part[0] == "!" else part.removeprefix("?") in present
            for part in self.parts.split()
        )

    @property
    def shows(self) -> set[str]:
        """The parts that a tensor of this rule shows."""
        return {part for part in self.parts.split() if part[0] not in "?!"}


Rules = tuple[Rule, ...]


def linear(name: str, place: str, dims: str, bias: str | None = None, parts: str = "") -> Rules:
    """The tensors of a linear map; ``bias``: None for none, or the part that it belongs to."""
    return _with_bias(name, place, "kernel", dims, bias, parts)


def scale(
    name: str, place: str, dims: str = "D", bias: str | None = None, parts: str = ""
) -> Rules:
    """The tensors of a norm; ``bias``: None for none, or the part that it belongs to."""
    return _with_bias(name, place, "scale", dims, bias, parts)


def _with_bias(name: str, place: str, leaf: str, dims: str, bias: str | None, parts: str) -> Rules:
    path, bracket, at = place.partition("[")
    weight = f"{path}.{leaf}{bracket}{at}"
    rules = (Rule(f"{name}.weight", weight, dims, leaf == "kernel", parts),)
    if bias is None:
        return rules
    place, parts = f"{path}.bias{bracket}{at}", f"{parts} {bias}".strip()
    return (*rules, Rule(f"{name}.bias", place, dims.split()[-1], parts=parts))


@functools.cache
def _pattern(form: str) -> tuple[re.Pattern, list[tuple[int, str, int]]]:
    """A form with numbers as a regular expression; (factor, index, offset) of each number."""
    # The texts between the numbers, with the three groups of a number after each.
    texts = _NUMBER.split(form)[::4]
    numbers = [(int(a or 1), index, int(b or 0)) for a, index, b in _NUMBER.findall(form)]
    return re.compile(r"(\d+)".join(map(re.escape, texts))), numbers


def _indices(form: str, text: str) -> dict[str, int] | None:
    """The indices with which ``form`` is ``text``; None: there are none."""
    pattern, numbers = _pattern(form)
    if (match := pattern.fullmatch(text)) is None:
        return None
    found: dict[str, int] = {}
    for (factor, index, offset), digits in zip(numbers, match.groups(), strict=True):
        value, rest = divmod(int(digits) - offset, factor)
        if index.islower():
            if rest or value < 0:
                return None
            found[index] = value
    return found


def _indices_in(form: str) -> list[str]:
    """The indices of a form, without counts."""
    return [index for _, index, _ in _pattern(form)[1] if index.islower()]


def _fill(form: str, indices: Mapping[str, int]) -> str:
    """``form`` with these indices and counts."""

    def number(match: re.Match) -> str:
        factor, index, offset = match.groups()
        return str(int(factor or 1) * indices[index] + int(offset or 0))

    return _NUMBER.sub(number, form)


def _layout(rules: Rules, texts: Collection[str], side: str) -> Layout:
    """The complete layout of a file with some of these names, or of parameters with these places.

    ``side`` is "name" or "place". An index has as many values as there are different ones: a wrong
    number in a name can be huge.
    """
    values, present = collections.defaultdict(set), set()
    for rule, text in itertools.product(rules, texts):
        found = _indices(getattr(rule, side), text)
        if found is not None:
            present |= rule.shows
            for index, value in found.items():
                values[index].add(value)
    layout: Layout = {}
    counts = collections.defaultdict(int, {key.upper(): len(each) for key, each in values.items()})
    for own, group in itertools.groupby(rules, lambda rule: _indices_in(rule.name)):
        there = [rule for rule in group if rule.holds(present)]
        every = itertools.product(*(range(counts[index.upper()]) for index in own))
        for at, rule in itertools.product(every, there):
            numbers = counts | dict(zip(own, at, strict=True))
            path, _, stacked = _fill(rule.place, numbers).rstrip("]").partition("[")
            index, dims = map(int, filter(None, stacked.split(","))), _fill(rule.dims, numbers)
            place = Place(tuple(path.split(".")), tuple(index), dims, rule.transposed)
            layout[_fill(rule.name, numbers)] = place
    return layout


def _text(path: Iterable[str], at: Iterable[int]) -> str:
    """A place as a ``Rule`` writes it."""
    numbers = ",".join(map(str, at))
    return ".".join(path) + (f"[{numbers}]" if numbers else "")


def _places(rules: Rules, shapes: Shapes) -> list[str]:
    """The places of all tensors that the parameters with these shapes are stored as."""
    axes = {rule.place.partition("[")[0]: len(re.findall(r"[\[,]", rule.place)) for rule in rules}
    found = []
    for path, shape in shapes.items():
        form = next((x for x in axes if _indices(x, ".".join(path)) is not None), "")
        stacked = map(range, shape[: axes.get(form, 0)])
        found += [_text(path, at) for at in itertools.product(*stacked)]
    return found


def bind(sizes: dict[str, int], dims: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor must have; adds to ``sizes`` the letters that it defines."""
    pairs = [(int(dim[:-1] or 1), dim[-1]) for dim in dims.split()]
    # Some letters have no tensor with the factor 1.
    for once in (True, False):
        for (factor, letter), size in zip(pairs, shape, strict=False):
            if factor == 1 or (not once and size % factor == 0):
                sizes.setdefault(letter, size // factor)
    return tuple(factor * sizes.get(letter, 0) for factor, letter in pairs)


class Found(NamedTuple):
    """What is known of files before their tensors are read."""

    where: Any  # their directory; a text where parameters are written
    config: dict[str, Any]  # config.json
    layout: Layout
    maps: dict[str, np.ndarray]  # the tensors that are no parameters
    tied: bool  # whether all copies of one module are equal


class Suited(NamedTuple):
    """How heads are written for a program that drafts with them."""

    layout: str
    config: Config  # as in ``Head.config``
    note: str = ""  # what the user must do there


# The programs for which heads can be written.
ENGINES = ("vllm", "sglang", "tpu-inference", "sglang-jax", "llama.cpp", "speculators")


class Codec:
    """The files of one method: its tables, and methods for what is its own."""

    # In the order of preference; the first is written. model.safetensors may have shards.
    files: ClassVar[tuple[str, ...]] = ("model.safetensors",)
    # Of the forms in which files exist. The first is written.
    tables: ClassVar[Mapping[str, Rules]]
    # What a user may choose for writing, each with a table of its own or the first.
    layouts: ClassVar[tuple[str, ...]] = ()
    # model_type of config.json, if it is not the name of the method; the first is written.
    types: tuple[str, ...] = ()
    # Methods whose model_type other programs use for this one too.
    alike: ClassVar[tuple[str, ...]] = ()
    # Other libraries choose the class to load by this key of config.json.
    architectures: ClassVar[tuple[str, ...]] = ()
    # Tensors that are no parameters.
    maps: ClassVar[tuple[str, ...]] = ()
    # Leaves that may hold copies of one module: blocks of a head, or the stages of a tied network.
    repeated: ClassVar[tuple[str, ...]] = ()

    # Program that drafts -> the layout that it reads.
    engines: ClassVar[Mapping[str, str]] = {}

    # Keys of ``Head.config`` that no tensor shows -> their values, for ``files.probe``. Of the key
    # ``numbered``, a list of layers, the neighbours are tried.
    open: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    numbered: ClassVar[str] = ""

    # Whether the heads may lie among the tensors of their target: ``in_target``.
    inside: ClassVar[bool] = False

    # Notes in ``config["read_as"]`` on keys that may mean something else: they are worth a warning.
    doubts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, kind: str):
        self.kind = kind
        self.types = self.types or (kind,)

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        """The tensors of the heads alone, under the names of the tables.

        Raises UserError for what cannot be read, by the name of what it is.
        """
        return tensors

    def tables_of(self, names: Collection[str]) -> Iterable[Rules]:
        """The tables of which one is that of a file with these names."""
        return self.tables.values()

    def table(self, layout: str, shapes: Shapes, config: Mapping[str, Any]) -> Rules:
        """The table by which parameters of these shapes are written; "": the first layout."""
        return self.tables.get(layout, next(iter(self.tables.values())))

    def reduce(self, found: Found) -> Found:
        """What is read of the files."""
        return found

    def decode(self, found: Found, leaves: Leaves, sizes: Sizes) -> tuple[Leaves, Config]:
        """(leaves, ``Head.config``) of files; ``sizes`` are those of the letters."""
        return leaves, found.config | self.facts(found, leaves, sizes)

    def arrange(self, layout: str, leaves: Leaves, config: Mapping[str, Any]) -> Leaves:
        """The leaves as the tensors of a layout hold them."""
        return leaves

    def encode(self, layout: str, leaves: Leaves, config: Config, facts: Facts) -> Written:
        """(config.json, tensors that are no parameters); ``facts`` gives those of ``facts``."""
        return config | facts(), {}

    def facts(self, found: Found, leaves: Leaves, sizes: Sizes) -> Config:
        """What follows from the tensors, under the keys of released configs."""
        kind = self.types[0]
        return {"model_type": kind, "hidden_size": sizes["D"], "vocab_size": sizes.get("V")}

    def usual_layout(self, paths: Collection[tuple]) -> str:
        """The layout in which parameters with these paths are written if none is named."""
        return next(iter(self.layouts), "")

    def check_layout(self, layout: str) -> str:
        """The layout; "" is none. Raises UserError."""
        if layout and layout not in self.layouts:
            there = f"there is {', '.join(self.layouts)}" if self.layouts else "leave it out"
            raise UserError(f"{self.kind} heads have no layout {layout!r}; {there}")
        return layout

    def obstacles(self, engine: str, leaves: Leaves, config: Config) -> dict[str, Any]:
        """What an engine computes otherwise -> whether these heads need it."""
        return {}

    def suit(self, engine: str, leaves: Leaves, config: Config) -> Suited:
        """How heads are written for an engine. Raises UserError if it cannot draft with them."""
        front = f"{engine} cannot draft with these {self.kind} heads"
        if engine not in self.engines:
            there = f"those that read them: {', '.join(self.engines) or 'none'}"
            raise UserError(f"{front}: it reads no {self.kind} heads; {there}")
        for problem, needed in self.obstacles(engine, leaves, config).items():
            if needed:
                raise UserError(f"{front}: {problem}")
        return Suited(self.engines[engine], config)

    def in_target(self, where: Path, raw: Config, own: Config, engine: str) -> Config:
        """config.json of a target in ``where`` with these heads inside, for ``inside``.

        ``raw`` is that of the target alone, ``own`` that of the heads as written. Raises UserError
        if the target has other sizes, or is none that the engine reads.
        """
        raise UserError(f"{self.kind} heads do not lie inside their target; leave into out")

    def layout_of_names(self, names: Collection[str]) -> Layout:
        """The complete layout of a file with these names; some may be missing in the file."""
        layouts = [_layout(rules, names, "name") for rules in self.tables_of(names)]
        return min(layouts, key=lambda layout: len(layout.keys() ^ set(names)))

    def layout_of_leaves(
        self, leaves: Mapping[tuple, Any], layout: str = "", config: Mapping[str, Any] | None = None
    ) -> Layout:
        """The layout of the file for these parameters. Raises UserError if they are others."""
        texts = all(isinstance(part, str) for path in leaves for part in path)
        shapes = {path: getattr(leaf, "shape", ()) for path, leaf in leaves.items() if texts}
        problem, rules = "it has no arrays", self.table(layout, shapes, config or {})
        places = set(_places(rules, shapes))
        result = _layout(rules, places, "place")
        wrong = places ^ {_text(place.path, place.at) for place in result.values()}
        if wrong:
            first = min(text.partition("[")[0].split(".") for text in wrong)
            problem = f"{'.'.join(first)} is missing, unexpected or of the wrong length"
        if wrong or not result:
            raise UserError(
                f"the parameters are not those of {self.kind} heads ({problem}); give the "
                "parameters of such heads"
            )
        return result

    def check(self, params: Any, sizes: Mapping[str, int]) -> None:
        """Raises UserError unless ``params`` are the parameters of such heads.

        ``sizes`` has the expected size of some letters; other letters may have any size.
        """
        leaves: Leaves = dict(flatten_dict(params)) if isinstance(params, dict) else {}
        known = dict(sizes)
        for place in self.layout_of_leaves(leaves).values():
            shape = tuple(map(int, np.shape(leaves[place.path])))
            stacked, own = shape[: len(place.at)], shape[len(place.at) :]
            expected = bind(known, place.dims, own)
            if own != expected:
                raise UserError(
                    f"{'.'.join(place.path)} of the {self.kind} heads is {list(shape)}, and on "
                    f"this target it must be {[*stacked, *expected]}; use heads made for this "
                    "target"
                )


_PACKAGE = "specjax.drafters"


def of(kind: str) -> Codec | None:
    """The codec of a method; None: its parameters are stored as the tree that they are."""
    if kind not in registry.modules(_PACKAGE):
        return None
    return getattr(registry.load(_PACKAGE, kind, "drafter"), "CODEC", None)


@functools.cache
def every() -> dict[str, Codec]:
    """The codecs of all methods that have one."""
    found = {kind: of(kind) for kind in registry.names(_PACKAGE)}
    return {kind: codec for kind, codec in found.items() if codec is not None}
