"""Leviathan's experiment in small: a T5 target, T5 drafts of two sizes, and theory.

    PYTHONPATH=. python experiments/t5/run.py --dialogues=sgd_train.jsonl --workdir=runs/t5_study

Trains a target (configs/t5.py) on answers in dialogues, lets it write outputs for training sources
at temperature 0 and 1 (configs/self_generate.py), and distils drafts of two sizes on them
(configs/t5_distill.py; the smaller one also on the answers themselves). Then it decodes held-out
sources at batch 1 with gamma 3, 5 and 7 at temperature 0 and 1, each draft and prompt lookup in the
source, interleaved with the own autoregressive loop (configs/bench.py), and measures the cost of a
draft step and of target passes. Beside what is measured are the expectations of Leviathan et al.
2023 (2211.17192): tokens per round of equation 1, and the speed-up of theorem 3.8, both from the
measured acceptance rate and cost.

A Spec-Drafter (SpecDec, 2203.16487; configs/spec_drafter.py) is beside them, with the lossless rule
and with the paper's two settings of Spec-Verification (top 3 and gap 1, top 5 and gap 3). These
change the text: ``differences`` has how many texts and tokens are not those of greedy decoding.
Blockwise parallel decoding (1811.03115; configs/bpd.py) has its joint layer; exact, and with top 3.
Unigrams and bigrams (2211.17192, section 3.6) are counted in what the target wrote; they cost
nothing per token.

Finished parts in the workdir are not repeated. --measure-only trains nothing and measures again.
Without --dialogues the pairs are docstrings. Writes this task's part of ``results.json`` beside
this file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import checked, options, record, start, without_folder
from experiments.loops import Loop, clock, repeat
from experiments.t5 import bpd, spec_drafter
from experiments.trained_drafters.measuring import bench_config
from experiments.trained_drafters.training import CONFIGS, run_config
from specjax import sampling, theory
from specjax.bench.timing import commit_none
from specjax.data import corpora, generated_text, ngram_tables, pairs
from specjax.files import write_json
from specjax.models import hf
from specjax.types import LM

TARGET = {"hidden_size": 128, "intermediate_size": 384, "num_layers": 3, "encoder_layers": 3}
# Label -> (shape, what it is distilled on).
DRAFTS = {
    "64 wide, 1+1 layers": ((64, 192, 1, 2), "target's"),
    "96 wide, 2+2 layers": ((96, 256, 2, 3), "target's"),
    "64 wide, 1+1 layers, pairs": ((64, 192, 1, 2), "pairs"),
}
# What is trained on the target, on what it wrote.
HEADS = (spec_drafter, bpd)
NGRAMS = {"unigram": 1, "bigram": 2}  # label -> order
GAMMAS, TEMPERATURES = (3, 5, 7), (0.0, 1.0)
TIMES = frozenset(
    {
        "seconds",
        "ms",
        "c",
        "verify",
        "speedup",
        "speedup_interval",
        "improvement",
        "improvement_measured_verify",
        "tokens_per_second",
        "plain_tokens_per_second",
    }
)
SOURCE = 48  # tokens of the source when passes are timed
ITERATIONS, SAMPLES = 50, 7


def text_keys(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the pairs."""
    if args.dialogues:
        return {"data.pairs": "", "data.dialogues": args.dialogues}
    return {"data.dir": args.workdir / "data"}


