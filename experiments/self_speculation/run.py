"""Early exits of a real chat model: the acceptance of every exit layer, costs, measured drafts.

    PYTHONPATH=. python experiments/self_speculation/run.py --target=DIR --prompts=question.jsonl \\
        --small=stories260K --text=tinystories.txt --workdir=runs/exits

The target is SmolLM2-135M-Instruct (Apache-2.0, 30 layers) in float32; the prompts are first turns
of Spec-Bench (2401.07851), evenly from its tasks, with the model's chat template. The target writes
--new tokens of each, greedy and at temperature 1. Then

- one pass over each text gives the acceptance of every exit layer E: at temperature 0 how often
  its first choice is the target's, at temperature 1 the mean of sum min(target, exit);
- a pass of the first E layers and the head over one token is timed (--exits), and compared with a
  pass of the whole model, with E / L, and with the share of the parameters that it reads;
- with this share as the cost, and a verification that costs one pass, Theorem 3.8 of Leviathan et
  al. gives the best number of draft tokens and its speed-up ("predicted": nothing gains where it is
  0 draft tokens);
- the first E layers without the head are timed over one token and over --gamma + 1 tokens, beside
  the verifying pass: a verification that reuses what drafting has computed needs them for the last
  draft token alone, so the difference is what it could save at most;
- the same texts are decoded without and with that reuse (the key "reuse"), greedily, in turns, at
  every batch size of --batches;
- drafts of the exits are decoded at temperature 0 and 1 with --gamma tokens; tau is compared with
  (1 - alpha^(gamma+1)) / (1 - alpha), which takes the acceptance as independent.

Adapters are trained on --small, a small target, and small targets are trained with and without
LayerSkip, on --text (2 MB of TinyStories); their runs are in --workdir (``training.py``).

About 15 minutes on two idle CPU cores. --parts measures some of it again; each part of
``results.json`` beside this file has its command and date. "steps" and "reuse" are times: run them
on an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import Stopwatch, checked, options, record, start, without_folder
from experiments.loops import Loop, clock, repeat, tie
from experiments.self_speculation import training
from specjax import accept, decode, drafters, rng, sampling
from specjax.bench import provenance
from specjax.data import chat, prompt_files
from specjax.drafters.self_speculation import early_exit
from specjax.files import write_json
from specjax.models import hf
from specjax.theory import chain
from specjax.types import LM, DecodeState, Drafter, ModelParams, Records, Sublayers

PARTS = ("acceptance", "steps", "reuse", "drafts", "adapters", "targets")
TIMED = ("steps", "reuse")  # the parts with times; the others have none
TIMES = frozenset(
    {
        "ms",
        "share",
        "reuse_saves",
        "ms_of_first_layers",
        "ms_of_first_layers_over_block",
        "verify_ms",
        "ratios",
        "ms_of_round_plain",
        "ms_of_round_reuse",
        "tokens_per_second_plain",
        "tokens_per_second_reuse",
    }
)
TEMPERATURES = (0.0, 1.0)
PASSES = 8  # in a loop of passes
CONTEXT = 256  # tokens before the timed passes


def questions(args: argparse.Namespace, target: hf.Loaded) -> list[list[int]]:
    """The token ids of --questions first turns of at most --longest tokens, evenly from tasks."""
    assert target.tokenizer is not None
    template = chat.load("", target.directory, target.tokenizer) if args.chat == "own" else None
    by_task: dict[str | None, list[list[int]]] = {}
    for each in prompt_files.read(args.prompts, f"--prompts {args.prompts}"):
        spelt = prompt_files.spell(each, 0, [], template)
        ids = target.tokenizer.encode(spelt.text, add_special_tokens=spelt.add_special_tokens).ids
        if len(ids) <= args.longest:
            by_task.setdefault(prompt_files.task(each.category), []).append(ids)
    turns = max(map(len, by_task.values()), default=0)
    mixed = [task[turn] for turn in range(turns) for task in by_task.values() if turn < len(task)]
    return mixed[: args.questions]


def decoded(
    target: hf.Loaded,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    new: int,
    seed: int = 0,
) -> tuple[list[list[int]], float]:
    """(the new tokens of each prompt, tokens per round); all prompts are one batch."""
    state = begun(target, drafter, prompts, temperature, new, seed=seed)
    lengths = state.length.tolist()
    state, records = rounds(target, drafter, state, new, target.config.eos_token_id)
    emitted = np.asarray(records.emitted)
    return decode.outputs(state, lengths), float(emitted.sum() / (emitted > 0).sum())


def begun(
    target: hf.Loaded,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    new: int,
    *,
    seed: int = 0,
    width: int | None = None,
) -> DecodeState:
    """The state after the prefill; ``width`` is that of the packed prompts."""
    packed, lengths = decode.pack_prompts(prompts, width)
    return decode.prefill(
        target.lm,
        drafter,
        _pair(target, drafter),
        packed,
        lengths,
        rng.row_keys(seed, len(prompts)),
        max_len=packed.shape[1] + new,
        limit=lengths + new,
        sampling=sampling.make_sampling(len(prompts), temperature),
    )


def rounds(
    target: hf.Loaded, drafter: Drafter, state: DecodeState, new: int, eos_id: Any
) -> tuple[DecodeState, Records]:
    """All rounds; ``state`` is consumed."""
    state, records = decode.generate(
        target.lm,
        drafter,
        accept.load("chain"),
        _pair(target, drafter),
        state,
        max_steps=new,
        eos_id=eos_id,
    )
    decode.check(state)
    return state, records


def _pair(target: hf.Loaded, drafter: Drafter) -> ModelParams:
    return ModelParams(target.params, drafter.init_params(jax.random.key(0)))


def acceptance(
    target: hf.Loaded, prompts: Sequence[Sequence[int]], new: int
) -> dict[str, np.ndarray]:
    """Temperature as text -> f64[L,tokens], on text that the target has written."""
    plain, result = drafters.make("none", target.lm), {}
    for temperature in TEMPERATURES:
        outputs, _ = decoded(target, plain, prompts, temperature, new)
        result[f"{temperature:g}"] = early_exit.acceptance_by_layer(
            target.lm, target.params, prompts, outputs, {"temperature": temperature}
        )
    return result


def passes(model: LM, params: Any, size: int, head: bool) -> Loop:
    """Passes over ``size`` tokens after ``CONTEXT`` tokens, with the head or without it."""
    cache = model.init_cache(1, CONTEXT + size)
    cache = cache.replace(length=jnp.full((1,), CONTEXT, jnp.int32))

    def body(_, tokens, params, cache):
        out = model.apply(params, tokens, cache)[0]
        (read,) = tie(tokens, out.logits if head else out.hidden)
        return (tokens + (read[..., 0] > 9).astype(jnp.int32)) % model.vocab_size

    return repeat(body, PASSES, jnp.ones((1, size), jnp.int32), params, cache)


def costs(target: hf.Loaded, args: argparse.Namespace) -> dict[tuple[int, int, bool], float]:
    """(exit layer, tokens, with the head) -> milliseconds of a pass of the first layers."""
    layers, block = target.config.num_layers, args.gamma + 1
    kinds = [(each, 1, True) for each in sorted({*args.exits, layers})]
    kinds += [(each, size, False) for each in args.exits for size in (1, block)]
    kinds.append((layers, block, True))
    loops = {
        kind: (passes(first_layers(target.lm, kind[0]), target.params, *kind[1:]), PASSES)
        for kind in kinds
    }
    seconds = clock(loops, args.repeats)
    return {kind: 1e3 * statistics.median(samples) for kind, samples in seconds.items()}


def first_layers(model: LM, count: int) -> LM:
    """The first layers and the head."""
    every = tuple(range(count))
    return model.with_part(Sublayers(every, every))


def shares(target: hf.Loaded) -> list[float]:
    """The share of the parameters that a pass of the first 1, 2, ..., L layers reads."""
    params = target.params
    layer = [_size(params["layers"][number]) for number in range(target.config.num_layers)]
    rest = _size({name: part for name, part in params.items() if name != "layers"})
    if not target.config.tie_embeddings:
        rest -= _size(params["embed"])  # one row of them is read
    read = rest + np.cumsum(layer)
    return (read / read[-1]).tolist()


def _size(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def acceptance_part(target: hf.Loaded, args: argparse.Namespace) -> dict[str, Any]:
    """One row per exit layer."""
    prompts = questions(args, target)
    values, rows = acceptance(target, prompts, args.new), []
    for number, share in enumerate(shares(target)):
        row: dict[str, Any] = {"exit_layer": number + 1, "parameter_share": share}
        for temperature, own in values.items():
            # Rounding: the last layer's overlap is 1 up to the last bits.
            alpha = min(float(own[number].mean()), 1.0)
            gamma, gain = chain.optimal_gamma(alpha, share, limit=32)
            row[f"acceptance_t{temperature}"] = alpha
            row[f"error_t{temperature}"] = float(own[number].std() / np.sqrt(own.shape[1]))
            row[f"best_gamma_t{temperature}"] = gamma
            row[f"predicted_speedup_t{temperature}"] = gain
        rows.append(row)
    tokens = {temperature: own.shape[1] for temperature, own in values.items()}
    return {"prompts": len(prompts), "tokens": tokens, "rows": rows}


def drafts_part(
    target: hf.Loaded, args: argparse.Namespace, layers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Measured tokens per round of the chosen exits, beside those that ``layers`` predict."""
    prompts, rows = questions(args, target), []
    for each in args.exits:
        drafter = drafters.make("early_exit", target.lm, exit_layer=each, gamma=args.gamma)
        row: dict[str, Any] = {"exit_layer": each, "gamma": args.gamma}
        for temperature in TEMPERATURES:
            name = f"t{temperature:g}"
            # Other noise than that of the texts which the acceptance is measured on.
            outputs, tau = decoded(target, drafter, prompts, temperature, args.new, seed=1)
            alpha = layers[each - 1][f"acceptance_{name}"]
            row[f"tau_{name}"] = tau
            row[f"expected_tau_{name}"] = chain.expected_tokens(alpha, args.gamma)
            row[f"tokens_{name}"] = sum(map(len, outputs))
        rows.append(row)
        print(row, flush=True)
    return {"prompts": len(prompts), "rows": rows}


