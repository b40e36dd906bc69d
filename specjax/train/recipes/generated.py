"""Objective generate: text that the target writes, to train draft models and heads on.

A draft model should be trained on the text that it will have to draft (Zhou et al. 2023,
DistillSpec, 2310.08461). The target continues prompts from a corpus with speculative decoding; only
L1 rules are allowed, so the law of the text is the target's with any drafter.

``<workdir>/generated`` holds array_record shards with one JSON object per record, and
manifest.json, which is written last. A killed command resumes with the first missing shard. The
random keys of a row depend only on the seed, the number of its prompt and that of its temperature.
``specjax.data.generated_text`` reads the text. With ``config.generation.prompts`` the target
answers questions.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import files, sharding
from specjax.config import Config, given
from specjax.data import pairs, prompts, shards, text_files, token_streams
from specjax.data.generated_text import NAME, SCHEMA
from specjax.data.prompts import PromptSource
from specjax.errors import UserError
from specjax.models import hf
from specjax.prompt import of_text
from specjax.sharding.decoding import check_rows
from specjax.train.display import Meter, report
from specjax.train.recipes import checks, common, pair_material
from specjax.train.recipes import material as materials
from specjax.train.writer import Writer, make_writer, row_keys, write

_VALID = 20  # one of this many prompts is in the valid split
_WIDTH_STEP = 64  # The buffer for prompts of a batch is a multiple of so many tokens.


class Prompt(NamedTuple):
    """The start of a text."""

    number: int
    split: str
    ids: list[int]


def run(config: Config, workdir: Path) -> dict:
    """Writes the text into ``<workdir>/generated``; returns its summary. Resumes a killed command.

    Reads ``config.target``, ``config.seed``, ``config.data``, ``config.generation``,
    ``config.drafter`` and ``config.accept`` (default: chain). Writes config.json and plan.json,
    then the shards, summary.json and the manifest. A finished text is left unchanged. Raises
    UserError.
    """
    return common.write_data(config, workdir, workdir / "generated" / "manifest.json", _prepare)


def _prepare(config: Config, workdir: Path) -> common.Data:
    mesh = _mesh(config)
    target = hf.load(config.target, on_host=mesh is not None)
    writer = make_writer(target, given(config.drafter), config.accept, config.seed, mesh)
    prompts = _prompts(config, workdir, target)
    plan = _plan(config, target, prompts)

    def write_text(folder: Path) -> tuple[dict, dict]:
        totals = _write_shards(config, writer, folder, prompts)
        summary = _summary(totals)
        return summary, {"counts": summary, "shards": totals}

    return common.Data(write_text, plan)


def _mesh(config: Config) -> Mesh | None:
    """The mesh of ``config.mesh``; None: one device. Raises UserError."""
    if config.mesh:
        mesh = sharding.make_mesh(config.mesh)
        check_rows(mesh, config.generation.batch_size)
        return mesh
    if jax.process_count() > 1:
        raise UserError(
            f"config.mesh is empty, and there are {jax.process_count()} processes; give the axes "
            "that divide the work, such as data:-1"
        )
    return None


def _prompts(config: Config, workdir: Path, target: hf.Loaded) -> list[Prompt]:
    """Questions, starts of lines of the corpus, or sources of pairs; the train split is first."""
    sizes, tokenizer = config.generation, target.text_tokenizer
    common.check_room(config, len(token_streams.opening(tokenizer)), target.config.longest_text)
    if target.lm.encoder is None:  # a decoder does not read sources of pairs
        sources = "which takes prompts from files, tfds or the embedded corpus"
        checks.refuse_for_generate(config, ("dialogues", "pairs"), f" for a decoder, {sources}")
    valid = max(1, sizes.num_prompts // _VALID)
    splits = ["train"] * (sizes.num_prompts - valid) + ["valid"] * valid
    if sizes.prompts:
        prompts = _questions(config, target)
    else:
        own = config, workdir, target
        prompts = starts_of(*own, "train", len(splits) - valid) + starts_of(*own, "valid", valid)
    return list(map(Prompt, range(sizes.skip, sizes.skip + len(splits)), splits, prompts))


def starts_of(
    config: Config, workdir: Path, target: hf.Loaded, split: str, count: int
) -> list[list[int]]:
    """``count`` starts of lines of a split, or sources with the start token. Raises UserError."""
    sizes, encoder = config.generation, target.lm.encoder is not None
    with sharding.first_alone():
        texts: Any = (pair_material if encoder else materials).texts(config, workdir, split)
    try:
        own = texts, target.text_tokenizer, count
        if not encoder:
            return token_streams.held_out_prompts(*own, sizes.prompt_tokens, config.seed)
        chosen = pairs.held_out_sources(*own, sizes.prompt_tokens - 1, config.seed)
    except UserError as error:
        raise UserError(
            f"config.generation.num_prompts is {sizes.num_prompts}, {split} split: {error}"
        ) from None
    return [of_text(target.lm, ids, "a source") for ids in chosen]


def _temperatures(config: Config) -> list[float]:
    return list(map(float, config.generation.temperatures))


def _plan(config: Config, target: hf.Loaded, prompts: list[Prompt]) -> dict:
    """Everything that the shards depend on: a resumed command must have the same plan."""
    sizes, ids = config.generation, [prompt.ids for prompt in prompts]
    sampled = {"temperatures": _temperatures(config), "top_k": sizes.top_k, "top_p": sizes.top_p}
    return {
        "format": f"specjax {NAME}",
        "schema": SCHEMA,
        "target": {"name": config.target, "sha256": common.fingerprint(target)},
        "tokenizer": hf.fingerprint(target.text_tokenizer),
        "sampling": sampled,
        "new_tokens": sizes.new_tokens,
        # Sums are rounded differently in a batch of another size.
        "batch_size": sizes.batch_size,
        "width_step": _WIDTH_STEP,
        "shard_prompts": sizes.shard_prompts,
        "drafter": given(config.drafter),
        "accept": config.accept,
        "seed": config.seed,
        "prompts": {
            "sources": _sources(config),
            "tokens": sizes.prompt_tokens,
            **Counter(prompt.split for prompt in prompts),
            "sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        },
    }


def _sources(config: Config) -> list[str]:
    """The names of what the prompts are from."""
    if config.generation.prompts:
        return [Path(name).name for name in text_files.split_names(config.generation.prompts)]
    if pairs := config.data.pairs or config.data.dialogues:
        return list(text_files.split_names(pairs))
    return text_files.names(materials.text_source(config.data))


def _write_shards(
    config: Config, writer: Writer, folder: Path, prompts: Sequence[Prompt]
) -> dict[str, dict]:
    """Writes the missing shards; returns file name -> counts and checksum, of all shards."""
    size, temperatures = config.generation.shard_prompts, _temperatures(config)
    parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    totals: dict[str, dict] = {}
    width = max(len(prompt.ids) for prompt in prompts)
    with Meter("the target writes", len(prompts) * len(temperatures)) as meter:
        for number, chosen in enumerate(parts):
            path = folder / f"shard-{number:05}-of-{len(parts):05}.array_record"
            records = _finished(path, chosen, temperatures)
            if records is None:
                records = _records(config, writer, chosen, width, meter)
                if sharding.is_first():
                    shards.write(path, records)
            else:
                meter.skip(len(records))
            checksum = files.sha256(path) if sharding.is_first() else ""
            totals[path.name] = _counts(records) | {"sha256": checksum}
    return totals


def _records(
    config: Config, writer: Writer, prompts: Sequence[Prompt], width: int, meter: Meter
) -> list[dict]:
    """The records of a shard: prompt by prompt, each with all temperatures in their order.

    Prompts of about the same length are decoded together, in a buffer of at most ``width`` tokens.
    """
    sizes, rows = config.generation, {}
    by_length = sorted(prompts, key=lambda prompt: len(prompt.ids))
    for index, temperature in enumerate(_temperatures(config)):
        settings = {"temperature": temperature, "top_k": sizes.top_k, "top_p": sizes.top_p}
        for start in range(0, len(prompts), sizes.batch_size):
            chosen = by_length[start : start + sizes.batch_size]
            own = min(-(-len(chosen[-1].ids) // _WIDTH_STEP) * _WIDTH_STEP, width)
            keys = row_keys(config.seed, [prompt.number for prompt in chosen], index)
            ids = [prompt.ids for prompt in chosen]
            outputs, rounds = write(
                writer, ids, keys, settings, sizes.new_tokens, sizes.batch_size, own
            )
            for prompt, output, count in zip(chosen, outputs, rounds, strict=True):
                rows[prompt.number, index] = {
                    "prompt": prompt.number,
                    "split": prompt.split,
                    "temperature": temperature,
                    "prompt_ids": prompt.ids,
                    "output_ids": output,
                    "rounds": count,
                }
            meter.add(len(chosen), sum(map(len, outputs)), sum(rounds))
    return [rows[key] for key in sorted(rows)]


def _finished(
    path: Path, prompts: Sequence[Prompt], temperatures: Sequence[float]
) -> list[dict] | None:
    """The records of a finished shard, or None."""
    try:
        records = shards.read(path) if path.is_file() else []
        stored = list(map(operator.itemgetter("prompt", "temperature", "prompt_ids"), records))
    except (ValueError, KeyError, TypeError):
        return None
    expected = [(prompt.number, t, prompt.ids) for prompt in prompts for t in temperatures]
    return records if stored == expected else None


def _counts(records: Sequence[dict]) -> dict:
    return {
        "records": len(records),
        "tokens": sum(len(record["output_ids"]) for record in records),
        "rounds": sum(record["rounds"] for record in records),
    }


def _summary(totals: dict[str, dict]) -> dict:
    names = ("records", "tokens", "rounds")
    total = {name: sum(counts[name] for counts in totals.values()) for name in names}
    rate = total["tokens"] / total["rounds"] if total["rounds"] else None
    return total | {"tokens_per_round": rate, "shards": len(totals)}


def _questions(config: Config, target: hf.Loaded) -> list[list[int]]:
    """``config.generation.num_prompts`` first turns of the conversations in files, as token ids.

    The files ``config.generation.prompts`` are of any kind that mode bench reads, and
    ``config.generation.chat`` is the template as there. Prompts of more than ``prompt_tokens``
    tokens and repeated ones are left out. The others are in a random order that depends on
    ``config.seed``, so the first n of them have the mixture of all, and ``config.generation.skip``
    leaves out those of an earlier run. Raises UserError.
    """
    sizes, unique = config.generation, {}
    names = text_files.split_names(sizes.prompts)
    source = PromptSource(
        names=names, chat=sizes.chat, first_turns=True, section="config.generation"
    )
    for name in names:
        # First turns need no answers.
        for prompt in prompts.read(source, target, lambda chosen: [], name=name).prompts:
            unique[tuple(prompt.ids)] = prompt.ids
    fitting = [ids for ids in unique.values() if len(ids) <= sizes.prompt_tokens]
    last = sizes.skip + sizes.num_prompts
    if len(fitting) < last:
        skipped = f", of which {sizes.skip} are skipped" if sizes.skip else ""
        raise UserError(
            f"{sizes.prompts} has {len(fitting)} different prompts of at most "
            f"{sizes.prompt_tokens} tokens{skipped}, and config.generation.num_prompts is "
            f"{sizes.num_prompts}; lower it, or raise prompt_tokens"
        )
    if len(fitting) < len(unique):
        report(
            f"{len(unique) - len(fitting)} of {len(unique)} prompts have more than "
            f"{sizes.prompt_tokens} tokens and are left out"
        )
    order = np.random.default_rng(config.seed).permutation(len(fitting))
    return [fitting[i] for i in order[sizes.skip : last]]
