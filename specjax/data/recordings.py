"""Reads and writes recorded conversations as JSON Lines.

A line is {"id": ..., "category": ..., "prompt_ids": [...], "output_ids": [...]}; id and category
are optional, further keys are ignored. The recordings of SpecDecode-Bench (Liu et al. 2026,
2601.11580) are read too: their keys are prompt_token_ids and generated_token_ids, and
{"acc_METHOD": {"acc_len": [...]}} has the rounds of a method that was recorded with the text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax import files
from specjax.data import jsonl, prompt_files
from specjax.errors import UserError, on_disk
from specjax.files import buckets

KEYS = ("prompt_ids", "prompt_token_ids"), ("output_ids", "generated_token_ids")
METHOD = "acc_"
LARGEST = 2**24  # no vocabulary is larger, so a larger id is a mistake for every model


class Trace(NamedTuple):
    """One recorded conversation.

    ``rounds`` has, for each recorded method, the tokens that a round gives which begins after 1, 2,
    3, ... tokens of the output, with a draft of any length.
    """

    prompt: list[int]
    output: list[int]
    category: str | None = None
    rounds: Mapping[str, list[int]] = {}


class Recording(NamedTuple):
    """The content of a file."""

    traces: list[Trace]
    vocab_size: int
    skipped: list[dict]  # {"line": number, "why": text} of every skipped line


def read(
    path: str | os.PathLike,
    vocab_size: int = 0,
    *,
    skip_bad: bool = False,
    most: int = 0,
    where: str = "config.traces",
) -> Recording:
    """Reads a recording.

    Args:
        path: the JSON Lines file.
        vocab_size: ids must be below it; 0 = the largest id of the file, plus one.
        skip_bad: skip and list lines that cannot be replayed; otherwise the first is an error.
        most: stop after this many conversations; 0 = no limit.
        where: the setting that names the file, for the messages.

    Raises:
        UserError: a file that cannot be read, is not UTF-8 or has no conversation; a bad line, with
            its number: not a JSON object, a missing key, a value of the wrong type, no tokens, ids
            outside the vocabulary.
    """
    path = buckets.local(path)
    by_replay = where == "config.traces"
    where = f"{where}: {path}"
    traces, skipped = [], []
    for line in jsonl.objects(jsonl.read(path, where, compressed=True), where):
        if most and len(traces) == most:
            break
        trace = _trace(line.value, vocab_size or LARGEST)
        if isinstance(trace, Trace):
            traces.append(trace)
        elif skip_bad:
            skipped.append({"line": line.number, "why": trace})
        else:
            skip = ", or skip such lines with config.skip_bad=true" if by_replay else ""
            raise UserError(f"{line.where}: {trace}; correct it{skip}")
    if not traces and skipped:
        raise UserError(
            f"{where}: none of its {len(skipped)} lines can be replayed; "
            f"line {skipped[0]['line']}: {skipped[0]['why']}"
        )
    if not traces:
        raise UserError(
            f"{where} is empty; give a line for each conversation, with prompt_ids and output_ids"
        )
    vocab_size = vocab_size or 1 + max(max(*t.prompt, *t.output) for t in traces)
    return Recording(traces, vocab_size, skipped)


def _trace(value: dict[str, Any] | None, vocab_size: int) -> Trace | str:
    """The conversation on a line, or a message if the line is wrong."""
    if value is None:
        return "it is no JSON object"
    given = [next((key for key in keys if key in value), keys[0]) for keys in KEYS]
    for key in given:
        ids = value.get(key)
        if not isinstance(ids, list) or not ids:
            problem = "missing" if key not in value else "empty" if ids == [] else "no list"
            return f"{key} is {problem}; it must be a list of at least one token id"
        bad = next((i for i in ids if type(i) is not int or not 0 <= i < vocab_size), None)
        if bad is not None or None in ids:
            return f"{key} has {json.dumps(bad)[:40]}; ids are whole numbers in 0..{vocab_size - 1}"
    category = value.get("category")
    if not isinstance(category, str | None):
        return f"category is {json.dumps(category)[:40]}; it must be a text or null"
    rounds = {}
    for key, own in value.items():
        if not key.startswith(METHOD) or not isinstance(own, dict) or "acc_len" not in own:
            continue
        lengths = own["acc_len"]
        if not isinstance(lengths, list) or any(type(n) is not int or n < 1 for n in lengths):
            return f"the acc_len of {key} must be a list of the tokens of rounds, 1 or more"
        rounds[key.removeprefix(METHOD)] = lengths
    prompt, output = (value[key] for key in given)
    return Trace(prompt, output, category, rounds)


def record(
    path: str | os.PathLike,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    categories: Sequence[str | None] | None = None,
) -> None:
    """Writes a recording for ``read``, all at once; one conversation per line, with its number.

    Args:
        path: the file to write.
        prompts: token ids of each prompt.
        outputs: token ids of each output.
        categories: default to None.

    Raises UserError for lists of unequal length and empty conversations, if writing fails, and what
    ``check_record`` raises.
    """
    check_record(path)
    path, count = Path(path).expanduser(), len(prompts)
    kinds = [None] * count if categories is None else categories
    if not all(map(len, (*prompts, *outputs))):
        raise UserError(
            "a prompt or an output is empty; a conversation has at least one token of each"
        )
    for what, given in (("outputs", outputs), ("categories", kinds)):
        if len(given) != count:
            raise UserError(
                f"there are {count} prompts and {len(given)} {what}; give one for each prompt"
            )
    text = ""
    for number, (kind, prompt, output) in enumerate(zip(kinds, prompts, outputs, strict=True)):
        line = {"id": number, "category": kind, "prompt_ids": list(map(int, prompt))}
        text += json.dumps(line | {"output_ids": list(map(int, output))}) + "\n"
    with on_disk(f"config.record: {path} cannot be written", "make room, or name another"):
        files.write_text(path, text)


def check_record(path: str | os.PathLike, workdir: Path | None = None, prompts: str = "") -> None:
    """Raises UserError if no recording can be written to ``path``.

    ``workdir`` will exist before the recording is written; ``prompts`` is a file that must not be
    overwritten.
    """
    if buckets.is_address(path):
        raise UserError(f"config.record: {path} is in a bucket; name a file of this machine")
    path = Path(path).expanduser()
    prompts = prompt_files.named(prompts)[1]
    if prompts and path.resolve() == buckets.local(prompts).resolve():
        raise UserError(
            f"config.record: {path} is the file of prompts and would be overwritten; name another"
        )
    if workdir is not None and path.parent.resolve() == workdir.resolve() and not path.is_dir():
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        problem = f"cannot be written: {path.parent} is not a writable directory"
        problem = "is a directory" if path.is_dir() else problem
        raise UserError(f"config.record: {path} {problem}; name a file in an existing directory")
