"""Mode generate with beam search: prints the best hypotheses of each prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.text import Text

from specjax import accept, decode
from specjax.bench import metrics, provenance, results
from specjax.data import prompts as prompts_lib
from specjax.data import recordings
from specjax.data.prompts import Prompt
from specjax.decode import BeamDraft
from specjax.errors import UserError
from specjax.generation import stops
from specjax.models import hf
from specjax.report import terminal
from specjax.run import build, workdirs
from specjax.run.resolve import Settings
from specjax.types import ModelParams


class Hypothesis(NamedTuple):
    """One of the texts that are returned for a prompt."""

    tokens: list[int]
    score: float


def generate(settings: Settings, workdir: Path, command: str | None) -> None:
    """Decodes the prompts, prints the hypotheses and writes ``settings.record``. Raises UserError.

    results.json has one row; its rounds are the target's passes and its tokens the steps of beam
    search, so tau is the number of steps per pass.
    """
    console, target = terminal.console(), build.target(settings)
    assert target.tokenizer is not None and settings.beams is not None
    if jax.process_count() > 1:
        raise UserError("beam search runs in one process; start one, or leave config.beams out")
    if settings.record:
        recordings.check_record(settings.record, workdir, settings.prompts.names[0])
    name = settings.prompts.names[0]
    searches = _Searches(settings, target)
    chosen = prompts_lib.read(settings.prompts, target, searches.best, name=name)
    build.job(settings, target, chosen, 0.0, settings.batch_size)  # checks the lengths
    workdirs.announce_replacement(settings, workdir)
    found = searches.of(chosen.prompts)
    texts = [
        [_text(target, prompt, each.tokens) for each in row]
        for prompt, row in zip(chosen.prompts, found, strict=True)
    ]
    for prompt, row, own in zip(chosen.prompts, texts, found, strict=True):
        for text, each in zip(row, own, strict=True):
            score = f"[{each.score:.3f}] " if len(row) > 1 else ""
            line = Text.assemble((score, "dim"), (prompt.text, "dim"), text, "\n")
            console.print(line)
    row = searches.row(len(chosen.prompts), [own[0].tokens for own in found])
    console.print(Text(_summary(row, searches.rate), "dim"))
    more: dict[str, Any] = {"texts": [row[0] for row in texts]}
    more["token_ids"] = [own[0].tokens for own in found]
    more["hypotheses"] = [
        [{"text": text, **each._asdict()} for text, each in zip(row, own, strict=True)]
        for row, own in zip(texts, found, strict=True)
    ]
    more |= {"max_new_tokens": settings.max_new_tokens, "seed": settings.seed}
    more["target"] = provenance.target(target.params, name="", directory=target.directory)
    path = results.write(settings.config_json, workdir, [row], command=command, **more)
    console.print(Text(f"wrote {path}", "dim"))
    if settings.record:
        categories = [prompt.category for prompt in chosen.prompts]
        ids = [prompt.ids for prompt in chosen.prompts]
        recordings.record(settings.record, ids, more["token_ids"], categories=categories)
        console.print(Text(f"wrote {settings.record}", "dim"))


def _text(target: hf.Loaded, prompt: Prompt, tokens: list[int]) -> str:
    """The text of new tokens as a continuation of the prompt, as in mode generate."""
    assert target.tokenizer is not None
    before = target.lm.continued(prompt.ids)
    return stops.cut(tokens, (), target.tokenizer.decode, before).text


def _summary(row: dict, rate: float) -> str:
    return (
        f"{row['method']}: {row['tokens']} steps of {row['prompts']} prompts, "
        f"{row['block_efficiency']:.2f} steps per pass, {rate:.1f} steps/s with prefill, without "
        "compilation"
    )


class _Searches:
    """Decodes the turns of conversations; keeps the hypotheses of every decoded prompt."""

    def __init__(self, settings: Settings, target: hf.Loaded):
        [(name, _)] = settings.methods.items()
        self._settings, self._target = settings, target
        [method] = build.methods(settings, target, (0.0,))
        self._draft, self._params = None, ModelParams(target.params)
        self._name = "beam_search"
        options, training = settings.beams, method.drafter.training
        assert options is not None
        if training is not None and training.model is not None:
            # A chain has as many nodes as steps.
            self._draft = BeamDraft(training.model, method.drafter.nodes, options.draft)
            self._params, self._name = method.params, f"beam_search, {name}"
        self._found: dict[tuple, list[Hypothesis]] = {}
        self._steps = self._passes = 0
        self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self._steps / self._seconds

    def best(self, prompts: list[Prompt]) -> Sequence[list[int]]:
        """The best hypothesis of each prompt."""
        return [row[0].tokens for row in self.of(prompts)]

    def of(self, prompts: list[Prompt]) -> list[list[Hypothesis]]:
        """The hypotheses of each prompt."""
        new = [p for p in prompts if (p.question, p.turn) not in self._found]
        size = build.rows(self._settings, len(new))
        width = max((len(prompt.ids) for prompt in new), default=0)
        for start in range(0, len(new), max(size, 1)):
            part = new[start : start + size]
            # The last part is filled up, so that it needs no program of its own.
            ids = [prompt.ids for prompt in (part * size)[:size]]
            if not start:
                self._search(ids, width)
            began = time.perf_counter()
            found = self._search(ids, width)
            self._seconds += time.perf_counter() - began
            self._keep(part, found)
        return [self._found[prompt.question, prompt.turn] for prompt in prompts]

    def _search(self, ids: list[list[int]], width: int) -> decode.Beams:
        settings, target = self._settings, self._target
        options = settings.beams
        assert options is not None
        found = decode.beam_search(
            target.lm,
            self._params,
            *decode.pack_prompts(ids, width),
            beams=options.beams,
            max_new_tokens=settings.max_new_tokens,
            returned=options.returned,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            eos_id=() if settings.ignore_eos else target.config.eos_token_id,
            draft=self._draft,
        )
        decode.check(found)
        return found

    def _keep(self, prompts: list[Prompt], found: decode.Beams) -> None:
        outputs, scores = found.outputs(), np.asarray(found.scores).tolist()
        for number, prompt in enumerate(prompts):
            texts = zip(outputs[number], scores[number], strict=True)
            own = [Hypothesis(tokens, score) for tokens, score in texts]
            self._found[prompt.question, prompt.turn] = own
        self._steps += int(found.steps[: len(prompts)].sum())
        self._passes += int(found.passes[: len(prompts)].sum())

    def row(self, prompts: int, outputs: list[list[int]]) -> dict:
        """The row of results.json; no acceptance rule and no lossless class apply."""
        options, none = self._settings.beams, np.zeros(0, int)
        assert options is not None
        nodes = options.beams
        if self._draft is not None:
            nodes += self._draft.gamma * (self._draft.beams or options.beams)
        accepted = self._steps - self._passes
        verified = self._passes * nodes
        counts = metrics.Counts(self._steps, self._passes, accepted, none, none, verified)
        row = results.new_row(
            self._name,
            accept.load("deterministic"),
            counts,
            temperature=0.0,
            batch_size=self._settings.batch_size,
            prompts=prompts,
            rate=self.rate,
            outputs=outputs,
        )
        return row | {"accept": None, "class": None}
