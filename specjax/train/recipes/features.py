"""Objective features: what the target computes for a text, stored once for training heads.

``<workdir>/features`` holds array_record shards of rows (``data.feature_store``), how often each
token is a label, and manifest.json, which is written last. A killed command resumes with the first
missing shard. ``config.data.features`` reads the directory.
"""

from __future__ import annotations

import functools
import itertools
import operator
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.filesize import decimal

from specjax import files, sampling, sharding
from specjax.config import Config
from specjax.data import feature_store, packing, token_streams
from specjax.data.feature_store import RecordLayout
from specjax.data.packing import Document
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import objectives, update
from specjax.train.display import Meter, report
from specjax.train.placement import place
from specjax.train.recipes import common
from specjax.train.recipes import material as materials
from specjax.train.recipes.material import Text
from specjax.train.recipes.pair_material import spaced
from specjax.types import LM, Batch

# (texts, the rows of each that are wanted) -> the records of these, in order.
Compute = Callable[[Sequence[Batch], Sequence[Sequence[int]]], list[bytes]]


class Rows(NamedTuple):
    """The rows of one split; they do not change from epoch to epoch.

    The target reads whole texts, which are cut into rows of ``length`` tokens.
    """

    length: int
    text: Callable[[Any], Batch]
    parts: list[tuple[Any, int]]  # of each row, its text and its place there

    def row(self, number: int) -> Batch:
        """A row without features."""
        text, place = self.parts[number]
        cut = packing.cut(self.text(text), self.length)
        return jax.tree.map(lambda x: x[place : place + 1], cut)

    def first(self, most: int) -> Rows:
        """At most so many rows, evenly spaced; 0: all."""
        count = len(self.parts)
        return self._replace(parts=spaced(self.parts, min(most or count, count)))


def run(config: Config, workdir: Path) -> dict:
    """Writes the features into ``<workdir>/features``; returns their summary.

    Reads ``config.target``, ``config.seed``, ``config.data``, ``config.features``, ``config.train``
    and ``config.examine``. Writes config.json and plan.json, then the shards, summary.json and the
    manifest. Resumes a killed command; finished features are left unchanged. Raises UserError.
    """
    manifest = workdir / "features" / "manifest.json"
    return common.write_data(config, workdir, manifest, _prepare)


def _prepare(config: Config, workdir: Path) -> common.Data:
    target = common.load_target(config)
    if target.lm.encoder is not None:
        raise UserError(
            f"{target.directory} is an encoder-decoder model, and features are stored of decoders "
            "only; train the heads without config.data.features"
        )
    taps = tuple(config.features.taps)
    model = target.lm.with_taps(taps)
    text = materials.read(config, workdir, target.text_tokenizer, target.directory)
    rows = _rows(config, text, target.lm.max_positions)
    assert model.width is not None
    stored, documents = config.features.dtype, bool(text.documents)
    layout = RecordLayout(config.train.length, model.width, taps, stored, documents, teacher=True)
    plan = _plan(config, target, text, rows, layout)
    _check_room(workdir, plan["bytes"])

    def write(folder: Path) -> tuple[dict, dict]:
        report(_sizes(plan, folder))
        compute = _computer(config, target, model, layout)
        totals, counts = _write_shards(folder, layout, plan, rows, compute, target.lm.vocab_size)
        if sharding.is_first():
            with files.replacing(folder / feature_store.COUNTS) as fresh, open(fresh, "wb") as file:
                np.save(file, counts)
        return _summary(plan, totals), {"shards": totals}

    return common.Data(write, plan)