def train_keys(args: argparse.Namespace, steps: int) -> dict[str, Any]:
    """The keys that all training runs have."""
    return {
        "train.steps": steps,
        "train.batch_size": args.batch,
        "train.length": args.length,
        "train.eval_every": max(steps // 4, 1),
        "train.checkpoint_every": max(steps // 4, 1),
        "examine.every": steps,
        "examine.prompt_tokens": args.length - 16,
        "examine.new_tokens": args.new,
    }


def train_target(args: argparse.Namespace, workdir: Path) -> None:
    """Trains the target."""
    shape = {**TARGET, "vocab_size": args.vocabulary, "num_heads": 4}
    if args.quick:
        shape |= {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
        shape |= {"num_layers": 1, "encoder_layers": 1}
    keys = {f"model.{key}": value for key, value in shape.items()}
    keys |= {**text_keys(args), **train_keys(args, args.steps), "examine.prompts": 0}
    run_config(CONFIGS / "t5.py", workdir, keys)


def write_outputs(args: argparse.Namespace, target: Path, workdir: Path) -> None:
    """Lets the target write outputs."""
    keys = {
        "target": target,
        "generation.num_prompts": args.generated,
        "generation.prompt_tokens": args.length - 16,
        "generation.new_tokens": args.new,
        "generation.batch_size": 32,
        "data.pairs": "docstrings",
    }
    run_config(CONFIGS / "self_generate.py", workdir, keys | text_keys(args))


def folder_of(label: str, args: argparse.Namespace) -> Path:
    """The workdir of a draft."""
    return args.workdir / label.replace(", ", "-").replace(" ", "_").replace("+", "_")


def train_draft(label: str, args: argparse.Namespace, target: Path, generated: Path) -> None:
    """Trains a draft."""
    (width, inner, layers, heads), text = DRAFTS[label]
    if args.quick:
        width, inner, heads = 16, 24, 2
    keys = {
        "target": target,
        "model.hidden_size": width,
        "model.intermediate_size": inner,
        "model.num_layers": layers,
        "model.encoder_layers": layers,
        "model.num_heads": heads,
        "examine.prompts": 4 if args.quick else 16,
    }
    keys |= train_keys(args, args.draft_steps)
    if text == "pairs":
        keys |= text_keys(args)
    else:
        keys |= {"data.pairs": "", "data.generated": generated}
    run_config(CONFIGS / "t5_distill.py", folder_of(label, args), keys)


def count_ngrams(target: Path, generated: Path, folder: Path) -> None:
    """Counts n-grams in the outputs that the target wrote for its training sources."""
    loaded = hf.load(str(target))
    assert loaded.text_tokenizer is not None
    documents = generated_text.load(
        generated, hf.fingerprint(loaded.text_tokenizer), "train", labels="output"
    )
    outputs = [each.ids[each.labelled].tolist() for each in documents]
    counts = ngram_tables.count(outputs, loaded.lm.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    ngram_tables.save(folder, counts, vocabulary=loaded.lm.vocabulary, sources=[generated.name])


def prompt_file(args: argparse.Namespace, target: hf.Loaded) -> Path:
    """A file with sources of the test split."""
    if args.dialogues:
        given = pairs.turns([args.dialogues], "test")
    else:
        given = pairs.docstrings(corpora.load_texts(args.workdir / "data", "test"))
    assert target.tokenizer is not None
    short = [
        pair for pair in given if len(target.tokenizer.encode(pair.source).ids) < args.length - 16
    ]
    chosen = short[:: max(len(short) // args.prompts, 1)][: args.prompts]
    lines = [json.dumps({"source": p.source, "output": p.output}) + "\n" for p in chosen]
    path, text = args.workdir / "prompts.jsonl", "".join(lines)
    # A bench that was killed resumes as long as its prompts have not changed.
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


def bench(args: argparse.Namespace, target: Path, drafts: dict[str, Path]) -> list[dict[str, Any]]:
    """The rows of the benches, one bench for each gamma."""
    prompts, rows = prompt_file(args, hf.load(str(target))), []
    methods: dict[str, dict[str, Any]] = {
        label: {"name": "draft_model", "model": str(path), "accept": "chain"}
        for label, path in drafts.items()
    }
    for heads in HEADS:
        methods |= heads.methods(folder_of(heads.NAME, args))
    methods["prompt lookup"] = {"name": "prompt_lookup", "accept": "chain"}
    tables = {"name": "ngram_lm", "tables": str(args.workdir / "ngrams"), "mode": "sample"}
    for label, order in NGRAMS.items():
        methods[label] = {**tables, "order": order, "accept": "chain"}
    for gamma in GAMMAS:
        config = args.workdir / "configs" / f"gamma{gamma}.py"
        config.parent.mkdir(exist_ok=True)
        part = {label: _drafting(keys, gamma) for label, keys in methods.items()}
        config.write_text(bench_config(part), encoding="utf-8")
        workdir = args.workdir / f"bench{gamma}"
        if args.measure_only:
            shutil.rmtree(workdir, ignore_errors=True)
        keys = {
            "target": target,
            "prompts": prompts,
            "repeats": args.repeats,
            "grid.temperatures": TEMPERATURES,
            "max_new_tokens": args.new,
            "trace_prompts": 0,
            "report": False,
        }
        run_config(config, workdir, keys)
        found = json.loads((workdir / "results.json").read_text())["rows"]
        rows += [{**row, "gamma": gamma} for row in found if row["category"] is None]
    return rows


def _drafting(keys: dict[str, Any], gamma: int) -> dict[str, Any]:
    """The keys of a method with this draft length."""
    if "tree" in keys:
        return {**keys, "tree": keys["tree"].format(gamma)}
    return {**keys, "gamma": gamma}


def passes(model: LM, params: Any, size: int) -> Loop:
    """A loop of passes over ``size`` tokens after a source of ``SOURCE`` tokens."""
    assert model.encoder is not None
    tokens = jnp.full((1, SOURCE), model.encoder.start + 3, jnp.int32)
    count = jnp.full((1,), SOURCE, jnp.int32)
    cache = model.init_cache(1, SOURCE + 64)
    _, cache = model.encoder.read(params, tokens, count, cache)

    def body(_, carry, params):
        tokens, cache = carry
        out, block = model.apply(params, tokens, cache)
        return sampling.argmax(out.logits), commit_none(model, cache, block)

    return repeat(body, ITERATIONS, (jnp.zeros((1, size), jnp.int32), cache), params)


def costs(target: Path, drafts: dict[str, Path]) -> dict[str, Any]:
    """Milliseconds of target passes over 1 and gamma + 1 tokens, and of a step of each draft."""
    loaded = hf.load(str(target))
    loops: dict[Any, tuple[Loop, int]] = {
        size: (passes(loaded.lm, loaded.params, size), ITERATIONS)
        for size in (1, *(gamma + 1 for gamma in GAMMAS))
    }
    for label, path in drafts.items():
        draft = hf.load(str(path))
        loops[label] = passes(draft.lm, draft.params, 1), ITERATIONS
    seconds = clock(loops, SAMPLES)
    return {str(key): 1e3 * statistics.median(each) for key, each in seconds.items()}


def beside_theory(row: dict[str, Any], ms: dict[str, float]) -> dict[str, Any]:
    """A row of results.json: what was measured, and what is expected from alpha and the costs."""
    gamma, alpha = row["gamma"], row["acceptance_rate"] or 0.0
    # A lookup has no draft in some rounds, and a Spec-Drafter no cost per token: the formulas do
    # not apply.
    name = row["method"]
    drafts = name in DRAFTS or name in NGRAMS
    c = ms[name] / ms["1"] if name in DRAFTS else 0.0 if drafts else None
    verify = {1: 1.0} | {g + 1: ms[str(g + 1)] / ms["1"] for g in GAMMAS}
    return {
        "method": name,
        "temperature": row["temperature"],
        "gamma": gamma,
        "alpha": row["acceptance_rate"],
        "tau": row["block_efficiency"],
        # Before a text is cut at its end, as the formula counts.
        "tokens_before_cut": row["accepted_per_round"] + 1,
        "expected_tokens": theory.expected_tokens(alpha, gamma) if drafts else None,
        "c": c,
        "verify": verify[gamma + 1],
        "speedup": row["speedup"],
        "speedup_interval": row["speedup_interval"],
        "improvement": None if c is None else theory.walltime_improvement(alpha, gamma, c),
        "improvement_measured_verify": None
        if c is None
        else theory.walltime_improvement(alpha, gamma, c, verify),
        "tokens_per_second": row["tokens_per_second"],
        "plain_tokens_per_second": row["autoregressive_tokens_per_second"],
        "lossless": row["lossless"]["passed"],
    }


def trained_facts(workdir: Path) -> dict[str, Any]:
    """What a training run reports at its end."""
    summary = json.loads((workdir / "summary.json").read_text())
    kept = ("heldout_loss", "heldout_alpha", "heldout_tau_t0", "heldout_tau_t1")
    kept += ("parameters", "steps", "seconds")
    return {key: summary[key] for key in kept if key in summary}


def trained_by(args: argparse.Namespace, argv: list[str]) -> str:
    """The command that trained; with --measure-only it is that of the workdir."""
    path = args.workdir / "trained_by.txt"
    if args.measure_only and not path.is_file():
        raise SystemExit(f"{args.workdir} has no trained models; leave --measure-only out")
    if not path.is_file():
        command = ["python", "experiments/t5/run.py", *map(without_folder, argv)]
        path.write_text(shlex.join(command), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--dialogues", default="", help=".jsonl file of conversations; empty: docstrings")
    add("--workdir", type=Path, required=True)
    add("--steps", type=int, default=500, help="of the target")
    add("--draft-steps", type=int, default=500)
    add("--batch", type=int, default=16)
    add("--length", type=int, default=64, help="of source and output, in tokens")
    add("--vocabulary", type=int, default=2048)
    add("--generated", type=int, default=4096, help="sources for which the target writes outputs")
    add("--new", type=int, default=24)
    add("--prompts", type=int, default=24, help="of the bench")
    add("--repeats", type=int, default=3, help="of the bench")
    add("--quick", action="store_true", help="tiny models, for a test")
    add("--train-only", action="store_true", help="train, and measure nothing")
    add("--measure-only", action="store_true", help="measure again what is trained")
    args = parser.parse_args(argv)
    if args.train_only and args.measure_only:
        raise SystemExit("--train-only and --measure-only exclude each other; give one of them")
    args.workdir.mkdir(parents=True, exist_ok=True)
    args.workdir = args.workdir.resolve()
    return args


def main(argv: list[str]) -> None:
    """Entry point."""
    args = parse(argv)
    if not args.train_only:
        start(args)  # refuses before the training
    target, generated = args.workdir / "target", args.workdir / "generated"
    drafts = {label: folder_of(label, args) for label in DRAFTS}
    if not args.measure_only:
        train_target(args, target)
        write_outputs(args, target, generated)
        for label in DRAFTS:
            train_draft(label, args, target, generated)
        keys = train_keys(args, args.draft_steps)
        for heads in HEADS:
            heads.train(args, keys, target, generated, folder_of(heads.NAME, args))
        count_ngrams(target, generated, args.workdir / "ngrams")
    trained = trained_by(args, argv)
    if args.train_only:
        return
    stopwatch = start(args)
    rows = bench(args, target, drafts)
    ms = costs(target, drafts)
    spec, prompts = folder_of(spec_drafter.NAME, args), args.workdir / "prompts.jsonl"
    far = [spec_drafter.differences(args, target, spec, prompts, gamma) for gamma in GAMMAS]
    result = {
        **record(__file__, [without_folder(each) for each in argv], stopwatch),
        "pairs": "answers in dialogues" if args.dialogues else "docstrings",
        "trained_by": trained,
        "training": {
            "target": trained_facts(target),
            **{label: trained_facts(path) for label, path in drafts.items()},
            **{heads.NAME: trained_facts(folder_of(heads.NAME, args)) for heads in HEADS},
        },
        "ms": ms,
        "rows": [beside_theory(row, ms) for row in rows],
        "differences": [row for each in far for row in each],
    }
    jax.clear_caches()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    write_json(args.out, known | {result["pairs"]: checked(result, stopwatch, TIMES)})
    for row in result["rows"]:
        what = f"{row['method']:32} T={row['temperature']:g} gamma {row['gamma']}"
        tokens = f"tau {row['tau']:.2f} ({row['expected_tokens'] or 0:.2f})"
        speed = f"speed-up {row['speedup']:.2f} ({row['improvement'] or 0:.2f})"
        print(f"{what}: alpha {row['alpha'] or 0:.2f}, {tokens}, {speed}")


if __name__ == "__main__":
    main(sys.argv[1:])
