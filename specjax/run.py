"""The command line: python -m specjax.run --config=configs/<name>.py [--workdir=DIR] [--config.key=value ...]

``config.mode`` is train, generate, bench or replay. ``config.prepare`` may name configurations of ``config.stages`` that are
run first, in that order, each into ``<workdir>/<its name>``, and left alone when they are finished; "{workdir}" in a text
stands for the workdir. A mistake of the user ends in one line on stderr and exit status 2, with nothing written.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from ml_collections import ConfigDict, config_flags
from rich.console import Console
from rich.text import Text

from specjax import bench, decode, metrics, replay, results, session, traces
from specjax.config import Config
from specjax.errors import UserError
from specjax.report import terminal


class NotLossless(Exception):
    """A method that claims to be lossless failed its check."""


console = Console(highlight=False, soft_wrap=True, emoji=False)
if not console.is_terminal:
    console.width = 120  # a file or a pipe has no width: enough for the table


def generate(config: Config, workdir: Path) -> None:
    """Decodes the prompts, prints the text and keeps it in ``config.record``; a single prompt on a terminal is streamed."""
    target = session.load_target(config)
    tokenizer = target.tokenizer
    assert tokenizer is not None  # load_target has seen to it
    if config.get("record"):
        traces.check_record(config.record, workdir, config.prompts)
    [(label, choice)] = session.methods(config).items()
    method = session.method(target, choice, config.seed, label)
    prompts = session.read_prompts(config, target)
    job = session.job(config, target, prompts, config.sampling.temperature, config.batch_size)
    if len(prompts) == 1 and console.is_terminal:
        row, outputs = _stream(job, method, prompts[0], tokenizer.decode)
        texts = [_continue(tokenizer, prompts[0].ids, outputs[0])]
    else:
        bench.run_pass(job, method, finished=True)
        run = bench.run_pass(job, method)
        assert run.counts is not None  # only plain decoding has none
        outputs = run.outputs
        row = _row(job, method, run.counts, sum(map(len, outputs)) / run.seconds)
        texts = [_continue(tokenizer, p.ids, ids) for p, ids in zip(prompts, outputs, strict=True)]
        for prompt, text in zip(prompts, texts, strict=True):
            console.print(Text.assemble((prompt.text, "dim"), text, "\n"))
    _write(config, workdir, [row], texts=texts, token_ids=outputs)
    if config.get("record"):  # for mode replay
        traces.record(config.record, job.prompts, outputs, categories=[p.category for p in prompts])
        console.print(Text(f"wrote {config.record}", "dim"))


def _stream(job: bench.Job, method: bench.Method, prompt: session.Prompt, spell: Callable[[list[int]], str]):
    rows, ids = next(bench.batches(job))
    state = bench.begin(job, method.drafter, method.params, rows, ids)
    console.print(Text(prompt.text, "dim"), end="")
    shown, output, seen = len(spell(prompt.ids)), [], []
    for _, info in decode.stream(job.target, method.drafter, method.accept, method.params, state, eos_id=job.eos_id):
        seen.append([np.asarray(x) for x in (info.emitted, info.accepted, info.drafted, info.tested)])
        output += [int(t) for t in info.tokens[0][: int(info.emitted[0])]]
        text = spell(prompt.ids + output)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            console.print(Text(text[shown:]), end="")
            shown = len(text)
    console.print(Text(spell(prompt.ids + output)[shown:]))
    counts = metrics.count(
        decode.Records(*(jnp.stack(x) for x in zip(*seen, strict=True))), [True], method.drafter.longest
    )
    return _row(job, method, counts, None), [output]


def _row(job: bench.Job, method: bench.Method, counts: metrics.Counts, rate: float | None) -> dict:
    temperature = float(job.settings["temperature"])
    return results.row(
        method.name,
        method.accept,
        counts,
        temperature=temperature,
        batch_size=job.batch_size,
        prompts=len(job.prompts),
        rate=rate,
    )


def measure(config: Config, workdir: Path) -> None:
    """Measures the methods of ``config.grid`` (or ``config.drafter``) against plain decoding, and prints a table."""
    target = session.load_target(config)
    assert target.tokenizer is not None  # load_target has seen to it
    methods = [session.method(target, choice, config.seed, n) for n, choice in session.methods(config).items()]
    prompts = session.read_prompts(config, target)
    prompts, others = prompts[: len(prompts) - config.warm_prompts], prompts[len(prompts) - config.warm_prompts :]
    jobs = [
        session.job(config, target, prompts, float(temperature), batch)
        for temperature in config.grid.temperatures or (config.sampling.temperature,)
        for batch in config.grid.batch_sizes or (config.batch_size,)
    ]
    rows = []
    with console.status("compiling") as status:
        taught = [[bench.teach(job, method, [p.ids for p in others]) for method in methods] for job in jobs]
        trace = functools.partial(_trace, jobs[0], taught[0], prompts[0], finished=True)
        bench.warm(jobs, taught[0], [trace] if config.show_trace else [])
        for job, ready in zip(jobs, taught, strict=True):
            where = f"temperature {job.settings['temperature']:g}, batch {job.batch_size}"
            rows += bench.measure(job, ready, lambda what, where=where: status.update(Text(f"{where}: {what}")))
    console.print(terminal.table(rows))
    console.print(
        "[dim]tau: tokens per round; alpha: acceptance rate; plain: our autoregressive tokens/s, same batch; "
        f"speed-up: tokens/s over plain, median of {config.repeats} interleaved passes[/dim]"
    )
    if config.show_trace:
        _show_trace(jobs[0], taught[0], prompts[0], target.tokenizer.decode)
    _write(config, workdir, rows)
    for row in rows:
        if row["class"] == "L1" and row["lossless"]["passed"] is False:
            raise NotLossless(f"{row['method']} lost something: {row['lossless']['detail']}; see results.json")


def _trace(job: bench.Job, methods, prompt: session.Prompt, finished: bool = False):
    """(method, what each round did) of one continuation by the first method that drafts; ``finished`` only compiles it."""
    method = next((m for m in methods if m.drafter.nodes), methods[0])
    job = job._replace(batch_size=1, prompts=[prompt.ids])
    rows, ids = next(bench.batches(job))
    state = bench.begin(job, method.drafter, method.params, rows, ids)
    steps = decode.stream(job.target, method.drafter, method.accept, method.params, state, eos_id=job.eos_id)
    return method, [jax.device_get(info) for _, info in itertools.islice(steps, 1 if finished else None)]


def _show_trace(job: bench.Job, methods, prompt: session.Prompt, spell: Callable[[list[int]], str]) -> None:
    """One continuation, coloured by who wrote each token."""
    method, infos = _trace(job, methods, prompt)
    console.print(
        Text.assemble("\n", (method.name, "bold"), f", temperature {job.settings['temperature']:g}: "), end=""
    )
    console.print(terminal.legend())
    console.print(terminal.trace(prompt.ids, infos, spell))


def _continue(tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of ``new`` after the prompt: some tokenizers drop the first space when decoding from the middle."""
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]


