"""Differences between a stored run and the current one: in the configuration, in the state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from specjax.errors import UserError


def check_same(
    stored: dict, config: dict, workdir: str | Path, report: Callable[[str], Any] | None = None
) -> None:
    """Compares two configurations (plain JSON); names the keys in which they differ.

    A larger ``train.steps`` is no difference: it lengthens the run. Raises UserError if they
    differ; with ``report``, calls it with a message instead.
    """
    before, now = dict(_flat(stored)), dict(_flat(json.loads(json.dumps(config))))
    if "train.steps" in before and before["train.steps"] < now.get("train.steps", 0):
        before["train.steps"] = now["train.steps"]
    keys = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    if not keys:
        return
    changes = ", ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys)
    if report is None:
        raise UserError(
            f"{workdir} holds a run with another config ({changes}); "
            "use another workdir, or the old values"
        )
    report(f"the run in {workdir} is resumed with a changed config: {changes}")


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def difference(stored: Any, like: Any) -> str:
    """The first array that only one of two states has, or whose shape or dtype differs; else ""."""
    before, now = _leaves(stored), _leaves(like)
    for name in sorted(before | now):
        if name not in before or name not in now:
            return f"{name} is {'new' if name not in before else 'gone'}"
        was, now_is = (f"{leaf.dtype}{list(leaf.shape)}" for leaf in (before[name], now[name]))
        if was != now_is:
            return f"{name} was {was}, is {now_is}"
    return ""


def _leaves(tree: Any) -> dict[str, Any]:
    """Dotted name -> leaf."""
    return {
        ".".join(map(_key, path)): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _key(entry: Any) -> str:
    """The name of an entry of a path: a dict key, a field or an index."""
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))
