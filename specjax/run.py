"""The command line: python -m specjax.run --config=configs/<name>.py [--workdir=DIR] [--config.key=value ...]

``config.mode`` is train, generate or bench. ``config.prepare`` may name configurations of ``config.stages`` that are run
first, in that order, each into ``<workdir>/<its name>``, and left alone when they are finished; "{workdir}" in a text stands
for the workdir. A mistake of the user ends in one line on stderr and exit status 2, with nothing written.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags, logging
from ml_collections import ConfigDict, config_flags
from rich.console import Console

from specjax import __version__, bench, decode, metrics, session
from specjax.config import Config
from specjax.errors import UserError
from specjax.report import terminal

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:
    console.width = 120  # a file or a pipe has no width: enough for the table


def generate(config: Config, workdir: Path) -> None:
    """Decodes the prompts and prints the text; a single prompt on a terminal is streamed as it comes."""
    target = session.load_target(config)
    assert target.tokenizer is not None  # load_target has seen to it
    prompts = session.read_prompts(config, target)
    job = session.job(config, target, prompts, config.sampling.temperature, config.batch_size)
    method = session.method(target, config.drafter.to_dict(), config.accept, config.seed)
    if len(prompts) == 1 and console.is_terminal:
        row, outputs = _stream(job, method, prompts[0].text, target.tokenizer.decode)
    else:
        bench.run_pass(job, method, finished=True)
        run = bench.run_pass(job, method)
        outputs = run.outputs
        row = _plain_row(job, method, run.counts, len(prompts), sum(map(len, outputs)) / run.seconds)
        for prompt, ids in zip(prompts, outputs, strict=True):
            console.print(f"[dim]{_escape(prompt.text)}[/dim]{_escape(_continue(target.tokenizer, prompt.ids, ids))}\n")
    texts = [_continue(target.tokenizer, p.ids, ids) for p, ids in zip(prompts, outputs, strict=True)]
    _write(config, workdir, [row], texts=texts, token_ids=outputs)


def _stream(job: bench.Job, method: bench.Method, prompt: str, spell: Callable[[list[int]], str]):
    rows, ids = next(bench.batches(job._replace(batch_size=1)))
    state = bench.begin(job, method.drafter, method.params, rows, ids)
    console.print(_escape(prompt), end="", style="dim")
    shown, output, infos = len(spell(ids[0])), [], []
    for _, info in decode.stream(job.target, method.drafter, method.accept, method.params, state, eos_id=job.eos_id):
        infos.append(info)
        output += [int(t) for t in info.tokens[0][: int(info.emitted[0])]]
        text = spell(ids[0] + output)
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            console.print(_escape(text[shown:]), end="")
            shown = len(text)
    console.print()
    records = decode.Records(*(jax.numpy.stack([getattr(i, f) for i in infos]) for f in decode.Records._fields))
    counts = metrics.count(records, [True], method.drafter.nodes)
    return _plain_row(job, method, counts, 1, None), [output]


def _plain_row(job: bench.Job, method: bench.Method, counts, prompts: int, rate: float | None) -> dict:
    """A results row without a baseline: what was not measured is null."""
    return {
        "method": method.name,
        "accept": method.accept.name,
        "class": method.accept.law,
        "temperature": float(job.settings["temperature"]),
        "batch_size": job.batch_size,
        "prompts": prompts,
        **metrics.summary(counts),
        "tokens_per_second": rate,
        **dict.fromkeys(
            ("autoregressive_tokens_per_second", "speedup", "predicted_speedup", "time_split", "lossless", "category")
        ),
    }


def measure(config: Config, workdir: Path) -> None:
    """Measures the methods of ``config.grid`` (or ``config.drafter``) against plain decoding, and prints a table."""
    target = session.load_target(config)
    prompts = session.read_prompts(config, target)
    grid = config.grid
    named = grid.methods.to_dict() or {config.drafter.name: config.drafter.to_dict()}
    methods = [session.method(target, keys, config.accept, config.seed, label) for label, keys in named.items()]
    jobs = [
        session.job(config, target, prompts, float(temperature), int(batch))
        for temperature in grid.temperatures or (config.sampling.temperature,)
        for batch in grid.batch_sizes or (config.batch_size,)
    ]
    rows = []
    with console.status("") as status:
        for job in jobs:
            where = f"temperature {job.settings['temperature']:g}, batch {job.batch_size}"
            rows += bench.measure(job, methods, lambda what, where=where: status.update(f"{where}: {what}"))
    console.print(terminal.table(rows))
    console.print(
        "[dim]tau: tokens per round; alpha: acceptance rate; plain: our autoregressive tokens/s, same batch; "
        f"speed-up: tokens/s over plain, median of {config.repeats} interleaved passes[/dim]"
    )
    if config.show_trace:
        _show_trace(jobs[0], methods, target.tokenizer, prompts[0])
    _write(config, workdir, rows)
    for row in rows:
        if row["lossless"] and not row["lossless"]["passed"]:
            raise UserError(f"{row['method']} lost something: {row['lossless']['detail']}; see results.json")


def _show_trace(job: bench.Job, methods, tokenizer, prompt: session.Prompt) -> None:
    """One continuation, coloured by who wrote each token."""
    method = next((m for m in methods if m.drafter.nodes), None)
    if method is None:
        return
    job = job._replace(batch_size=1, prompts=[prompt.ids])
    rows, ids = next(bench.batches(job))
    state = bench.begin(job, method.drafter, method.params, rows, ids)
    steps = decode.stream(job.target, method.drafter, method.accept, method.params, state, eos_id=job.eos_id)
    infos = [jax.device_get(info) for _, info in steps]
    console.print(f"\n[bold]{method.name}[/bold], temperature {job.settings['temperature']:g}:  ", end="")
    console.print(terminal.legend())
    console.print(terminal.trace(prompt.text, infos, lambda token: tokenizer.decode([token])))


def _continue(tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text of ``new`` after the prompt: some tokenizers drop the first space when decoding from the middle."""
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


