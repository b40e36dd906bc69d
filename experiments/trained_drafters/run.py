"""Trained drafters on one target: draft models with every distillation, and every kind of heads.

    PYTHONPATH=. python experiments/trained_drafters/run.py --name=stories260K --target=DIR \\
        --text=stories.txt --workdir=runs/trained/stories260K

Trains each drafter of ``trained.TRAINED`` (configs/<its config>.py with other keys), then decodes
held-out prompts (the test split of the text) plainly and with each drafter, greedy and at
temperature 1, interleaved in one process (configs/bench.py). The same command resumes a run that
was killed. ``results.json`` beside this file gets tau, alpha by depth and speed-up, the held-out
curves, and the forecasts: those in training, and at the end those for --verified prompts with tau
of decoding them. Without --text the corpus is the embedded one, Python code. --steps and --prompts
make it shorter; --only="A;B" trains and measures some drafters.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from experiments.common import without_folder
from experiments.trained_drafters.trained import DRAFT_MODELS, NETWORKS, TRAINED, methods
from specjax import drafters
from specjax.bench.results import machine
from specjax.data import corpora, text_files, token_streams
from specjax.files import write_text
from specjax.models import hf
from specjax.train import examine

CONFIGS = Path(__file__).parents[2] / "configs"
# The metrics of training that are kept: their last values.
KEPT = (
    "heldout_loss",
    "heldout_tau_t0",
    "heldout_decoded_tau_t0",
    "heldout_tau_t1",
    "heldout_decoded_tau_t1",
)
METHODS_PER_BENCH = 6  # each compiles a dozen programs, and the memory maps of a process are few
PROMPT_TOKENS = 32


def run_config(
    config: str | Path, workdir: Path, keys: Mapping[str, Any], env: dict[str, str] | None = None
) -> None:
    """Runs a configuration with these keys in its own process."""
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "specjax.run", f"--config={config}", f"--workdir={workdir}"]
    print(f"\n{workdir.name}", file=sys.stderr, flush=True)
    done = subprocess.run([*command, *flags], stdout=subprocess.DEVNULL, env=env)
    if done.returncode:
        raise SystemExit(done.returncode)


def corpus_dir(args: argparse.Namespace) -> Path:
    """The directory of the embedded corpus: the one that the target's run built, or a new one."""
    target = Path(args.target)
    built = (target / "data", target.parent / "data")
    return next((each for each in built if each.is_dir()), args.workdir / "data")


