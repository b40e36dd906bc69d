"""Mode generate with beam search: prints the best hypotheses of each prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
from specjax.run.settings import Settings
from specjax.types import ModelParams


class Hypothesis(NamedTuple):
    """One of the texts that are returned for a prompt."""

    text: str
    tokens: list[int]
    score: float


def generate(settings: Settings, workdir: Path, command: str | None) -> None:
    """Decodes the prompts, prints the hypotheses and writes ``settings.record``. Raises UserError.

    results.json has one row; its rounds are the target's passes and its tokens the steps of beam
    search, so tau is the number of steps per pass.
    """
    console, target = terminal.console(), build.target(settings)
    if jax.process_count() > 1:
        raise UserError("beam search runs in one process; start one, or leave config.beams out")
    if settings.record:
        recordings.check_record(settings.record, workdir, settings.source.names[0])
    name = settings.source.names[0]
    searches = _Searches(settings, target)
    chosen = prompts_lib.read(settings.source, target, searches.best, name=name)
    build.job(settings, target, chosen, 0.0, settings.batch_size)  # checks the lengths
    workdirs.announce_replacement(settings, workdir)
    found = searches.of(chosen.prompts)
    for prompt, row in zip(chosen.prompts, found, strict=True):
        for each in row:
            score = f"[{each.score:.3f}] " if len(row) > 1 else ""
            line = Text.assemble((score, "dim"), (prompt.text, "dim"), each.text, "\n")
            console.print(line)
    best = [row[0] for row in found]
    row = searches.row(len(best), [each.tokens for each in best])
    about = (
        f"{row['method']}: {row['tokens']} steps of {row['prompts']} prompts, "
        f"{row['block_efficiency']:.2f} steps per pass, {searches.rate:.1f} steps/s with prefill, "
        "without compilation"
    )
    console.print(Text(about, "dim"))
    workdirs.write_texts(
        settings,
        workdir,
        [row],
        chosen.prompts,
        [each.text for each in best],
        [each.tokens for each in best],
        command=command,
        target=provenance.target(target.params, name="", directory=target.directory),
        hypotheses=[[each._asdict() for each in row] for row in found],
    )


class _Searches:
    """Decodes the turns of conversations; keeps the hypotheses of every decoded prompt."""

    def __init__(self, settings: Settings, target: hf.Loaded):
        [(name, _)] = settings.methods.items()
        self._settings, self._target = settings, target
        [method] = build.methods(settings, target)
        self._draft, self._params = None, ModelParams(target.params)
        self._name = "beam_search"
        options, training = settings.beams, method.drafter.training
        if training is not None and training.model is not None:
            # A chain has as many nodes as steps.
            self._draft = BeamDraft(training.model, method.drafter.nodes, options.draft or None)
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
        found = decode.beam_search(
            target.lm,
            self._params,
            *decode.pack_prompts(ids, width),
            beams=options.count,
            max_new_tokens=settings.max_new_tokens,
            returned=options.returned,
            length_penalty=options.length_penalty,
            early_stopping=options.EARLY[options.early_stopping],
            eos_id=() if settings.ignore_eos else target.config.eos_token_id,
            draft=self._draft,
        )
        decode.check(found)
        return found

    def _keep(self, prompts: list[Prompt], found: decode.Beams) -> None:
        target, scores = self._target, np.asarray(found.scores).tolist()
        assert target.tokenizer is not None
        spell = target.tokenizer.decode
        # The last part is filled up with prompts that count once.
        for prompt, outputs, row in zip(prompts, found.outputs(), scores, strict=False):
            before = target.lm.continued(prompt.ids)
            self._found[prompt.question, prompt.turn] = [
                Hypothesis(stops.cut(tokens, (), spell, before).text, tokens, score)
                for tokens, score in zip(outputs, row, strict=True)
            ]
        self._steps += int(found.steps[: len(prompts)].sum())
        self._passes += int(found.passes[: len(prompts)].sum())

    def row(self, prompts: int, outputs: list[list[int]]) -> dict:
        """The row of results.json; no acceptance rule and no lossless class apply."""
        options, none = self._settings.beams, np.zeros(0, int)
        nodes = options.count
        if self._draft is not None:
            nodes += self._draft.gamma * (self._draft.beams or options.count)
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
