"""Mode generate: decodes prompts with one method and prints the text."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import jax
from rich.text import Text

from specjax import sharding
from specjax.bench import metrics, passes, proofs, provenance, results
from specjax.data import prompts as prompts_lib
from specjax.data import recordings
from specjax.data.prompts import Prompt, PromptSet
from specjax.errors import UserError
from specjax.generation import stops
from specjax.models import hf
from specjax.report import terminal
from specjax.run import build, streaming, workdirs
from specjax.run.resolve import Settings


def generate(settings: Settings, workdir: Path, command: str | None) -> None:
    """Decodes the prompts, prints the text and writes ``settings.record``.

    A single prompt on a terminal is streamed. Raises UserError.
    """
    console = terminal.console()
    target = build.target(settings)
    tokenizer = target.tokenizer
    assert tokenizer is not None
    if settings.record:
        recordings.check_record(settings.record, workdir, settings.prompts.names[0])
    if len(settings.methods) != 1:
        raise UserError(
            "mode generate decodes with one method, and config.grid makes "
            f"{len(settings.methods)}; leave it out"
        )
    temperature = settings.sampling["temperature"]
    [method] = build.methods(settings, target, settings.bench.temperatures)
    turns = _Turns(settings, target, method, temperature)
    chosen = prompts_lib.read(
        settings.prompts, target, turns.decode, name=settings.prompts.names[0]
    )
    _check_same_prompts(chosen)
    job = build.job(settings, target, chosen, temperature, settings.batch_size)
    workdirs.announce_replacement(settings, workdir)
    if len(chosen.prompts) == 1 and console.is_terminal and jax.process_count() == 1:
        began, rate, own = time.perf_counter(), None, target.lm.continued(chosen.prompts[0].ids)
        row = stops.Row(own, tokenizer.decode, settings.stop)
        counts, outputs = _stream(job, method, chosen.prompts[0], row, console)
        speed = f"{time.perf_counter() - began:.1f} seconds, compilation included"
    else:
        counts, outputs, rate = turns.results(chosen.prompts)
        speed = f"{rate:.1f} tokens/s without prefill and compilation"
    texts, outputs = _texts(settings, target, chosen.prompts, outputs)
    if rate is not None:
        for prompt, text in zip(chosen.prompts, texts, strict=True):
            console.print(Text.assemble((prompt.text, "dim"), text, "\n"))
    row = results.new_row(
        method.name,
        method.accept,
        counts,
        temperature=float(temperature),
        batch_size=settings.batch_size,
        prompts=len(chosen.prompts),
        rate=rate,
        status=proofs.status(method.drafter, method.accept, target.lm),
        outputs=outputs,
    )
    console.print(Text(_summary(row, chosen.prompts, speed), "dim"))
    more = {"texts": texts, "token_ids": outputs}
    more |= {"max_new_tokens": settings.max_new_tokens, "seed": settings.seed}
    more["target"] = provenance.target(target.params, name="", directory=target.directory)
    sharding.check_same("the target", {"hash": more["target"]["weights_sha256"]})
    if not sharding.is_first():  # the others write nothing
        return
    path = results.write(settings.config_json, workdir, [row], command=command, **more)
    console.print(Text(f"wrote {path}", "dim"))
    if settings.record:
        _record(settings.record, chosen, outputs)
        console.print(Text(f"wrote {settings.record}", "dim"))


def _cut(
    settings: Settings, target: hf.Loaded, prompts: list[Prompt], outputs: list[list[int]]
) -> tuple[list[stops.Cut], list[list[int]]]:
    """The outputs up to their stop strings, and the tokens that complete these."""
    assert target.tokenizer is not None
    decode, continued = target.tokenizer.decode, target.lm.continued
    cuts = [
        stops.cut(ids, settings.stop, decode, continued(prompt.ids))
        for prompt, ids in zip(prompts, outputs, strict=True)
    ]
    return cuts, [ids[: each.tokens] for ids, each in zip(outputs, cuts, strict=True)]


def _texts(
    settings: Settings, target: hf.Loaded, prompts: list[Prompt], outputs: list[list[int]]
) -> tuple[list[str], list[list[int]]]:
    cuts, outputs = _cut(settings, target, prompts, outputs)
    return [each.text for each in cuts], outputs


def _record(path: str, chosen: PromptSet, outputs: list[list[int]]) -> None:
    prompts, categories = zip(*((each.ids, each.category) for each in chosen.prompts), strict=True)
    recordings.record(path, prompts, outputs, categories=categories)


def _check_same_prompts(chosen: PromptSet) -> None:
    """Raises UserError if another process has other prompts."""
    ids = json.dumps([prompt.ids for prompt in chosen.prompts]).encode()
    sharding.check_same("the text of the prompts", {"hash": hashlib.sha256(ids).hexdigest()})


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

    def __init__(self, settings: Settings, target, method: passes.Method, temperature: float):
        self._settings, self._target = settings, target
        self._method, self._temperature = method, temperature
        self._decoded: dict[tuple, tuple[passes.Pass, int]] = {}

    def decode(self, prompts: list[Prompt]) -> list[str]:
        """The answer to each prompt."""
        batch_size = build.rows(self._settings, len(prompts))
        chosen = PromptSet(None, prompts, [])
        job = build.job(self._settings, self._target, chosen, self._temperature, batch_size)
        # Another seed for each turn: turns of a conversation must not share noise.
        job = job._replace(seed=job.seed + max(prompt.turn for prompt in prompts))
        passes.run_pass(job, self._method, brief=True)
        run = passes.run_pass(job, self._method)
        self._decoded |= {(p.question, p.turn): (run, row) for row, p in enumerate(prompts)}
        tokenizer = self._target.tokenizer
        answers = zip(*_cut(self._settings, self._target, prompts, run.outputs), strict=True)
        return [streaming.said(cut, ids, tokenizer.decode) for cut, ids in answers]

    def results(self, prompts: list[Prompt]) -> tuple[metrics.Counts, list[list[int]], float]:
        """Counts over all prompts, the outputs, and tokens per second."""
        if rest := [p for p in prompts if (p.question, p.turn) not in self._decoded]:
            self.decode(rest)
        rows = [self._decoded[p.question, p.turn] for p in prompts]
        runs = list({id(run): run for run, _ in rows}.values())
        outputs = [run.outputs[row] for run, row in rows]
        counts = metrics.total([run.counts[row] for run, row in rows])
        return counts, outputs, sum(map(len, outputs)) / sum(run.loop for run in runs)


def _stream(
    job: passes.Job,
    method: passes.Method,
    prompt: Prompt,
    row: stops.Row,
    console,
) -> tuple[metrics.Counts, list[list[int]]]:
    """Prints the text of one prompt round by round; its counts and its output.

    ``row`` is the text, which may end at a stop string.
    """
    job, method = passes.one_part(job._replace(batch_size=1), method)
    console.print(Text(prompt.text, "dim"), end="")
    counts, output = streaming.stream(job, method, prompt.ids, row, console)
    return counts, [output]
