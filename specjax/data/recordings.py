"""Recorded conversations as JSON Lines, in and out.

A line is {"id": ..., "category": ..., "prompt_ids": [...], "output_ids": [...]}; id and category may be left out, further keys
are not looked at.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.data import jsonl
from specjax.errors import UserError

LARGEST = 2**24  # no vocabulary is larger: an id beyond it is a mistake, whatever the model


class Trace(NamedTuple):
    """One recorded conversation."""

    prompt: list[int]
    output: list[int]
    category: str | None = None


class Recording(NamedTuple):
    """What a file holds."""

    traces: list[Trace]
    vocab_size: int
    skipped: list[dict]  # {"line": number, "why": text} of every line left out


def read(
    path: str | os.PathLike, vocab_size: int = 0, *, skip_bad: bool = False, most: int = 0
) -> Recording:
    """Reads a recording.

    Args:
        path: the JSON Lines file.
        vocab_size: ids must be below it; 0 = the largest id there is, plus one.
        skip_bad: whether lines that cannot be replayed are left out, and listed; else the first of them is an error.
        most: reads no further than so many conversations; 0 = all.

    Raises:
        UserError: a file that cannot be read, is not UTF-8 or has no conversation, and naming its number the first bad line:
            no JSON object, a key missing or of another kind, no tokens, ids outside the vocabulary.
    """
    path = Path(path).expanduser()
    where = f"config.traces: {path}"
    traces, skipped = [], []
    for number, line in jsonl.lines(jsonl.read(path, where)):
        if most and len(traces) == most:
            break
        trace = _trace(line, vocab_size or LARGEST)
        if isinstance(trace, Trace):
            traces.append(trace)
        elif skip_bad:
            skipped.append({"line": number, "why": trace})
        else:
            raise UserError(
                f"{where} line {number}: {trace}; mend it, or leave such lines out with config.skip_bad=true"
            )
    if not traces and skipped:
        raise UserError(
            f"{where}: none of its {len(skipped)} lines can be replayed; line {skipped[0]['line']}: {skipped[0]['why']}"
        )
    if not traces:
        raise UserError(
            f"{where} is empty; give a line for each conversation, with prompt_ids and output_ids"
        )
    return Recording(
        traces, vocab_size or 1 + max(max(*t.prompt, *t.output) for t in traces), skipped
    )


def _trace(line: str, vocab_size: int) -> Trace | str:
    """The conversation on a line, or what is wrong with it."""
    value = jsonl.parse(line)
    if value is None:
        return "it is no JSON object"
    for key in ("prompt_ids", "output_ids"):
        ids = value.get(key)
        if not isinstance(ids, list) or not ids:
            told = "missing" if key not in value else "empty" if ids == [] else "no list"
            return f"{key} is {told}; it must be a list of at least one token id"
        bad = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), None)
        if bad is not None or None in ids:
            return f"{key} has {json.dumps(bad)[:40]}; ids are whole numbers in 0..{vocab_size - 1}"
    category = value.get("category")
    if not isinstance(category, str | None):
        return f"category is {json.dumps(category)[:40]}; it must be a text or null"
    return Trace(value["prompt_ids"], value["output_ids"], category)


def record(
    path: str | os.PathLike,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    ids: Sequence[Any] | None = None,
    categories: Sequence[str | None] | None = None,
) -> None:
    """Writes a recording that ``read`` reads, all at once: token ids of prompts and outputs, one conversation a line.

    ``ids`` default to 0, 1, ... Raises UserError for lists of unequal length, and what ``check_record`` raises.
    """
    check_record(path)
    path, count = Path(path).expanduser(), len(prompts)
    names = range(count) if ids is None else ids
    kinds = [None] * count if categories is None else categories
    if not all(map(len, (*prompts, *outputs))):
        raise UserError(
            "a prompt or an output is empty; a conversation has at least one token of each"
        )
    for what, given in (("outputs", outputs), ("ids", names), ("categories", kinds)):
        if len(given) != count:
            raise UserError(
                f"there are {count} prompts and {len(given)} {what}; give one for each prompt"
            )
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        fresh = Path(beside) / "new"
        with fresh.open("w", encoding="utf-8") as file:
            for name, kind, prompt, output in zip(names, kinds, prompts, outputs, strict=True):
                line = {"id": name, "category": kind, "prompt_ids": list(map(int, prompt))}
                file.write(json.dumps(line | {"output_ids": list(map(int, output))}) + "\n")
        fresh.replace(path)


def check_record(path: str | os.PathLike, workdir: Path | None = None, prompts: str = "") -> None:
    """Raises UserError if no recording can be written there. ``workdir`` will be there when it is; ``prompts`` is the file that
    must not be lost."""
    path = Path(path).expanduser()
    if prompts and path.resolve() == Path(prompts).expanduser().resolve():
        raise UserError(
            f"config.record: {path} is the file of prompts, which this would overwrite; name another"
        )
    if workdir is not None and path.parent.resolve() == workdir.resolve() and not path.is_dir():
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        what = (
            "is a directory"
            if path.is_dir()
            else f"cannot be written: {path.parent} is not a writable directory"
        )
        raise UserError(f"config.record: {path} {what}; name a file in a directory that is there")
