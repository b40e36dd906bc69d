"""Searches the sublayers that ``layer_skip`` leaves out, by Bayesian optimisation.

python -m specjax.bench.skip_search TARGET DIR --texts=texts.jsonl [--trials=200] [--seed=0]

TARGET is a model, and texts.jsonl a recording of its outputs (``config.record`` of
configs/generate.py). Writes DIR/skips.json, which the keys ``skip_attention`` and ``skip_mlp`` of
``layer_skip`` take.

Draft & Verify (Zhang et al. 2023, 2309.08168, section 3.2) maximise the measured speed. It depends
on the machine and on what else runs there, so here the objective is the predicted speed-up, from
the acceptance on the texts and the share of the weights that the draft reads: the same numbers
everywhere. ``--objective=measured`` decodes the texts' prompts instead, as the authors do.

First each sublayer is left out alone, then growing sets of those that cost the least acceptance for
what they save; the optimisation continues from these. A search that was killed continues.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax

from specjax import accept, decode, drafters, files, rng, sampling
from specjax.bench import progress, skip_trials, sublayers
from specjax.bench.skip_trials import Trial
from specjax.bench.sublayers import Shares
from specjax.checks import number, one_of, whole
from specjax.data import recordings
from specjax.drafters.self_speculation._skip_sets import ATTENTION, FILE, MLP, Skips, check
from specjax.errors import UserError
from specjax.models import hf
from specjax.types import ModelParams

_USAGE = (
    "python -m specjax.bench.skip_search TARGET DIR --texts=FILE [--trials=N] [--seed=N] "
    "[--gamma=N] [--temperature=T] [--texts_used=N] [--width=N] [--verify=1,1.1,...] "
    "[--objective=predicted|measured]"
)
OBJECTIVES = ("predicted", "measured")


class Settings(NamedTuple):
    """What the result depends on, with the target and the texts."""

    trials: int = 200  # of the optimisation
    seed: int = 0
    gamma: int = 8  # the longest draft
    temperature: float = 0.0
    texts_used: int = 8  # conversations of the recording
    width: int = 128  # tokens of each
    verify: tuple[float, ...] = ()  # time of a pass over 1, 2, ... tokens, in steps; (): always 1
    objective: str = "predicted"


def search(
    target: hf.Loaded,
    traces: Sequence[recordings.Trace],
    directory: Path,
    settings: Settings,
    report: Callable[[str], Any],
) -> dict:
    """Searches, writes ``skips.json`` into ``directory``, and returns its content.

    ``report`` gets the lines about the progress. Raises UserError: numbers out of range, a target
    without layers, a missing library.
    """
    _check(settings)
    skip_trials.library()
    traces = traces[: settings.texts_used]
    evaluate = _evaluation(target, traces, settings)
    mark = progress.fingerprint(
        {"target": target.directory, **settings._asdict()}, [[*t.prompt, *t.output] for t in traces]
    )
    store = progress.Progress(directory, mark)
    if len(store):
        report(f"continues a search with {len(store)} trials")
    layers, done, began = target.config.num_layers, [], time.monotonic()
    for name, chosen in skip_trials.plan(layers, done, settings.trials, settings.seed):
        stored = store.get(name)
        if stored is None:
            skips = chosen()
            known = {trial.skips: trial for trial in done}
            trial = known[skips] if skips in known else evaluate(skips)
            store.put(name, [*map(list, skips), *trial[1:]])
        else:
            trial = Trial(Skips(*map(tuple, stored[:2])), *stored[2:])
        done.append(trial)
        if len(done) % 10 == 0:
            report(_line(name, done, layers, settings, time.monotonic() - began))
    best = max(done, key=lambda trial: trial.value)
    result = {
        ATTENTION: list(best.skips.attention),
        MLP: list(best.skips.mlp),
        "gamma": best.gamma,
        "alpha": best.alpha,
        "cost": best.cost,
        settings.objective: best.value,
        "trials": len(done),
        "target": Path(target.directory).name,
        "layers": layers,
        "settings": settings._asdict(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    files.write_json(directory / FILE, result)
    store.forget()
    return result


def _check(settings: Settings) -> None:
    for name in ("gamma", "texts_used"):
        whole(name, getattr(settings, name), 1)
    whole("trials", settings.trials, 0)
    whole("seed", settings.seed, 0)
    whole("width", settings.width, 2)
    number("temperature", settings.temperature, ">= 0", lambda x: x >= 0)
    one_of("objective", settings.objective, OBJECTIVES)
    if settings.verify and len(settings.verify) <= settings.gamma:
        raise UserError(
            f"verify has times for up to {len(settings.verify)} tokens, and drafts of "
            f"{settings.gamma} are verified with one more; give {settings.gamma + 1} times"
        )


def _evaluation(
    target: hf.Loaded, traces: Sequence[recordings.Trace], settings: Settings
) -> Callable[[Skips], Trial]:
    """The function that gives the trial of a set."""
    check(target.lm, Skips((), ()))
    rows = sublayers.texts([t.prompt for t in traces], [t.output for t in traces], settings.width)
    experts = target.config.experts
    active = 1.0 if experts is None else experts.chosen / experts.experts
    parts = sublayers.shares(target.params, active)
    rate = sublayers.Acceptance(target.lm, target.params, rows, settings.temperature)
    measured = functools.partial(_tokens_per_second, target, traces, settings)
    return functools.partial(_evaluate, rate, parts, settings, measured)


def _evaluate(
    rate: Callable[[Skips], float],
    parts: Shares,
    settings: Settings,
    measured: Callable[[Skips, int], float],
    skips: Skips,
) -> Trial:
    alpha, cost = rate(skips), parts.cost(skips)
    verify = list(settings.verify) or None
    value, gamma = sublayers.predicted(alpha, cost, settings.gamma, verify)
    if settings.objective == "measured":
        value = measured(skips, gamma)
    return Trial(skips, value, alpha, cost, gamma)


def _tokens_per_second(
    target: hf.Loaded,
    traces: Sequence[recordings.Trace],
    settings: Settings,
    skips: Skips,
    gamma: int,
) -> float:
    """The speed of decoding the prompts, one after another, without compilation."""
    own = {"skip_attention": skips.attention, "skip_mlp": skips.mlp}
    drafter = drafters.make("layer_skip", target.lm, gamma=gamma, **own)
    params, rule = ModelParams(target.params), accept.load("chain")
    seconds = tokens = 0.0
    width = max(len(trace.prompt) for trace in traces)
    new = max(len(trace.output) for trace in traces)
    for turn in range(2):  # the first one compiles
        for number_, trace in enumerate(traces):
            packed, lengths = decode.pack_prompts([trace.prompt], width)
            state = decode.prefill(
                target.lm,
                drafter,
                params,
                packed,
                lengths,
                rng.row_keys(settings.seed, [number_]),
                max_len=width + new,
                limit=lengths + len(trace.output),
                sampling=sampling.make_sampling(1, settings.temperature),
            )
            began = time.perf_counter()
            state, _ = decode.generate(target.lm, drafter, rule, params, state, max_steps=new)
            jax.block_until_ready(state.tokens)
            if turn:
                seconds += time.perf_counter() - began
                tokens += int(state.length[0] - lengths[0])
    # Every set is another program.
    jax.clear_caches()
    return tokens / seconds


def _line(name: str, done: Sequence[Trial], layers: int, settings: Settings, seconds: float) -> str:
    best = max(done, key=lambda trial: trial.value)
    total = skip_trials.count(layers, settings.trials)
    unit = "x" if settings.objective == "predicted" else " tokens/s"
    return (
        f"{len(done)} of {total} trials ({name}), {seconds:.0f} s; "
        f"best {best.value:.3f}{unit}: "
        f"{len(best.skips.attention)} attentions and {len(best.skips.mlp)} feed-forward parts of "
        f"{layers} skipped, alpha {best.alpha:.3f}, cost {best.cost:.3f}, gamma {best.gamma}"
    )


def main(argv: Sequence[str]) -> int:
    """Runs the command line ``argv`` (without the program's name); returns the exit status."""
    try:
        args = vars(_parser().parse_args(argv))
        directory = Path(args.pop("directory")).expanduser()
        if directory.is_file():
            raise UserError(f"{directory} is a file; name a directory for {FILE}")
        target, path = args.pop("target"), args.pop("texts")
        verify = _times(args.pop("verify"))
        settings = Settings(**args, verify=verify)
        _check(settings)
        skip_trials.library()
        loaded = hf.load(target)
        traces = recordings.read(path, loaded.config.vocab_size).traces
        report = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        result = search(loaded, traces, directory, settings, report)
    except UserError as error:
        print(f"specjax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"wrote {directory / FILE}: {settings.objective} {result[settings.objective]:.3f}")
    return 0


def _times(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UserError(f"verify is {text!r}; give times in steps, as in '1,1.1,1.2'") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; usage: {_USAGE}")


def _parser() -> _Parser:
    parser = _Parser(prog="python -m specjax.bench.skip_search", description=__doc__)
    parser.add_argument("target", help="a model directory, a name of the Hub, or a .gguf file")
    parser.add_argument("directory", help=f"where {FILE} is written")
    parser.add_argument("--texts", required=True, help="a recording of the target's outputs")
    defaults = Settings()
    for name in ("trials", "seed", "gamma", "texts_used", "width"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--temperature", type=float, default=defaults.temperature)
    parser.add_argument("--verify", default="", help="times of passes over 1, 2, ... tokens")
    parser.add_argument("--objective", default=defaults.objective, choices=OBJECTIVES)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