def steps_part(target: hf.Loaded, args: argparse.Namespace) -> dict[str, Any]:
    """The cost of a draft step, and what reusing its layers in the verification could save."""
    milliseconds, read = costs(target, args), shares(target)
    count, block = target.config.num_layers, args.gamma + 1
    whole, verify = milliseconds[count, 1, True], milliseconds[count, block, True]
    rows = []
    for each in args.exits:
        step = milliseconds[each, 1, True]
        one, many = (milliseconds[each, size, False] for size in (1, block))
        row = {"exit_layer": each, "ms": step, "share": step / whole}
        row |= {"layer_share": each / count, "parameter_share": read[each - 1]}
        row |= {"ms_of_first_layers": one, "ms_of_first_layers_over_block": many}
        rows.append(row | {"verify_ms": verify, "reuse_saves": (many - one) / verify})
    return {"context": CONTEXT, "rows": rows}


class Decoded(NamedTuple):
    """One pass over all prompts."""

    seconds: float
    rounds: int  # of all batches
    emitted: int  # tokens
    row_rounds: int  # rounds of all rows that were not finished
    outputs: list[list[int]]


def timed(
    target: hf.Loaded, drafter: Drafter, prompts: Sequence[Sequence[int]], batch: int, new: int
) -> Decoded:
    """Decodes batches of ``batch`` prompts greedily, without stops; the prefill is not timed."""
    width, total = max(map(len, prompts)), Decoded(0.0, 0, 0, 0, [])
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        # All batches have one shape, so there is one program.
        state = begun(target, drafter, some, 0.0, new, width=width)
        lengths = state.length.tolist()
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, records = rounds(target, drafter, state, new, None)
        seconds = time.perf_counter() - began
        emitted = np.asarray(records.emitted)
        total = Decoded(
            total.seconds + seconds,
            total.rounds + int((emitted > 0).any(1).sum()),
            total.emitted + int(emitted.sum()),
            total.row_rounds + int((emitted > 0).sum()),
            total.outputs + decode.outputs(state, lengths),
        )
    return total