def _rows(config: Config, text: Text, positions: int | None) -> dict[str, Rows]:
    """The rows of both splits. Raises UserError for too little text."""
    length, most = config.train.length, config.features.rows
    size = min(config.features.text, positions or config.features.text)
    size = max(size // length, 1) * length
    count = config.train.batch_size * config.train.eval_batches
    if text.streams:
        token_streams.Batches(text.streams["train"], 1, length)  # raises if it is too short
        rows = {split: _of_stream(each, length, size) for split, each in text.streams.items()}
    else:

        def train(own: Sequence[Document], room: int, context: int) -> tuple[Any, int]:
            packed = packing.Packed(own, 1, room, config.seed, context)
            return packed.batch, packed.rows

        def valid(own: Sequence[Document], room: int, context: int) -> tuple[Any, int]:
            batches = packing.held_out(own, 1, room, count, context)
            return batches.__getitem__, len(batches)

        rows = {
            split: _of_documents(text.documents[split], length, size, pack)
            for split, pack in (("train", train), ("valid", valid))
        }
        if line := packing.about_windows(text.documents["train"], size, size // 2):
            report(line)
    return {"train": rows["train"].first(most), "valid": rows["valid"].first(count)}


def _of_stream(stream: np.ndarray, length: int, size: int) -> Rows:
    """All tokens. A row begins with the last token of the row before."""
    rows = (len(stream) - 1) // length
    number = min(size // length, rows)

    def text(first: int) -> Batch:
        # Any: a NumPy array, which is moved to the devices later.
        tokens: Any = stream[None, first * length : (first + number) * length + 1]
        return Batch(tokens)

    # The last text ends with the stream, and begins inside of the one before.
    firsts = [min(row // number * number, rows - number) for row in range(rows)]
    parts = [(first, row - first) for row, first in enumerate(firsts)]
    return Rows(length, text, parts)


def _of_documents(
    documents: Sequence[Document],
    length: int,
    size: int,
    pack: Callable[[Sequence[Document], int, int], tuple[Callable[[int], Batch], int]],
) -> Rows:
    """Documents as ``pack`` puts them into rows of a length, with so much context of windows.

    Those that fit into one row stay whole. Longer ones are packed into texts of ``size`` tokens,
    which are cut. Rows without a label are left out.
    """
    short = [each for each in documents if len(each.ids) <= length + 1 or size == length]
    long = [each for each in documents if len(each.ids) > length + 1 and size > length]
    labelled = lambda some: any(each.labelled[1:].any() for each in some)  # noqa: E731
    groups = [each for each in ((short, length), (long, size)) if labelled(each[0])]
    # Without labels an error.
    texts = [pack(own, room, room // 2) for own, room in groups or [(documents, length)]]

    def text(number: tuple[int, int]) -> Batch:
        return texts[number[0]][0](number[1])

    parts = []
    for group, (_, count) in enumerate(texts):
        for number in range(count):
            # Packed rows have labels and segments, and so a mask.
            mask = np.asarray(objectives.labels_of(packing.cut(text((group, number)), length))[1])
            parts += [((group, number), int(place)) for place in np.flatnonzero(mask.any(1))]
    return Rows(length, functools.lru_cache(64)(text), parts)


def _plan(
    config: Config, target: hf.Loaded, text: Text, rows: dict[str, Rows], layout: RecordLayout
) -> dict:
    """Everything that the shards depend on: a resumed command must have the same plan."""
    size, counts = layout.record.itemsize, {split: len(each.parts) for split, each in rows.items()}
    return {
        "format": f"specjax {feature_store.NAME}",
        "schema": feature_store.SCHEMA,
        "target": {"name": config.target, "sha256": common.fingerprint(target)},
        "tokenizer": hf.fingerprint(target.text_tokenizer),
        "text": text.digest,
        **layout._asdict(),
        "taps": list(layout.taps),
        "precision": config.train.precision,
        # Sums are rounded differently in a batch of another size.
        "batch_size": config.train.batch_size,
        "seed": config.seed,
        "rows": counts,
        "bytes_per_token": layout.bytes_per_token,
        "bytes": sum(counts.values()) * size,
        # A text whose rows are in two shards is read twice.
        "shard_rows": max(
            config.features.shard_megabytes * 10**6 // size,
            4 * max(1, config.features.text // layout.length),
        ),
        "read": config.features.text,
        "prompts": {"tokens": config.examine.prompt_tokens, "ids": text.prompts},
    }


def _check_room(workdir: Path, needed: int) -> None:
    """Raises UserError if the disk has too little room for the bytes that are not yet there."""
    existing = next(path for path in (workdir, *workdir.absolute().parents) if path.exists())
    there = sum(path.stat().st_size for path in workdir.glob("features/*.array_record"))
    free = shutil.disk_usage(existing).free
    if needed - there > free:
        raise UserError(
            f"the features take {decimal(needed - there)} more and {existing} has {decimal(free)}; "
            "store fewer rows (config.features.rows) or in fewer bits (config.features.dtype)"
        )


def _sizes(plan: dict, folder: Path) -> str:
    """One line: what is stored, and how large it becomes."""
    vectors = 1 + len(plan["taps"])
    each = "1 vector" if vectors == 1 else f"{vectors} vectors"
    return (
        f"features of {plan['rows']['train']:,} rows and {plan['rows']['valid']:,} held-out rows "
        f"of {plan['length']:,} tokens: {plan['bytes_per_token']:,} bytes per token ({each} of "
        f"{plan['width']:,} {plan['dtype']}), {decimal(plan['bytes'])} in {folder}"
    )


def _computer(config: Config, target: hf.Loaded, model: LM, layout: RecordLayout) -> Compute:
    """The target's features of texts, of about as many tokens at once as a step of training has."""
    placement, length = place(config.mesh), layout.length
    params = placement.put_params(update.cast(target.params, config.train.precision))

    def cut(x: jax.Array, axis: int) -> jax.Array:
        """[B,...,n*length,...] -> [B*n,...,length,...]: those of ``packing.cut``."""
        parts = x.reshape(*x.shape[:axis], -1, length, *x.shape[axis + 1 :])
        parts = jnp.moveaxis(parts, axis, 1)
        return parts.reshape(-1, *parts.shape[2:])

    def forward(params: Any, _: Any, batch: Batch) -> tuple[jax.Array | None, ...]:
        out = objectives.output_of(model, params, batch)
        bits = feature_store.in_bits(cut(jnp.stack([out.hidden, *out.taps], 1), 2), layout.dtype)
        # The logits of one row of each text at a time are in memory.
        pieces = out.hidden.reshape(len(out.hidden), -1, length, out.hidden.shape[-1])
        total, best = jax.lax.map(functools.partial(_teacher, model, params), pieces.swapaxes(0, 1))
        return *bits, *(x.swapaxes(0, 1).reshape(-1, length) for x in (total, best))

    features = jax.jit(placement.gathering(forward))

    def parts(texts: Sequence[Batch]) -> Iterator[Any]:
        """(rows, their features on the device) of each batch of texts, and None at the end."""
        size = max(config.train.batch_size * length // (texts[0].tokens.shape[1] - 1), 1)
        size = -(-size // placement.parts) * placement.parts
        for start in range(0, len(texts), size):
            chosen = list(texts[start : start + size])
            # All batches have the same shape: one compiled program.
            chosen += [chosen[0]] * (size - len(chosen))
            whole = jax.tree.map(lambda *each: np.concatenate(each), *chosen)
            yield packing.cut(whole, length), features(params, {}, placement.batch(whole))
        yield None

    def alike(texts: Sequence[Batch], wanted: Sequence[Sequence[int]]) -> Iterator[bytes]:
        number = (texts[0].tokens.shape[1] - 1) // length
        numbers = np.array([i * number + j for i, each in enumerate(wanted) for j in each])
        done = 0
        # The device computes the next batch while this one is turned into records.
        for (rows, values), _ in itertools.pairwise(parts(texts)):
            last = done + len(rows.tokens)
            kept = numbers[(numbers >= done) & (numbers < last)] - done
            chosen = jax.tree.map(operator.itemgetter(kept), (rows, *sharding.fetch(values)))
            yield from feature_store.records(layout, *chosen)
            done = last

    def compute(texts: Sequence[Batch], wanted: Sequence[Sequence[int]]) -> list[bytes]:
        pairs = zip(texts, wanted, strict=True)
        groups = itertools.groupby(pairs, lambda pair: pair[0].tokens.shape[1])
        return [row for _, group in groups for row in alike(*zip(*group, strict=True))]

    return compute


def _teacher(model: LM, params: Any, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``Features.total`` and ``best`` of hidden states [B,T,E]."""
    assert model.unembed is not None
    logits = model.unembed(params, hidden)
    return jax.nn.logsumexp(logits, -1), sampling.argmax(logits)


def _write_shards(
    folder: Path,
    layout: RecordLayout,
    plan: dict,
    rows: dict[str, Rows],
    compute: Compute,
    vocab_size: int,
) -> tuple[dict[str, dict], np.ndarray]:
    """Writes the missing shards.

    Returns file name -> rows and bytes, of all shards; and how often each token id is a label of
    the train split's rows, i64[vocab_size].
    """
    size, totals, counts = plan["shard_rows"], {}, np.zeros(vocab_size, np.int64)
    with Meter("the target reads", sum(plan["rows"].values())) as meter:
        for split, each in rows.items():
            count = len(each.parts)
            for number, start in enumerate(range(0, count, size)):
                chosen = [each.row(index) for index in range(start, min(start + size, count))]
                path = folder / feature_store.name_of(split, number, -(-count // size))
                if feature_store.is_finished(path, layout, chosen):
                    meter.skip(len(chosen))
                else:
                    texts: dict[Any, list[int]] = {}
                    for text, place in each.parts[start : start + size]:
                        texts.setdefault(text, []).append(place)
                    records = compute([each.text(text) for text in texts], list(texts.values()))
                    if sharding.is_first():
                        feature_store.write(path, records)
                    meter.add(len(chosen), len(chosen) * layout.length, 0)
                stored = path.stat().st_size if sharding.is_first() else 0
                totals[path.name] = {"rows": len(chosen), "bytes": stored}
                if split == "train":
                    labels = np.concatenate([_labels(row) for row in chosen])
                    counts = counts + np.bincount(labels, minlength=vocab_size)
    return totals, counts


def _labels(row: Batch) -> np.ndarray:
    """The tokens of a row that are labels, i32[n]."""
    labels, mask = objectives.labels_of(row)
    return np.asarray(labels).reshape(-1) if mask is None else np.asarray(labels)[mask]


def _summary(plan: dict, totals: dict[str, dict]) -> dict:
    rows = plan["rows"]
    return {
        "rows": rows["train"],
        "held_out_rows": rows["valid"],
        "tokens": sum(rows.values()) * plan["length"],
        "bytes_per_token": plan["bytes_per_token"],
        "bytes": plan["bytes"],
        "bytes_on_disk": sum(facts["bytes"] for facts in totals.values()),
        "shards": len(totals),
    }