def text_keys(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the target and the text that all runs have."""
    if args.text:
        return {"target": args.target, "data.files": args.text}
    return {"target": args.target, "data.dir": corpus_dir(args)}


def generate(args: argparse.Namespace, share: float = 1.0) -> Path:
    """Lets the target generate text to train on, from a share of the prompts; its directory."""
    count = max(round(args.generated * share), 1)
    keys = {"generation.num_prompts": count, "generation.batch_size": args.rows}
    keys |= {"generation.prompt_tokens": args.start, "generation.new_tokens": args.continued}
    workdir = args.workdir / ("generated" if share == 1 else f"generated-{count}")
    run_config(CONFIGS / "self_generate.py", workdir, text_keys(args) | keys)
    return workdir


def train(name: str, args: argparse.Namespace) -> Path:
    """Trains one drafter, after the drafter that it starts from; returns its workdir."""
    chosen = TRAINED[name]
    keys: dict[str, Any] = text_keys(args)
    if chosen.generated:
        keys = {"target": args.target, "data.generated": generate(args, chosen.share)}
    keys |= chosen.keys
    if chosen.init:
        keys["init"] = train(chosen.init, args)
    config, _, form = chosen.config.partition(":")
    if config in DRAFT_MODELS:
        keys |= {
            "model.hidden_size": args.width,
            "model.intermediate_size": 3 * args.width,
            "model.num_layers": 1,
            "model.num_heads": max(args.width // 64, 2),
            "model.num_kv_heads": 2,
            "model.vocab_size": 0,
        }
    else:
        keys["optimiser.learning_rate"] = args.rate / chosen.rate_divisor
    keys |= {
        "train.steps": args.steps,
        "train.batch_size": args.batch,
        "train.eval_every": max(args.steps // 10, 1),
        "train.checkpoint_every": max(args.steps // 4, 1),
        "train.length": args.length,
        "examine.prompts": args.examined,
    }
    workdir = args.workdir / name.replace(", ", "-").replace(" ", "_")
    run_config(f"{CONFIGS / config}.py" + (f":{form}" if form else ""), workdir, keys)
    return workdir


def held_out(
    args: argparse.Namespace, tokenizer: Tokenizer, count: int, seed: int
) -> list[list[int]]:
    """Prompts from text that no run has trained on."""
    if args.text:
        texts = text_files.load_files(args.text, "test")
    else:
        texts = corpora.load_texts(corpus_dir(args), "test")
    texts = [text for _, text in texts]
    return token_streams.held_out_prompts(texts, tokenizer, count, PROMPT_TOKENS, seed=seed)


def tokenizer_of(target: hf.Loaded) -> Tokenizer:
    """The tokenizer; the training runs have checked that there is one."""
    assert target.tokenizer is not None
    return target.tokenizer


def bench(args: argparse.Namespace, trained: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The rows of results.json, from several processes with a few methods each."""
    file, tokenizer = args.workdir / "prompts.jsonl", tokenizer_of(hf.load(args.target))
    prompts = held_out(args, tokenizer, args.prompts, seed=1)
    lines = [json.dumps({"prompt": tokenizer.decode(ids)}) + "\n" for ids in prompts]
    file.write_text("".join(lines), encoding="utf-8")
    every, rows = list(methods(trained).items()), []
    keys = {
        "target": args.target,
        "prompts": file,
        "grid.temperatures": "(0.0,1.0)",
        "max_new_tokens": args.new,
        "trace_prompts": 0,
        "report": False,
    }
    env = os.environ | {"PYTHONPATH": str(CONFIGS.parent)}
    for start in range(0, len(every), METHODS_PER_BENCH):
        config = args.workdir / "configs" / "part.py"
        config.parent.mkdir(exist_ok=True)
        part = dict(every[start : start + METHODS_PER_BENCH])
        config.write_text(bench_config(part), encoding="utf-8")
        workdir = args.workdir / f"bench{start // METHODS_PER_BENCH}"
        run_config(config, workdir, keys, env)
        rows += json.loads((workdir / "results.json").read_text())["rows"]
    return rows


def bench_config(part: Mapping[str, Mapping[str, Any]]) -> str:
    """The source of a configuration that measures these methods."""
    return f"""from configs import bench, generate


def get_config():
    config = bench.get_config()
    for label, keys in {part!r}.items():
        config.grid.methods[label] = generate.drafter(keys["name"])
        config.grid.methods[label].accept = keys.pop("accept")
        config.grid.methods[label].update(keys)
    return config
"""


def metrics(workdir: Path) -> dict[str, Any]:
    """The last metrics of a training run, its held-out curve and its time."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    examined = [record for record in records if "heldout_loss" in record]
    seconds = json.loads((workdir / "summary.json").read_text())["seconds"]
    curve = [
        [record["step"], record["heldout_loss"], record.get("heldout_tau_t0")]
        for record in examined
    ]
    return {name: examined[-1].get(name) for name in KEPT} | {"curve": curve, "seconds": seconds}


def verify(
    args: argparse.Namespace, trained: Mapping[str, Path], count: int
) -> dict[str, dict[str, float]]:
    """For each drafter tau at temperature 1, forecast from the target's text and decoded."""
    target, result = hf.load(args.target), {}
    tokenizer = tokenizer_of(target)
    prompts = held_out(args, tokenizer, count, seed=2)
    for name, workdir in trained.items():
        config = TRAINED[name].config.partition(":")[0]
        if config in DRAFT_MODELS:
            drafter = drafters.make("draft_model", target.lm, model=workdir, gamma=4)
        else:
            # Draft networks draft trees by default.
            chain = {"tree": "chain:4"} if config == "redrafter" else {"gamma": 4}
            extra = chain if name in NETWORKS else {}
            drafter = drafters.make(
                config, target.lm, model=workdir, siblings="without_replacement", **extra
            )
        look = examine.examiner(
            target.lm,
            drafter,
            target.params,
            prompts,
            new_tokens=args.new,
            temperatures=(1.0,),
            eos_id=target.config.eos_token_id,
        )
        values = look(drafter.init_params(jax.random.key(0)))
        result[name] = {"foreseen": values["tau_t1"], "decoded": values["decoded_tau_t1"]}
        jax.clear_caches()
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per method, with tau, alpha by depth and speed-up at each temperature."""
    by_key = {(row["method"], row["temperature"]): row for row in rows}
    temperatures = sorted({row["temperature"] for row in rows})
    heads = [f"T={t:g}: tau, alpha by depth, speed-up" for t in temperatures]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---|" * len(temperatures)]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for t in temperatures:
            row = by_key[method, t]
            alpha = " ".join(f"{a:.2f}" for a in row["acceptance_by_depth"] or ())
            cells.append(f"{row['block_efficiency']:.2f}, {alpha}, {row['speedup']:.2f}x")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; ``workdir`` is created, ``names`` are the drafters to train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--name", required=True, help="the key of the results in results.json")
    add("--target", required=True, help="model directory or workdir of a trained run")
    add("--text", default="", help=".txt or .jsonl file; empty: the embedded corpus")
    add("--workdir", required=True, type=Path)
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=8)
    add("--rate", type=float, default=1e-3, help="learning rate of heads (AdamW)")
    add("--width", type=int, default=128, help="of the draft models, which have one layer")
    add("--length", type=int, default=128)
    add("--generated", type=int, default=4096, help="prompts that the target continues, twice each")
    add("--start", type=int, default=32, help="tokens of these prompts")
    add("--continued", type=int, default=96, help="tokens that the target writes after each")
    add("--rows", type=int, default=64, help="prompts that it continues at once")
    add("--examined", type=int, default=64, help="held-out prompts of the forecasts")
    add("--prompts", type=int, default=32, help="of the bench")
    add("--new", type=int, default=64)
    add("--verified", type=int, default=512, help="prompts to compare forecasts and decoding on")
    add("--only", default="", help="names, separated by semicolons")
    add("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args(argv)
    args.names = [name.strip() for name in args.only.split(";")] if args.only else list(TRAINED)
    if unknown := [name for name in args.names if name not in TRAINED]:
        raise SystemExit(f"unknown drafter {unknown[0]!r}; it must be one of {'; '.join(TRAINED)}")
    args.workdir.mkdir(parents=True, exist_ok=True)
    args.workdir = args.workdir.resolve()
    return args


def main(argv: list[str]) -> None:
    """Entry point."""
    args = parse(argv)
    trained = {name: train(name, args) for name in args.names}
    rows = bench(args, trained)
    verified = verify(args, trained, args.verified) if args.verified else {}
    result = json.loads(args.out.read_text()) if args.out.exists() else {"targets": {}}
    script = ["python", "experiments/trained_drafters/run.py"]
    result["targets"][args.name] = {
        "command": shlex.join([*script, *map(without_folder, argv)]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("specjax", "jax")},
        "training": {name: metrics(workdir) for name, workdir in trained.items()},
        "forecasts": verified,
        "rows": rows,
    }
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(table(rows))
    for name, tau in verified.items():
        forecast = f"forecast {tau['foreseen']:.3f}, decoded {tau['decoded']:.3f}"
        print(f"{name}: tau at temperature 1 {forecast}")


if __name__ == "__main__":
    main(sys.argv[1:])
