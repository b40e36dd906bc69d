"""Objective generate: text that the target writes, to train draft models and heads on.

A draft model should be trained on the text that it will have to draft (Zhou et al. 2023,
DistillSpec, 2310.08461). The target continues prompts from a corpus with speculative decoding; only
L1 rules are allowed, so the law of the text is the target's with any drafter.

``<workdir>/generated`` holds array_record shards with one JSON object per record, and
manifest.json, which is written last. A killed command resumes with the first missing shard. The
random keys of a row depend only on the seed, the number of its prompt and that of its temperature.
``specjax.data.generated_text`` reads the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from specjax import files, sharding
from specjax.config import Config, given
from specjax.data import shards, text_files, token_streams
from specjax.data.generated_text import SCHEMA
from specjax.errors import UserError
from specjax.models import hf
from specjax.sharding.decoding import check_rows
from specjax.train import together
from specjax.train.changes import check_same
from specjax.train.display import Meter
from specjax.train.recipes import checks, common, pair_material, questions
from specjax.train.recipes import material as materials
from specjax.train.writer import Writer, make_writer, row_keys, write

_VALID = 20  # one of this many prompts is in the valid split


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
    workdir, resolved = Path(workdir).expanduser(), common.as_json(config)
    folder = workdir / "generated"
    if any((workdir / other).exists() for other in ("model", "checkpoints")):
        raise UserError(f"{workdir} holds a training run; choose another --workdir")
    if (folder / "manifest.json").exists():
        stored = common.lasting(files.read_json(workdir / "config.json"))
        check_same(stored, common.lasting(resolved), workdir)
        return files.read_json(workdir / "summary.json")
    temperatures = checks.check_generate(config)
    mesh = _mesh(config)
    target = hf.load(config.target, on_host=mesh is not None)
    drafter, rule = given(config.drafter), config.get("accept", "chain")
    writer = make_writer(target, drafter, rule, config.seed, mesh)
    prompts = _prompts(config, workdir, target)
    plan = _plan(config, target, prompts, temperatures)
    if (folder / "plan.json").exists():
        check_same(files.read_json(folder / "plan.json"), plan, workdir)
    with common.writing(workdir):
        folder.mkdir(parents=True, exist_ok=True)
        common.write_json(workdir / "config.json", resolved)
        common.write_json(folder / "plan.json", plan)
        totals = _write_shards(config, writer, folder, prompts, temperatures)
        summary = _summary(totals)
        common.write_json(workdir / "summary.json", summary)
        common.write_json(folder / "manifest.json", plan | {"counts": summary, "shards": totals})
    return together.of_first(summary)


def _mesh(config: Config) -> Mesh | None:
    """The mesh of ``config.mesh``; None: one device. Raises UserError."""
    text = config.get("mesh", "")
    if text:
        mesh = sharding.make_mesh(text)
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
    sizes, tokenizer = config.generation, target.tokenizer
    if tokenizer is None:
        raise UserError(f"{target.directory} has no tokenizer.json; prompts need a tokenizer")
    if (
        len(token_streams.opening(tokenizer)) + sizes.prompt_tokens + sizes.new_tokens
        > target.config.longest_text
    ):
        raise UserError(
            f"config.generation asks for {sizes.prompt_tokens} + {sizes.new_tokens} tokens and the "
            f"model has {target.config.longest_text} positions; lower one of them"
        )
    if target.lm.encoder is None:
        _check_plain(config)
    valid = max(1, sizes.num_prompts // _VALID)
    prompts: list[Prompt] = []
    if sizes.get("prompts"):
        last = sizes.num_prompts - valid
        return [
            Prompt(number, "train" if number < last else "valid", ids)
            for number, ids in enumerate(questions.read(config, target))
        ]
    for split, count in (("train", sizes.num_prompts - valid), ("valid", valid)):
        if target.lm.encoder is not None:
            chosen = pair_material.sources(config, workdir, target, split, count)
            prompts += [Prompt(len(prompts) + n, split, ids) for n, ids in enumerate(chosen)]
            continue
        with together.first_alone():
            texts = materials.texts(config, workdir, split)
        try:
            chosen = token_streams.held_out_prompts(
                texts, tokenizer, count, sizes.prompt_tokens, config.seed
            )
        except UserError as error:
            raise UserError(
                f"config.generation.num_prompts is {sizes.num_prompts}, {split} split: {error}"
            ) from None
        prompts += [Prompt(len(prompts) + n, split, ids) for n, ids in enumerate(chosen)]
    return prompts


def _plan(
    config: Config,
    target: hf.Loaded,
    prompts: list[Prompt],
    temperatures: list[float],
) -> dict:
    """Everything that the shards depend on: a resumed command must have the same plan."""
    sizes, ids = config.generation, [prompt.ids for prompt in prompts]
    assert target.tokenizer is not None
    return {
        "format": "specjax generated text",
        "schema": SCHEMA,
        "target": {"name": config.target, "sha256": common.fingerprint(target)},
        "tokenizer": hf.fingerprint(target.tokenizer),
        "sampling": {"temperatures": temperatures, "top_k": sizes.top_k, "top_p": sizes.top_p},
        "new_tokens": sizes.new_tokens,
        # Sums are rounded differently in a batch of another size.
        "batch_size": sizes.batch_size,
        "shard_prompts": sizes.shard_prompts,
        "drafter": given(config.drafter),
        "accept": config.get("accept", "chain"),
        "seed": config.seed,
        "prompts": {
            "sources": _sources(config),
            "tokens": sizes.prompt_tokens,
            "train": sum(prompt.split == "train" for prompt in prompts),
            "valid": sum(prompt.split == "valid" for prompt in prompts),
            "sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        },
    }


def _check_plain(config: Config) -> None:
    """Raises UserError for sources of pairs, which a decoder does not read."""
    for name in ("dialogues", "pairs"):
        if config.data.get(name):
            raise UserError(
                f"config.data.{name} is not a key of objective generate for a decoder, which takes "
                "prompts from files, tfds or the embedded corpus; leave it out"
            )


def _sources(config: Config) -> list[str]:
    """The names of what the prompts are from."""
    if config.generation.get("prompts"):
        return questions.sources(config)
    if pairs := config.data.get("pairs") or config.data.get("dialogues"):
        return list(text_files.split_names(pairs))
    return text_files.names(materials.text_source(config.data))


def _write_shards(
    config: Config,
    writer: Writer,
    folder: Path,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
) -> dict[str, dict]:
    """Writes the missing shards; returns file name -> counts and checksum, of all shards."""
    size = config.generation.shard_prompts
    parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    totals: dict[str, dict] = {}
    width = max(len(prompt.ids) for prompt in prompts)
    with Meter("the target writes", len(prompts) * len(temperatures)) as meter:
        for number, chosen in enumerate(parts):
            path = folder / f"shard-{number:05}-of-{len(parts):05}.array_record"
            records = _finished(path, chosen, temperatures)
            if records is None:
                records = _records(config, writer, chosen, temperatures, width, meter)
                if sharding.is_first():
                    shards.write(path, records)
            else:
                meter.skip(len(records))
            checksum = files.sha256(path) if sharding.is_first() else ""
            totals[path.name] = _counts(records) | {"sha256": checksum}
    return totals


def _records(
    config: Config,
    writer: Writer,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    width: int,
    meter: Meter,
) -> list[dict]:
    """The records of a shard: prompt by prompt, each with all temperatures in their order."""
    sizes, rows = config.generation, {}
    for index, temperature in enumerate(temperatures):
        settings = {"temperature": temperature, "top_k": sizes.top_k, "top_p": sizes.top_p}
        for start in range(0, len(prompts), sizes.batch_size):
            chosen = prompts[start : start + sizes.batch_size]
            keys = row_keys(config.seed, [prompt.number for prompt in chosen], index)
            ids = [prompt.ids for prompt in chosen]
            outputs, rounds = write(
                writer, ids, keys, settings, sizes.new_tokens, sizes.batch_size, width
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
        stored = [
            (record["prompt"], record["temperature"], record["prompt_ids"]) for record in records
        ]
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
