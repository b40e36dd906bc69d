"""The command line: python -m specjax.run --config=configs/<name>.py [--workdir=DIR] [--config.key=value ...]

``config.mode`` is train, generate, bench or replay. ``config.prepare`` may name configurations of ``config.stages`` that are
run first, in that order, each into ``<workdir>/<its name>``, and left alone when they are finished; "{workdir}" in a text
stands for the workdir. A mistake of the user ends in one line on stderr and exit status 2, with nothing written.
"""

from __future__ import annotations

import functools
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags, logging
from ml_collections import ConfigDict, config_flags
from rich.text import Text

from specjax import decode
from specjax.bench import metrics, replay, results
from specjax.bench import passes as bench
from specjax.config import Config
from specjax.data import prompts, recordings
from specjax.data.prompts import PromptSet
from specjax.errors import UserError
from specjax.report import terminal
from specjax.run import bench, resolve

console = terminal.console()


def generate(config: Config, workdir: Path, command: str | None) -> None:
    """Decodes the prompts, prints the text and keeps it in ``config.record``; a single prompt on a terminal is streamed."""
    target = resolve.load_target(config)
    tokenizer = target.tokenizer
    assert tokenizer is not None  # load_target has seen to it
    if config.get("record"):
        recordings.check_record(config.record, workdir, config.prompts)
    chosen_methods = resolve.methods(config)
    if len(chosen_methods) != 1:
        raise UserError(
            f"mode generate decodes with one method, and config.grid makes {len(chosen_methods)}; leave it out"
        )
    [(label, choice)] = chosen_methods.items()
    method = resolve.method(target, choice, config, label)
    passes: dict[
        tuple, tuple[bench.Pass, int]
    ] = {}  # of every prompt that was decoded: its pass, and its row there

    def decode_turn(asked: list[prompts.Prompt]) -> list[list[int]]:
        chosen = PromptSet(None, asked, [])
        job = resolve.job(config, target, chosen, temperature, min(config.batch_size, len(asked)))
        job = job._replace(
            seed=job.seed + max(p.turn for p in asked)
        )  # a later turn has noise of its own
        bench.run_pass(job, method, brief=True)
        run = bench.run_pass(job, method)
        passes.update({(p.question, p.turn): (run, row) for row, p in enumerate(asked)})
        return run.outputs

    temperature = config.sampling.temperature
    chosen = prompts.read(config, target, decode_turn)
    job = resolve.job(config, target, chosen, temperature, config.batch_size)
    if len(chosen.prompts) == 1 and console.is_terminal:
        counts, outputs = _stream(job, method, chosen.prompts[0], tokenizer.decode)
        rate = None
        texts = [_continue(tokenizer, chosen.prompts[0].ids, outputs[0])]
    else:
        if rest := [p for p in chosen.prompts if (p.question, p.turn) not in passes]:
            decode_turn(rest)
        told = [passes[p.question, p.turn] for p in chosen.prompts]
        runs = list({id(run): run for run, _ in told}.values())
        outputs = [run.outputs[row] for run, row in told]
        counts, rate = metrics.total([run.counts[row] for run, row in told]), sum(map(len, outputs))
        rate /= sum(run.loop for run in runs)
        texts = [
            _continue(tokenizer, p.ids, ids) for p, ids in zip(chosen.prompts, outputs, strict=True)
        ]
        for prompt, text in zip(chosen.prompts, texts, strict=True):
            console.print(Text.assemble((prompt.text, "dim"), text, "\n"))
    row = results.row(
        method.name,
        method.accept,
        counts,
        temperature=float(temperature),
        batch_size=config.batch_size,
        prompts=len(chosen.prompts),
        rate=rate,
    )
    _write(config, workdir, [row], command, texts=texts, token_ids=outputs)
    if config.get("record"):  # for mode replay
        recordings.record(
            config.record, job.prompts, outputs, categories=[p.category for p in chosen.prompts]
        )
        console.print(Text(f"wrote {config.record}", "dim"))


def _stream(
    job: bench.Job, method: bench.Method, prompt: prompts.Prompt, spell: Callable[[list[int]], str]
):
    rows, ids = next(bench.batches(job))
    state = bench.begin(job, method.drafter, method.params, rows, ids)
    console.print(Text(prompt.text, "dim"), end="")
    shown, output, seen = len(spell(prompt.ids)), [], []
    for _, info in decode.stream(
        job.target, method.drafter, method.accept, method.params, state, eos_id=job.eos_id
    ):
        seen.append(
            [np.asarray(x) for x in (info.emitted, info.accepted, info.drafted, info.tested)]
        )
        output += [int(t) for t in info.tokens[0][: int(info.emitted[0])]]
        text = spell(prompt.ids + output)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            console.print(Text(text[shown:]), end="")
            shown = len(text)
    console.print(Text(spell(prompt.ids + output)[shown:]))
    counts = metrics.count(
        decode.Records(*(jnp.stack(x) for x in zip(*seen, strict=True))),
        [True],
        method.drafter.longest,
    )
    return counts, [output]