def replays(config: Config, workdir: Path) -> None:
    """Replays the recording ``config.traces`` with each method, and prints what it would have gained, by category."""
    began = time.perf_counter()
    target, recording = replay.load(config)
    guessed = not (config.vocab_size or config.target)
    methods = [replay.method(target, choice, config.seed, n, guessed) for n, choice in session.methods(config).items()]
    batch_size = min(config.batch_size, len(recording.traces))
    keys = {"batch_size": batch_size, "max_new_tokens": config.max_new_tokens, "seed": config.seed}
    rows = []
    with console.status("compiling") as status:
        for method in methods:
            say = lambda what, name=method.name: status.update(Text(f"{name}: {what}"))  # noqa: E731
            for category, tally in replay.measure(method, recording.traces, **keys, say=say).items():
                row = functools.partial(results.row, method.name, method.accept, tally.counts, prompts=tally.prompts)
                rows.append(row(temperature=0.0, batch_size=batch_size, category=category))
    console.print(replay.table(rows))
    console.print(
        f"[dim]tau: tokens per round; alpha: acceptance rate; vocabulary {recording.vocab_size}; "
        f"{time.perf_counter() - began:.1f} seconds, compilation included[/dim]"
    )
    if recording.skipped:
        some = "; ".join(f"line {bad['line']}: {bad['why']}" for bad in recording.skipped[:3])
        more = f"; and {len(recording.skipped) - 3} more" if len(recording.skipped) > 3 else ""
        console.print(Text(f"left out {len(recording.skipped)} bad lines: {some}{more}"))
    _write(config, workdir, rows, skipped=recording.skipped)


def _write(config: Config, workdir: Path, rows: list[dict], **more) -> None:
    path = results.write(config, workdir, rows, **more)
    console.print(Text(f"wrote {path}", "dim"))


def train(config: Config, workdir: Path) -> None:
    """Trains a model into ``workdir``; resumes where it stopped, and returns at once when it is finished."""
    from specjax.train import recipes  # only here: TFDS and Orbax take seconds to import

    summary = recipes.run(config, workdir)
    numbers = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in summary.items())
    console.print(Text(f"{workdir}: {numbers}", "dim"))