def _write(config: Config, workdir: Path, rows: list[dict], **more) -> None:
    """config.json, metrics.jsonl and results.json, at the end and together: a failed run leaves nothing."""
    device = jax.devices()[0]
    versions = {"specjax": __version__, "jax": jax.__version__}
    versions |= {"backend": jax.default_backend(), "device": device.device_kind}
    results = {"schema": 1, "date": time.strftime("%Y-%m-%d"), "versions": versions, "rows": rows, **more}
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "config.json").write_text(config.to_json_best_effort(indent=2) + "\n")
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        partial = workdir / "results.json.tmp"
        partial.write_text(json.dumps(results, indent=2) + "\n")
        partial.replace(workdir / "results.json")
    except OSError as error:
        raise UserError(f"cannot write into {workdir}: {error.strerror}; choose another --workdir") from None
    console.print(f"[dim]wrote {workdir / 'results.json'}[/dim]")


def _check_workdir(workdir: Path) -> None:
    """Finds out before any work is done, and without writing, whether results can be written."""
    there = workdir.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"cannot write into {workdir}: {there} is not a writable directory; choose another --workdir")


def train(config: Config, workdir: Path) -> None:
    """Trains a model into ``workdir``; resumes where it stopped, and returns at once when it is finished."""
    from specjax.train import recipes  # only here: TFDS and Orbax take seconds to import

    summary = recipes.run(config, workdir)
    numbers = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in summary.items())
    console.print(f"[dim]{workdir}: {numbers}[/dim]")


MODES = {"train": train, "generate": generate, "bench": measure}


def run(config: Config, workdir: Path) -> None:
    """Runs one configuration. Raises UserError."""
    if config.mode not in MODES:
        raise UserError(f"config.mode is {config.mode!r}; it must be one of {', '.join(MODES)}")
    _check_workdir(workdir)
    _fill(config, str(workdir))
    for name in config.get("prepare") or ():
        stage = config.stages[name]
        console.print(f"[bold]{name}[/bold]: {stage.mode}, {workdir / name}")
        run(stage, workdir / name)
    MODES[config.mode](config, workdir)


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
    sys.path.append(str(file.resolve().parent.parent))
    try:
        rest = values(argv)
        config = values.config
        if config is not None:
            config.to_dict()  # a file that cannot be loaded only says so when it is looked at
    except flags.Error as error:
        raise UserError(str(error).partition(": Traceback")[0]) from None
    except OSError:
        raise UserError(f"there is no configuration file {file}; the repository's are in configs/") from None
    except (AttributeError, KeyError) as error:  # what ml_collections raises for an override of a key that is not there
        key, hint = re.search(r"(\w+)", str(error)), re.search(r'Did you mean "(\w+)"', str(error))
        meant = f"did you mean {hint[1]}?" if hint else "the configuration file lists the keys"
        raise UserError(f"unknown configuration key {key[1] if key else error!r}; {meant}") from None
    except (TypeError, ValueError) as error:
        raise UserError(f"configuration: {error}") from None
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
    except KeyboardInterrupt:
        return _fail("interrupted; the same command goes on from the last checkpoint", 130)
    return 0


def _fail(message: str, status: int = 2) -> int:
    print(f"specjax: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv))