def reuse_part(target: hf.Loaded, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds without and with ``reuse``, in turns: medians of --repeats passes."""
    prompts, rows = questions(args, target)[: args.timed_questions], []
    for each in args.reuse_exits:
        keys = {"exit_layer": each, "gamma": args.gamma}
        pair = [drafters.make("early_exit", target.lm, reuse=on, **keys) for on in (False, True)]
        for batch in args.batches:
            run = functools.partial(timed, target, prompts=prompts, batch=batch, new=args.timed_new)
            first = [run(drafter) for drafter in pair]  # compiles
            passes = [[run(drafter) for drafter in pair] for _ in range(args.repeats)]
            seconds = np.array([[one.seconds for one in both] for both in passes])
            row: dict[str, Any] = {"exit_layer": each, "gamma": args.gamma, "batch": batch}
            row["tau"] = first[0].emitted / first[0].row_rounds
            # A logit may differ in its last bits, and so may the choice between equal tokens.
            row["same_texts"] = first[0].outputs == first[1].outputs
            for label, one, own in zip(("plain", "reuse"), first, seconds.T, strict=True):
                median = statistics.median(own.tolist())
                row[f"ms_of_round_{label}"] = 1e3 * median / one.rounds
                row[f"tokens_per_second_{label}"] = one.emitted / median
            row["ratios"] = sorted((seconds[:, 0] / seconds[:, 1]).tolist())
            rows.append(row)
            print(row, flush=True)
    return {"prompts": len(prompts), "new": args.timed_new, "rows": rows}


def measure(part: str, args: argparse.Namespace, known: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a part; ``known`` has the parts that were measured before."""
    if part == "adapters":
        facts = {"small": args.small.name, "steps": args.steps, "gamma": args.gamma}
        return facts | {"rows": training.adapters(args)}
    if part == "targets":
        return {"steps": args.steps, "rows": training.targets(args)}
    target = hf.load(args.target)
    facts = {"target": provenance.target(target.params, name="", directory=target.directory)}
    if part == "acceptance":
        return facts | acceptance_part(target, args)
    if part == "drafts":
        if "acceptance" not in known:
            raise SystemExit("the part drafts needs the part acceptance; measure it first")
        return facts | drafts_part(target, args, known["acceptance"]["rows"])
    return facts | (reuse_part if part == "reuse" else steps_part)(target, args)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured again")
    add("--target", help="directory of the chat model")
    add("--prompts", type=Path, help="the questions of Spec-Bench")
    add("--chat", choices=("own", "none"), default="own", help="the model's template, or none")
    add("--questions", type=int, default=12)
    add("--longest", type=int, default=256, help="longest prompt")
    add("--new", type=int, default=40, help="new tokens of each")
    add("--exits", type=int, nargs="+", default=[8, 15, 24, 29, 30])
    add("--gamma", type=int, default=4)
    add("--repeats", type=int, default=9, help="samples of each time")
    add("--reuse-exits", type=int, nargs="+", default=[8, 15, 24], help="of the part reuse")
    add("--batches", type=int, nargs="+", default=[1, 4], help="batch sizes of the part reuse")
    add("--timed-questions", type=int, default=4, help="prompts of the part reuse")
    add("--timed-new", type=int, default=24, help="new tokens of each of them")
    add("--small", type=Path, help="a small target to train adapters on")
    add("--text", type=Path, help="text to train on")
    add("--workdir", type=Path, default=Path("runs/exits"), help="of the training runs")
    add("--steps", type=int, default=300, help="of each training run")
    add("--adapter-exits", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args(argv)
    real = {"acceptance", "drafts", "steps", "reuse"} & set(args.parts)
    missing = [key for key in ("target", "prompts") if real and getattr(args, key) is None]
    missing += ["small"] if "adapters" in args.parts and args.small is None else []
    missing += ["text"] if set(args.parts) - real and args.text is None else []
    if missing:
        parser.error(f"these parts need --{missing[0]}")
    return args


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    args = parse(argv)
    parts = json.loads(args.out.read_text())["parts"] if args.out.exists() else {}
    for part in [name for name in PARTS if name in args.parts]:
        stopwatch = start(args) if part in TIMED else Stopwatch()
        numbers = measure(part, args, parts)
        facts = record(__file__, [without_folder(argument) for argument in argv], stopwatch)
        parts[part] = checked(facts | numbers, stopwatch, TIMES if part in TIMED else ())
        write_json(args.out, {"parts": {name: parts[name] for name in PARTS if name in parts}})
        jax.clear_caches()
        print(f"{part}: {stopwatch.seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
