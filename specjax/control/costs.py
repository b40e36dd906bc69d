"""What rounds cost, and how much of a draft is accepted: measured, in a file, or as two numbers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import files
from specjax.bound import Bound
from specjax.checks import number, whole
from specjax.declare import key
from specjax.errors import UserError
from specjax.files import buckets, machine
from specjax.types import Array

SCHEMA = 4
MAKE = "mode bench writes one into profiles/ of its workdir"
# What the key of a controller is.
PROFILE = "a file that mode bench wrote into profiles/ of its workdir"
EXPLORE = "the share of the time that is spent on trials while nothing is drafted"
# Draft lengths to choose from, where no profile names them.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
# What the "lengths" of a profile are: levels of drafts, or nodes of trees.
LEVELS, NODES = "levels", "nodes"
# The acceptance of a token after accepted ones, where it was not measured.
ACCEPTANCE = 0.7
# Where no profile has times, in rounds without a draft: of drafting a token (a level of a tree),
# and of verifying a token, or a node.
DRAFT, VERIFY = 0.1, {LEVELS: 0.05, NODES: 0.02}


class RoundCosts(NamedTuple):
    """What was measured with greedy rows, or with sampled ones."""

    # The time of a whole round with a draft of each length, in units of a round without a draft:
    # the first is 1.
    times: tuple[float, ...]
    # The share of tokens accepted at each depth if those before were, as many as the longest draft
    # has.
    acceptance: tuple[float, ...]
    # A temperature for the drafter's confidence at each depth; (): not fitted.
    heats: tuple[float, ...] = ()
    # Of a drafter that may have no draft: the time of a round in which it has none, and the share
    # of a row's rounds in which it has one.
    empty: float = 1.0
    finds: float = 1.0
    # Of a drafter that reads what was written while it drafted nothing, before its next draft: the
    # time of that for each round without a draft.
    missed: float = 0.0
    # Of ``ltd``: the weights of its two networks; (): not fitted.
    policy: tuple[tuple[np.ndarray, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return self._asdict() | {"policy": [[x.tolist() for x in own] for own in self.policy]}


class Costs(NamedTuple):
    """The rounds that a controller chooses among, for one batch size."""

    lengths: tuple[int, ...]  # draft lengths, ascending from 0
    greedy: RoundCosts
    sampled: RoundCosts

    @property
    def longest(self) -> int:
        """The longest draft."""
        return self.lengths[-1]

    def place(self, drafted: Array) -> Array:
        """i32[]: the place of the first length of at least so many tokens, or of the last one."""
        at = jnp.searchsorted(jnp.asarray(self.lengths), drafted)
        return jnp.minimum(at, len(self.lengths) - 1)

    def each(self, field: str, greedy: Array) -> Array:
        """f32[B,n]: a field of ``RoundCosts`` by row, ``greedy`` bool[B] or sampled.

        n is 1 for numbers.
        """
        pair = (jnp.asarray(getattr(kind, field), jnp.float32) for kind in self[1:])
        return jnp.where(greedy[:, None], *pair)


class Profile(NamedTuple):
    """Measured costs and acceptance of a drafter with a target, on a device."""

    device: str
    target: str
    drafter: str
    batches: dict[int, Costs]  # batch size -> the costs; all have the same lengths
    unit: str = LEVELS  # or NODES, of ``Costs.lengths``

    def near(self, batch: int) -> Costs:
        """The costs of the batch size that was measured, or of the nearest one.

        The shapes of states are derived with other numbers of rows than those that are decoded.
        """
        return self.batches[min(self.batches, key=lambda size: (abs(size - batch), size))]

    def check(self, batch: int) -> None:
        """Raises UserError if the batch size, or this device, was not measured."""
        if self.device != (here := device()):
            raise UserError(
                f"the cost profile was measured on {self.device}, and this is {here}; measure one "
                "here"
            )
        if batch not in self.batches:
            known = ", ".join(map(str, sorted(self.batches)))
            raise UserError(
                f"the cost profile was measured for batches of {known} rows, and the batch has "
                f"{batch}; measure a profile with this batch size"
            )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        batches = {
            str(size): costs._asdict()
            | {"greedy": costs.greedy.to_json(), "sampled": costs.sampled.to_json()}
            for size, costs in self.batches.items()
        }
        return {"schema": SCHEMA, **self._asdict(), "batches": batches}


@functools.cache
def device() -> str:
    """The device that the costs of a profile belong to.

    It is read once: every call of a decode loop compares it.
    """
    kind = jax.devices()[0].device_kind
    return machine()["cpu"] if kind == "cpu" else kind


def read(path: str | os.PathLike, unit: str | None = None) -> Profile:
    """The profile in a file; ``unit`` is what its lengths must be, None: any.

    Raises UserError for a file that is missing, is no profile, or has costs by another unit.
    """
    try:
        value = files.parsed(buckets.local(path).read_text())
    except FileNotFoundError:
        raise UserError(f"there is no cost profile {path}; {MAKE}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"the cost profile {path} cannot be read: {error}") from None
    try:
        if value["schema"] != SCHEMA:
            raise UserError(
                f"the cost profile {path} has schema {value['schema']}; this version reads {SCHEMA}"
            )
        batches = {int(size): _costs(costs) for size, costs in value["batches"].items()}
        where, target, drafter = (str(value[key]) for key in ("device", "target", "drafter"))
        measured = value.get("unit", LEVELS)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{path} is no cost profile ({type(error).__name__}: {error}); {MAKE}"
        ) from None
    if not batches:
        raise UserError(f"the cost profile {path} has no batch size; measure it anew")
    if len({costs.lengths for costs in batches.values()}) > 1:
        raise UserError(
            f"the cost profile {path} has other lengths for other batch sizes; measure it anew"
        )
    if unit is not None and measured != unit:
        raise UserError(
            f"the cost profile {path} has times by {measured} of a draft, and the controller needs "
            f"them by {unit}; measure one with this controller"
        )
    return Profile(where, target, drafter, batches, measured)


def _costs(value: dict[str, Any]) -> Costs:
    """Raises KeyError, TypeError or ValueError for values that are no costs."""
    lengths = tuple(int(length) for length in value["lengths"])
    if list(lengths) != sorted(set(lengths)) or len(lengths) < 2 or lengths[0] != 0:
        raise ValueError(f"lengths are {lengths}; they must ascend from 0")
    greedy, sampled = (_measured(lengths, value[kind]) for kind in ("greedy", "sampled"))
    return Costs(lengths, greedy, sampled)


def _measured(lengths: tuple[int, ...], value: dict[str, Any]) -> RoundCosts:
    """Raises KeyError, TypeError or ValueError unless the numbers belong to these lengths."""
    times, rates, heats = (
        tuple(float(number) for number in value[key]) for key in ("times", "acceptance", "heats")
    )
    empty, finds, missed = (float(value[key]) for key in ("empty", "finds", "missed"))
    if len(times) != len(lengths) or not (np.isfinite(times).all() and min(times) > 0):
        raise ValueError(f"times must be {len(lengths)} positive numbers, one per length")
    if times[0] != 1:
        raise ValueError(f"times begin with {times[0]:g}; a round without a draft is 1")
    if len(rates) != lengths[-1] or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"acceptance must be {lengths[-1]} numbers between 0 and 1")
    if heats and (len(heats) != lengths[-1] or not min(heats) > 0):
        raise ValueError(f"heats must be {lengths[-1]} positive numbers")
    if not (np.isfinite(empty) and empty > 0 and 0 <= finds <= 1):
        raise ValueError("empty must be a positive number, and finds between 0 and 1")
    if not (np.isfinite(missed) and missed >= 0):
        raise ValueError("missed must be a number of at least 0")
    networks = value.get("policy", ())
    with np.errstate(over="ignore"):
        policy = tuple(tuple(np.asarray(x, np.float32) for x in own) for own in networks)
    if not all(np.isfinite(x).all() for own in policy for x in own):
        raise ValueError("the weights of policies must be finite")
    return RoundCosts(times, rates, heats, empty, finds, missed, policy)


Known = Costs | Profile  # of a controller


def known_of(known: Known, batch: int) -> Costs:
    """The costs for a batch size; see ``Profile.near``."""
    return known.near(batch) if isinstance(known, Profile) else known


def lengths(known: Known) -> tuple[int, ...]:
    """The draft lengths of these costs, which are those of every batch size."""
    return (next(iter(known.batches.values())) if isinstance(known, Profile) else known).lengths


def sizes(nodes: int) -> tuple[int, ...]:
    """Tree sizes to choose from, up to ``nodes``; with the pending token most are powers of two."""
    powers = [2**power - 1 for power in range(nodes.bit_length())]
    return (*(size for size in powers if 4 * size < 3 * nodes), nodes)


def check_rows(known: Known) -> Callable[[int], None] | None:
    """``Controller.check_rows`` of these costs."""
    return Bound(Profile.check, known) if isinstance(known, Profile) else None


def known(keys: Any, usual: int, unit: str = LEVELS) -> Known:
    """The costs of a controller's keys: of the file ``profile``, or else those of ``linear``.

    ``usual`` is the longest draft if there is neither the key ``most`` nor a profile.
    """
    most, acceptance = keys.most, getattr(keys, "acceptance", None)
    longest, rate = _or(most, usual), _or(acceptance, ACCEPTANCE)
    costs = linear(longest, drafting(keys), _or(keys.verify, VERIFY[unit]), rate, unit)
    if not keys.profile:
        return costs
    for name in ("draft", "verify"):
        if (cost := getattr(keys, name)) is not None:
            raise UserError(
                f"{name} is {cost:g}, and the cost profile {keys.profile} has measured times; "
                "give only one of them"
            )
    found = read(keys.profile, unit)
    batches = {size: _within(own, most, acceptance) for size, own in found.batches.items()}
    return found._replace(batches=batches)


def drafting(keys: Any) -> float:
    """What a token, or a level of a tree, costs to draft where no profile has times."""
    return _or(keys.draft, DRAFT)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def cost_key(what: str, default: float) -> Any:
    """A key of a controller: what stands for measured times."""
    words = f"what {what} costs, in rounds without a draft, if there is no profile"
    return key(None, f"{words}; None: {default:g}")


def verify_key(unit: str) -> Any:
    """The key ``verify`` of a controller that counts in this unit."""
    what = {LEVELS: "token", NODES: "node"}[unit]
    return cost_key(f"verifying one more {what}", VERIFY[unit])


def _within(costs: Costs, most: int | None, acceptance: float | None) -> Costs:
    """The costs up to the length ``most``, with this acceptance; None: as measured."""
    lengths = costs.lengths
    if most is not None:
        lengths = tuple(length for length in lengths if length <= most)
        if len(lengths) < 2:
            raise UserError(
                f"the longest draft is {most}, and the shortest one of the cost profile has "
                f"{costs.lengths[1]}"
            )

    def cut(own: RoundCosts) -> RoundCosts:
        times, longest = own.times[: len(lengths)], lengths[-1]
        rates = own.acceptance[:longest] if acceptance is None else (acceptance,) * longest
        return own._replace(times=times, acceptance=rates, heats=own.heats[:longest])

    return Costs(lengths, cut(costs.greedy), cut(costs.sampled))


def linear(most: int, draft: float, verify: float, acceptance: float, unit: str = LEVELS) -> Costs:
    """Costs of 1 + k (``draft`` + ``verify``) for a draft of k tokens.

    Of trees of k nodes without the cost of drafting, which depends on the levels. Raises UserError:
    fewer than one token, a negative cost, an acceptance outside [0, 1].
    """
    whole("the longest draft", most, 1)
    for name, value in {"draft": draft, "verify": verify}.items():
        number(f"the cost {name}", value, "of at least 0", lambda x: x >= 0)
    number("the acceptance", acceptance, "between 0 and 1", lambda x: 0 <= x <= 1)
    lengths, each = sizes(most), verify
    if unit == LEVELS:
        lengths = tuple(sorted({*(length for length in LENGTHS if length <= most), most}))
        each += draft
    times = tuple(1 + length * each for length in lengths)
    return Costs(lengths, *[RoundCosts(times, (acceptance,) * most)] * 2)