def _continue(tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of ``new`` after the prompt: some tokenizers drop the first space when decoding from the middle."""
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]


def replays(config: Config, workdir: Path, command: str | None) -> None:
    """Replays the recording ``config.traces`` with each method, and prints what it would have gained, by category."""
    began = time.perf_counter()
    target, recording = replay.load(config)
    guessed = not (config.vocab_size or config.target)
    methods = [
        replay.method(target, choice, config.seed, n, guessed)
        for n, choice in resolve.methods(config).items()
    ]
    batch_size = min(config.batch_size, len(recording.traces))
    keys = {"batch_size": batch_size, "max_new_tokens": config.max_new_tokens, "seed": config.seed}
    rows = []
    with console.status("compiling") as status:
        for method in methods:
            say = lambda what, name=method.name: status.update(Text(f"{name}: {what}"))  # noqa: E731
            for category, tally in replay.measure(
                method, recording.traces, **keys, say=say
            ).items():
                row = functools.partial(
                    results.row, method.name, method.accept, tally.counts, prompts=tally.prompts
                )
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
    _write(config, workdir, rows, command, skipped=recording.skipped)


def _write(config: Config, workdir: Path, rows: list[dict], command: str | None, **more) -> None:
    path = results.write(config, workdir, rows, command=command, **more)
    console.print(Text(f"wrote {path}", "dim"))


def train(config: Config, workdir: Path, command: str | None) -> None:
    """Trains a model into ``workdir``; resumes where it stopped, and returns at once when it is finished."""
    del command
    from specjax.train import recipes  # only here: TFDS and Orbax take seconds to import

    summary = recipes.run(config, workdir)
    numbers = ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in summary.items()
    )
    console.print(Text(f"{workdir}: {numbers}", "dim"))


MODES = {"train": train, "generate": generate, "bench": bench.measure, "replay": replays}
DECODES = ("target", "drafter", "accept", "sampling", "batch_size", "max_new_tokens", "seed")
TRAINS = ("objective", "target", "init", "data", "loss", "train", "optimiser", "examine", "seed")
NEEDS = {  # keys that tell a mode's configurations apart, in mode train those of its objectives
    "train": ("objective",),
    "train pretrain": (*TRAINS, "model", "tokenizer"),
    "train distill": (*TRAINS, "model", "pruned"),
    "train heads": (*TRAINS, "drafter", "joint"),
    "train generate": ("target", "data", "generation", "drafter", "seed"),
    "train datastore": ("target", "data", "reach"),
    "train ngram": (
        "target",
        "data",
        "from_target",
        "generation",
        "seed",
        "successors",
        "contexts",
        "smoothing",
    ),
    "generate": (*DECODES, "prompt", "prompts"),
    "bench": (*DECODES, "prompt", "prompts", "grid", "repeats"),
    "replay": (*DECODES, "traces", "skip_bad", "vocab_size", "num_traces", "grid"),
}


def run(config: Config, workdir: Path, command: str | None = None) -> None:
    """Runs one configuration; ``command`` goes into results.json. Raises UserError."""
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
            raise UserError(
                f"config.prepare names {name!r}, and config.stages has no such configuration"
            )
    if mode != "train":
        resolve.check(config)
        if any((workdir / name).exists() for name in ("model", "checkpoints")):
            raise UserError(
                f"{workdir} holds a training run, which this would overwrite; choose another --workdir"
            )
    for name, stage in stages:
        console.print(Text.assemble((name, "bold"), f": {stage.mode}, {workdir / name}"))
        run(stage, workdir / name)
    MODES[mode](config, workdir, command)


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
    config_flags.DEFINE_config_file(
        "config", None, "configs/<name>.py", flag_values=values, sys_argv=argv
    )
    flags.DEFINE_string(
        "workdir", "", "where results go; default runs/<name of the file>", flag_values=values
    )
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
        raise UserError(
            f"there is no configuration file {file}; the repository's are in configs/"
        ) from None
    except Exception as error:  # the file is the user's program, and ml_collections raises many kinds for overrides
        key, hint = (
            re.fullmatch(r"\W*(\w+)\W*", str(error).partition("Did you")[0].replace("\\n", "\n")),
            None,
        )
        if key and isinstance(error, AttributeError | KeyError):
            hint = re.search(r"Did you mean \W*(\w+)", str(error))
            meant = f"did you mean {hint[1]}?" if hint else "the configuration file lists the keys"
            raise UserError(f"unknown configuration key {key[1]!r}; {meant}") from None
        raise UserError(f"configuration {file}: {type(error).__name__}: {error}") from None
    if len(rest) > 1:
        raise UserError(
            f"unexpected argument {rest[1]!r}; settings are given as --config.key=value"
        )
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
        run(*parse(argv), shlex.join(["python", "-m", "specjax.run", *argv[1:]]))
    except UserError as error:
        return terminal.fail(str(error))
    except bench.NotLossless as error:
        return terminal.fail(str(error), 1)
    except RuntimeError as error:
        if "home directory" not in str(error):
            raise
        return terminal.fail(f"{error}: a path begins with ~ and a name that nobody has")
    except KeyboardInterrupt:
        return terminal.fail(
            "interrupted; training and benches go on where they were, with the same command", 130
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
