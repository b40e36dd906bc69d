"""A target with its drafts, the prompts of the benches, and texts that the target writes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.papers import law
from experiments.trained_drafters import measuring, training
from experiments.trained_drafters import run as trained_drafters
from specjax import drafters
from specjax.data import ngram_tables, prompts, text_files, token_streams
from specjax.models import hf
from specjax.theory import roofline
from specjax.train import examine
from specjax.types import Drafter, ModelParams

DRAFT, NGRAMS = "draft model", ("unigram", "bigram")
TRAINED = "forward_kl, target"  # of ``trained_drafters``


class Pair(NamedTuple):
    """What is measured."""

    name: str
    target: hf.Loaded
    models: Mapping[str, dict[str, Any]]  # kind of draft -> the keys of its drafter
    prompts: list[prompts.Prompt]  # of the benches
    kinds: list[str | None]  # categories of the prompts of ``texts``
    texts: Mapping[float, law.Texts]  # by temperature
    work: float  # operations of the draft model per token, over the target's

    def drafter(self, kind: str, gamma: int) -> Drafter:
        """A drafter that draws chains."""
        return drafters.make(target=self.target.lm, gamma=gamma, **self.models[kind])

    def work_of(self, kind: str) -> float:
        """Operations of a draft token of this kind, over the target's; tables compute nothing."""
        return 0.0 if kind in NGRAMS else self.work

    def params(self, drafter: Drafter) -> ModelParams:
        """The parameters of the target and of a drafter."""
        return ModelParams(self.target.params, drafter.init_params(jax.random.key(0)))


def read_prompts(
    file: str, count: int, target: hf.Loaded, args: argparse.Namespace, inner: argparse.Namespace
) -> list[prompts.Prompt]:
    """Prompts of a file, evenly from its categories, or beginnings of held-out lines."""
    if not file:
        ids = measuring.held_out(inner, target.text_tokenizer, count, seed=1)
        return [prompts.Prompt(target.text_tokenizer.decode(each), each) for each in ids]
    own = {"num_prompts": count, "max_prompt_tokens": args.prompt_tokens, "chat": prompts.AUTO}
    source = prompts.PromptSource(names=(file,), first_turns=True, **own)
    return prompts.read(source, target, lambda _: [], name=file).prompts


def prepared(name: str, files: Sequence[str], args: argparse.Namespace) -> Pair:
    """Trains the draft if there is none, reads the models, and lets the target write texts."""
    directory, draft, prompt_file, text = files
    target, shape = hf.load(directory), {"steps": args.draft_steps, "generated": args.generated}
    shape |= {"width": min(target.config.hidden_size, 128), "examined": 8, "evaluations": 1}
    flags = [f"--{key}={value}" for key, value in shape.items()]
    folder = [f"--target={directory}", f"--text={text}", f"--workdir={args.workdir / name}"]
    inner = trained_drafters.parse(["--name=", f"--only={TRAINED}", *folder, *flags])
    model = hf.load(draft or str(training.train(TRAINED, inner)))
    source = text_files.TextSource((text,) if text else (), dir=str(training.corpus_dir(inner)))
    corpus = [each for _, each in text_files.load(source, inner.workdir, "train")]
    tokens = token_streams.tokenise(target.text_tokenizer, corpus)
    counts = ngram_tables.count([tokens.tolist()], target.lm.vocab_size)
    ngrams = {"name": "ngram_lm", "tables": counts, "mode": "sample"}
    measured, read = (
        read_prompts(prompt_file, count, target, args, inner)
        for count in (args.prompts, args.texts)
    )
    costs = [roofline.model_of(each.config).flops for each in (model, target)]
    return Pair(
        name,
        target,
        {
            "unigram": {**ngrams, "order": 1},
            "bigram": {**ngrams, "order": 2},
            DRAFT: {"name": "draft_model", "model": model.lm, "params": model.params},
        },
        measured,
        [each.category for each in read],
        {t: written(target, [each.ids for each in read], t, args) for t in args.sizes.temperatures},
        costs[0] / costs[1],
    )


def written(
    target: hf.Loaded, ids: list[list[int]], temperature: float, args: argparse.Namespace
) -> law.Texts:
    """What the target writes after the prompts."""
    eos, params = target.config.eos_token_id, ModelParams(target.params)
    batch, lengths = examine.write(target.lm, params, ids, args.new, temperature, eos)
    rows = np.asarray(batch.tokens)
    ends = zip(rows, ids, lengths, strict=True)
    return law.Texts(ids, [row[len(each) : end].tolist() for row, each, end in ends])