MODES = {"train": train, "generate": generate, "bench": measure, "replay": replays}
DECODES = ("target", "drafter", "accept", "sampling", "batch_size", "max_new_tokens", "seed")
TRAINS = ("objective", "target", "init", "data", "loss", "train", "optimiser", "examine", "seed")
NEEDS = {  # keys that tell a mode's configurations apart, in mode train those of its objectives
    "train": ("objective",),
    "train pretrain": (*TRAINS, "model", "tokenizer"),
    "train distill": (*TRAINS, "model", "pruned"),
    "train heads": (*TRAINS, "drafter", "joint"),
    "train generate": ("target", "data", "generation", "drafter", "seed"),
    "train datastore": ("target", "data", "reach"),
    "train ngram": ("target", "data", "from_target", "generation", "seed", "successors", "contexts", "smoothing"),
    "generate": (*DECODES, "prompt", "prompts"),
    "bench": (*DECODES, "prompt", "prompts", "grid", "repeats"),
    "replay": (*DECODES, "traces", "skip_bad", "vocab_size", "num_traces", "grid"),
}


def run(config: Config, workdir: Path) -> None:
    """Runs one configuration. Raises UserError."""
    mode = config.get("mode")
    if mode not in MODES:
        raise UserError(f"config.mode is {mode!r}; it must be one of {', '.join(MODES)}")
    needs = NEEDS.get(f"{mode} {config.get('objective')}", NEEDS[mode])
    if missing := [key for key in needs if key not in config]:
        raise UserError(
            f"mode {mode} needs the key {missing[0]!r}; start from a configuration made for it, see configs/"
        )
    results.check_workdir(workdir)
    _fill(config, str(workdir))
    stages = [(name, config.get("stages", {}).get(name)) for name in config.get("prepare") or ()]
    for name, stage in stages:
        if stage is None:
            raise UserError(f"config.prepare names {name!r}, and config.stages has no such configuration")
    if mode != "train":
        session.check(config)
        if any((workdir / name).exists() for name in ("model", "checkpoints")):
            raise UserError(f"{workdir} holds a training run, which this would overwrite; choose another --workdir")
    for name, stage in stages:
        console.print(Text.assemble((name, "bold"), f": {stage.mode}, {workdir / name}"))
        run(stage, workdir / name)
    MODES[mode](config, workdir)


def _fill(config: Config, workdir: str) -> None:
    """Puts the workdir in for "{workdir}", wherever a configuration says so."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            _fill(value, workdir)
        elif isinstance(value, str) and "{workdir}" in value:
            config[key] = value.replace("{workdir}", workdir)


def parse(argv: list[str]) -> tuple[Config, Path]:
    """Command line -> (configuration, workdir). Raises UserError, whatever is wrong with it."""
    values = flags.FlagValues()  # our own: nothing is left behind in the process
    config_flags.DEFINE_config_file("config", None, "configs/<name>.py", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", "", "where results go; default runs/<name of the file>", flag_values=values)
    if "--help" in argv or "-h" in argv:
        console.print(__doc__)
        sys.exit(0)
    file = Path(_named(argv)).expanduser()
    # Configurations build on one another ("from configs import bench"), wherever the command is run from.
    sys.path.insert(0, str(file.resolve().parent.parent))
    try:
        rest = values(argv)
        config = values.config
        if config is not None:
            config.to_dict()  # a file that cannot be loaded only says so when it is looked at
    except flags.Error as error:
        raise UserError(str(error).partition(": Traceback")[0]) from None
    except OSError:
        raise UserError(f"there is no configuration file {file}; the repository's are in configs/") from None
    except Exception as error:  # the file is the user's program, and ml_collections raises many kinds for overrides
        key, hint = re.fullmatch(r"\W*(\w+)\W*", str(error).partition("Did you")[0].replace("\\n", "\n")), None
        if key and isinstance(error, AttributeError | KeyError):
            hint = re.search(r"Did you mean \W*(\w+)", str(error))
            meant = f"did you mean {hint[1]}?" if hint else "the configuration file lists the keys"
            raise UserError(f"unknown configuration key {key[1]!r}; {meant}") from None
        raise UserError(f"configuration {file}: {type(error).__name__}: {error}") from None
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}; settings are given as --config.key=value")
    if config is None:
        raise UserError("no configuration; give --config=configs/<name>.py")
    return config, Path(values.workdir or Path("runs") / file.name.partition(".py")[0]).expanduser()


def _named(argv: list[str]) -> str:
    """The configuration file that the command line names."""
    for this, following in zip(argv, [*argv[1:], ""], strict=True):
        name, _, value = this.lstrip("-").partition("=")
        if name == "config":
            return (value or following).partition(":")[0]
    return "?"


def main(argv: list[str]) -> int:
    """Entry point: the exit status."""
    logging.set_verbosity(logging.WARNING)  # JAX reports each accelerator that is not there
    try:
        run(*parse(argv))
    except UserError as error:
        return _fail(str(error))
    except NotLossless as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted; training goes on from its last checkpoint with the same command", 130)
    return 0


def _fail(message: str, status: int = 2) -> int:
    print(f"specjax: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv))
