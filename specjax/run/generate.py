"""Mode generate: decodes prompts with one method, or by beam search, and prints the texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.text import Text

from specjax import accept, decode, sharding
from specjax.bench import metrics, passes, provenance, results
from specjax.bench.metrics import Counts
from specjax.bench.passes import Job, Method
from specjax.data import prompts as prompts_lib
from specjax.data.prompts import Prompt, PromptSet
from specjax.decode import BeamDraft
from specjax.errors import UserError
from specjax.generation import stops
from specjax.models import hf
from specjax.report import terminal
from specjax.run import build, workdirs
from specjax.run.settings import Settings
from specjax.types import ModelParams


def generate(settings: Settings, workdir: Path, command: str | None) -> None:
    """Decodes the prompts, prints the text and writes ``settings.record``.

    A single prompt on a terminal is streamed. Raises UserError.
    """
    console = terminal.console()
    target = build.target(settings)
    temperature = settings.sampling.temperature
    [method] = build.methods(settings, target)
    turns = _Turns(settings, target, method)
    chosen = prompts_lib.read(settings.source, target, turns.decode, name=settings.source.names[0])
    build.check_same_prompts([prompt.ids for prompt in chosen.prompts])
    job = build.job(settings, target, chosen, temperature, settings.batch_size)
    workdirs.announce_replacement(settings, workdir)
    if console.is_terminal:  # elsewhere only the texts are printed
        console.print(Text(build.about(job, [method]), "dim"))
    rate = None
    if len(chosen.prompts) == 1 and console.is_terminal and jax.process_count() == 1:
        began, [prompt] = time.perf_counter(), chosen.prompts
        job, method = passes.one_part(job._replace(batch_size=1), method)
        console.print(Text(prompt.text, "dim"), end="")
        counts, output, _ = stream(job, method, prompt.ids, settings.stop, console)
        counts, outputs = [counts], [output]
        speed = f"{time.perf_counter() - began:.1f} seconds, compilation included"
    else:
        counts, outputs, rate = turns.results(chosen.prompts)
        speed = f"{rate:.1f} tokens/s without prefill and compilation"
    cuts, outputs = _cut(settings, target, chosen.prompts, outputs)
    texts = [each.text for each in cuts]
    if rate is not None:
        for prompt, text in zip(chosen.prompts, texts, strict=True):
            console.print(Text.assemble((prompt.text, "dim"), text, "\n"))
    counted = [results.Decoded(None, *each) for each in zip(counts, outputs, strict=True)]
    [row] = results.rows_of_texts(method, target.lm, counted, temperature, settings.batch_size)
    row["tokens_per_second"] = rate
    console.print(Text(_summary(row, chosen.prompts, speed), "dim"))
    facts = provenance.target(target.params, name="", directory=target.directory)
    sharding.check_same("the target", {"hash": facts["weights_sha256"]})
    if sharding.is_first():  # the others write nothing
        written = [*zip(chosen.prompts, texts, outputs, strict=True)]
        workdirs.write_texts(settings, workdir, [row], written, command=command, target=facts)


def _cut(
    settings: Settings, target: hf.Loaded, prompts: list[Prompt], outputs: list[list[int]]
) -> tuple[list[stops.Cut], list[list[int]]]:
    """The outputs up to their stop strings, and the tokens that complete these."""
    spell, continued = target.text_tokenizer.decode, target.lm.continued
    cuts = [
        stops.cut(ids, settings.stop, spell, continued(prompt.ids))
        for prompt, ids in zip(prompts, outputs, strict=True)
    ]
    return cuts, [ids[: each.tokens] for ids, each in zip(outputs, cuts, strict=True)]


def _summary(row: dict, prompts: list[Prompt], speed: str) -> str:
    """What was decoded, how many tokens a round gave, and how fast."""
    what = "turn" if any(prompt.turn for prompt in prompts) else "prompt"
    what = f"{len(prompts)} {what}" + "s" * (len(prompts) > 1)
    return (
        f"{row['method']}, {row['accept']}: {row['tokens']} tokens of {what}, "
        f"tau {row['block_efficiency']:.2f} tokens per round, {speed}"
    )


class _Turns:
    """Decodes the turns of conversations; keeps the pass and the row of every decoded prompt."""

    def __init__(self, settings: Settings, target: hf.Loaded, method: Method):
        self._settings, self._target, self._method = settings, target, method
        self._decoded: dict[tuple, tuple[passes.Pass, int]] = {}

    def decode(self, prompts: list[Prompt]) -> list[str]:
        """The answer to each prompt."""
        settings, chosen = self._settings, PromptSet(None, prompts, [])
        batch_size = build.rows(settings, len(prompts))
        temperature = settings.sampling.temperature
        job = build.job(settings, self._target, chosen, temperature, batch_size)
        # Another seed for each turn: turns of a conversation must not share noise.
        job = job._replace(seed=job.seed + max(prompt.turn for prompt in prompts))
        passes.run_pass(job, self._method, brief=True)
        run = passes.run_pass(job, self._method)
        self._decoded |= {(p.question, p.turn): (run, row) for row, p in enumerate(prompts)}
        answers = zip(*_cut(settings, self._target, prompts, run.outputs), strict=True)
        return [said(cut, ids, self._target) for cut, ids in answers]

    def results(self, prompts: list[Prompt]) -> tuple[list[Counts], list[list[int]], float]:
        """The counts and the output of each prompt, and tokens per second."""
        if rest := [p for p in prompts if (p.question, p.turn) not in self._decoded]:
            self.decode(rest)
        rows = [self._decoded[p.question, p.turn] for p in prompts]
        runs = list({id(run): run for run, _ in rows}.values())
        outputs = [run.outputs[row] for run, row in rows]
        counts = [run.counts[row] for run, row in rows]
        return counts, outputs, sum(map(len, outputs)) / sum(run.loop for run in runs)


def stream(
    job: Job, method: Method, ids: list[int], stop: tuple[str, ...], console, number: int = 0
) -> tuple[metrics.Counts, list[int], stops.Cut]:
    """Prints the continuation of a prompt; its counts, its tokens and its text.

    Accepted draft tokens are coloured on a terminal that has colours. Raises NonFiniteLogits.

    Args:
        job: its batch size is 1; its longest prompt sizes the buffers.
        method: what decodes.
        ids: the prompt.
        stop: strings at which the text ends.
        console: where the text is printed.
        number: of the prompt among those of the run; chooses its noise.
    """
    assert job.spell is not None
    row = stops.Row(job.target.continued(ids), job.spell, stop)
    state = passes.begin(job, method.drafter, method.params, [number], [ids])
    shown, output, accepted, records = 0, [], [], []
    how = {"eos_id": job.eos_id, "verify_widths": job.verify_widths}
    for _, info in decode.stream(*method.pair(job.target), state, **how):
        records.append([np.asarray(getattr(info, name)) for name in decode.Records._fields])
        new = [int(t) for t in info.tokens[0][: int(info.emitted[0])]]
        output += new
        accepted += [place < int(info.accepted[0]) for place in range(len(new))]
        ended = row.add(new)
        console.print(_coloured(row, row.settled, accepted, shown), end="")
        shown = max(shown, len(row.settled))
        if ended:
            break
    row.add((), last=True)
    cut = row.cut()
    console.print(_coloured(row, cut.text, accepted, shown))
    stacked = decode.Records(*(jnp.stack(x) for x in zip(*records, strict=True)))
    return metrics.count(stacked, [True], method.drafter.longest), output, cut


def _coloured(row: stops.Row, text: str, accepted: list[bool], shown: int) -> Text:
    """The text from character ``shown`` on; what accepted draft tokens added has their colour."""
    out, at = Text(text[shown:]), -shown
    for piece, draft in zip(row.pieces, accepted, strict=False):
        if draft:
            out.stylize(terminal.STYLES[0], max(at, 0), max(at + len(piece), 0))
        at += len(piece)
    return out


def said(cut: stops.Cut, ids: list[int], target: hf.Loaded) -> str:
    """An answer as the next turn of its conversation has it: without a stop string.

    ``ids`` are its tokens, up to the one that completes the stop string.
    """
    return target.text_tokenizer.decode(ids) if cut.stop is None else cut.text


class Hypothesis(NamedTuple):
    """One of the texts that are returned for a prompt."""

    text: str
    tokens: list[int]
    score: float


def beams(settings: Settings, workdir: Path, command: str | None) -> None:
    """Decodes the prompts, prints the hypotheses and writes ``settings.record``. Raises UserError.

    results.json has one row; its rounds are the target's passes and its tokens the steps of beam
    search, so tau is the number of steps per pass.
    """
    console, target = terminal.console(), build.target(settings)
    if jax.process_count() > 1:
        raise UserError("beam search runs in one process; start one, or leave config.beams out")
    name = settings.source.names[0]
    searches = _Searches(settings, target)
    chosen = prompts_lib.read(settings.source, target, searches.best, name=name)
    build.job(settings, target, chosen, 0.0, settings.batch_size)  # checks the lengths
    workdirs.announce_replacement(settings, workdir)
    found = searches.of(chosen.prompts)
    for prompt, row in zip(chosen.prompts, found, strict=True):
        for each in row:
            score = f"[{each.score:.3f}] " if len(row) > 1 else ""
            console.print(Text.assemble((score, "dim"), (prompt.text, "dim"), each.text, "\n"))
    row = searches.row([each[0].tokens for each in found])
    about = (
        f"{row['method']}: {row['tokens']} steps of {row['prompts']} prompts, "
        f"{row['block_efficiency']:.2f} steps per pass, {row['tokens_per_second']:.1f} steps/s "
        "with prefill, without compilation"
    )
    console.print(Text(about, "dim"))
    pairs = zip(chosen.prompts, found, strict=True)
    written = [(prompt, best.text, best.tokens) for prompt, (best, *_) in pairs]
    facts = provenance.target(target.params, name="", directory=target.directory)
    workdirs.write_texts(
        settings,
        workdir,
        [row],
        written,
        command=command,
        target=facts,
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
            self._steps += int(found.steps[: len(part)].sum())
            self._passes += int(found.passes[: len(part)].sum())
            scores = np.asarray(found.scores).tolist()
            # The last part is filled up with prompts that count once.
            for prompt, outputs, row in zip(part, found.outputs(), scores, strict=False):
                self._found[prompt.question, prompt.turn] = self._hypotheses(prompt, outputs, row)
        return [self._found[prompt.question, prompt.turn] for prompt in prompts]

    def _search(self, ids: list[list[int]], width: int) -> decode.Beams:
        settings, options = self._settings, self._settings.beams
        found = decode.beam_search(
            self._target.lm,
            self._params,
            *decode.pack_prompts(ids, width),
            beams=options.count,
            max_new_tokens=settings.max_new_tokens,
            returned=options.returned,
            length_penalty=options.length_penalty,
            early_stopping=options.EARLY[options.early_stopping],
            eos_id=() if settings.ignore_eos else self._target.config.eos_token_id,
            draft=self._draft,
        )
        decode.check(found)
        return found

    def _hypotheses(self, prompt: Prompt, outputs: list, scores: list) -> list[Hypothesis]:
        before = self._target.lm.continued(prompt.ids)
        spell = self._target.text_tokenizer.decode
        texts = [stops.cut(tokens, (), spell, before).text for tokens in outputs]
        return [*map(Hypothesis, texts, outputs, scores)]

    def row(self, outputs: list[list[int]]) -> dict:
        """The row of results.json; no acceptance rule and no lossless class apply."""
        options, none = self._settings.beams, np.zeros(0, int)
        nodes = options.count
        if self._draft is not None:
            nodes += self._draft.gamma * (self._draft.beams or options.count)
        steps, rounds = self._steps, self._passes
        counts = metrics.Counts(steps, rounds, steps - rounds, none, none, rounds * nodes)
        row = results.new_row(
            self._name,
            accept.load("deterministic"),
            counts,
            temperature=0.0,
            batch_size=self._settings.batch_size,
            prompts=len(outputs),
            rate=steps / self._seconds,
            outputs=outputs,
        )
        return row | {"accept": None, "class": None}
