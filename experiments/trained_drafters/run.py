"""Trained drafters on one target: draft models, pretrained and distilled in every way, and every kind of heads.

    PYTHONPATH=. python experiments/trained_drafters/run.py --name=stories260K --target=DIR --text=stories.txt \\
        --workdir=runs/trained/stories260K

Trains each drafter of ``TRAINED`` (configs/<its config>.py with other keys), then decodes held-out prompts (the test split of
the text) plainly and with each of them, greedy and at temperature 1, interleaved in one process (configs/bench.py). A run that
was killed goes on where it was. ``results.json`` beside this file gets tau, alpha by depth and speed-up, the held-out curves,
and what was foreseen: in training, and afterwards on --verified prompts, beside what decoding them took. Without --text the
corpus is the embedded one, Python code. --steps and --prompts make it shorter; --only="A;B" trains and measures some.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from experiments.vs_transformers.run import machine
from specjax import drafters
from specjax.data import corpora, text_files, token_streams
from specjax.models import hf
from specjax.train import examine

CONFIGS = Path(__file__).parents[2] / "configs"
OWN = {"data.generated": "{generated}"}
DRAFT: dict[str, Any] = {}
HEADS = {"drafter.heads": 4}
# Name -> configuration, and the keys that differ; names in braces stand for workdirs of other runs.
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "pretrained": ("pretrain", DRAFT),
    "forward_kl, fixed": ("distill", DRAFT),
    "forward_kl, target": ("distill", DRAFT | OWN),
    "forward_kl, draft": ("distill", DRAFT | {"data.on_policy": 1.0}),
    "forward_kl, mixed": ("distill", DRAFT | OWN | {"data.on_policy": 0.5}),
    "reverse_kl, fixed": ("distill", DRAFT | {"loss.divergence": "reverse_kl"}),
    "reverse_kl, target": ("distill", DRAFT | OWN | {"loss.divergence": "reverse_kl"}),
    "reverse_kl, draft": (
        "distill",
        DRAFT | {"loss.divergence": "reverse_kl", "data.on_policy": 1.0},
    ),
    "reverse_kl, mixed": (
        "distill",
        DRAFT | OWN | {"loss.divergence": "reverse_kl", "data.on_policy": 0.5},
    ),
    "jensen_shannon, fixed": ("distill", DRAFT | {"loss.divergence": "jensen_shannon"}),
    "jensen_shannon, target": ("distill", DRAFT | OWN | {"loss.divergence": "jensen_shannon"}),
    "jensen_shannon, draft": (
        "distill",
        DRAFT | {"loss.divergence": "jensen_shannon", "data.on_policy": 1.0},
    ),
    "jensen_shannon, mixed": (
        "distill",
        DRAFT | OWN | {"loss.divergence": "jensen_shannon", "data.on_policy": 0.5},
    ),
    "total_variation, fixed": ("distill", DRAFT | {"loss.divergence": "total_variation"}),
    "total_variation, target": ("distill", DRAFT | OWN | {"loss.divergence": "total_variation"}),
    "total_variation, draft": (
        "distill",
        DRAFT | {"loss.divergence": "total_variation", "data.on_policy": 1.0},
    ),
    "total_variation, mixed": (
        "distill",
        DRAFT | OWN | {"loss.divergence": "total_variation", "data.on_policy": 0.5},
    ),
    "bpd": ("bpd", HEADS | OWN),
    "medusa": ("medusa", HEADS | OWN),
    "medusa, fixed": ("medusa", HEADS),
    "hydra": ("hydra", HEADS | OWN),
    "mlp_speculator, phase 1": ("mlp_speculator", HEADS),
    "mlp_speculator": (
        "mlp_speculator",
        HEADS
        | OWN
        | {"init": "{mlp_speculator, phase 1}", "optimiser.learning_rate": "{rate / 10}"},
    ),
}
KEPT = (
    "heldout_loss",
    "heldout_tau_t0",
    "heldout_decoded_tau_t0",
    "heldout_tau_t1",
    "heldout_decoded_tau_t1",
)


def specjax(config: str, workdir: Path, keys: dict[str, Any]) -> None:
    """One command, as anybody would give it."""
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    command = [
        sys.executable,
        "-m",
        "specjax.run",
        f"--config={CONFIGS / config}.py",
        f"--workdir={workdir}",
        *flags,
    ]
    print(f"\n{workdir.name}", file=sys.stderr, flush=True)
    if status := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(status)


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs are given."""
    if args.text:
        return {"target": args.target, "data.files": args.text}
    built = (
        Path(args.target) / "data",
        Path(args.target).parent / "data",
    )  # by the target's own run
    return {
        "target": args.target,
        "data.dir": next((each for each in built if each.is_dir()), args.workdir / "data"),
    }


def train(name: str, args: argparse.Namespace) -> Path:
    """Trains one drafter, and what it begins with; gives its workdir."""
    config, keys = TRAINED[name]
    keys = dict(keys)
    if str(keys.get("init", "")).startswith("{"):
        keys["init"] = train(keys["init"][1:-1], args)
    if config not in ("pretrain", "distill"):
        keys["optimiser.learning_rate"] = (
            args.rate / 10 if "optimiser.learning_rate" in keys else args.rate
        )
    common = shared(args)
    if keys.get("data.generated"):
        keys["data.generated"] = args.workdir / "generated"
        common = {"target": args.target}
    if config in ("pretrain", "distill"):
        width = args.width
        common |= {
            "model.hidden_size": width,
            "model.intermediate_size": 3 * width,
            "model.num_layers": 1,
        }
        common |= {
            "model.num_heads": max(width // 64, 2),
            "model.num_kv_heads": 2,
            "model.vocab_size": 0,
        }
    keys = (
        common
        | keys
        | {"target": args.target, "train.steps": args.steps, "train.batch_size": args.batch}
    )
    keys |= {"train.eval_every": max(args.steps // 10, 1), "examine.prompts": args.examined}
    keys |= {"train.checkpoint_every": max(args.steps // 4, 1), "train.length": args.length}
    workdir = args.workdir / name.replace(", ", "-").replace(" ", "_")
    specjax(config, workdir, keys)
    return workdir


def prompts(args: argparse.Namespace, path: Path) -> None:
    """Held-out beginnings, of text that no run has seen."""
    tokenizer = hf.load(args.target).tokenizer
    assert tokenizer is not None
    texts = (
        text_files.load_files(args.text, "test")
        if args.text
        else corpora.load_texts(shared(args)["data.dir"], "test")
    )
    ids = token_streams.held_out_prompts(
        [text for _, text in texts], tokenizer, args.prompts, 32, seed=1
    )
    path.write_text(
        "".join(json.dumps({"prompt": tokenizer.decode(i)}) + "\n" for i in ids), encoding="utf-8"
    )


def methods(trained: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Label -> drafter keys of the bench."""
    found: dict[str, dict[str, Any]] = {}
    for name, workdir in trained.items():
        config = TRAINED[name][0]
        keys = {"model": str(workdir), "accept": "chain"}
        if config in ("pretrain", "distill"):
            found[name] = {"name": "draft_model", "gamma": 4, **keys}
        else:
            found[name] = {"name": config, **keys}
            found[f"{name}, sampled"] = {"name": config, "siblings": "without_replacement", **keys}
            if config in ("medusa", "hydra"):
                found[f"{name}, tree"] = {
                    "name": config,
                    "nodes": 12,
                    **keys,
                    "accept": "deterministic",
                }
    return {"prompt_lookup": {"name": "prompt_lookup", "gamma": 4, "accept": "chain"}, **found}


def bench(args: argparse.Namespace, trained: dict[str, Path]) -> list[dict[str, Any]]:
    """Rows of results.json; a few methods a process, for each compiles a dozen programs."""
    file = args.workdir / "prompts.jsonl"
    prompts(args, file)
    every, rows = list(methods(trained).items()), []
    for start in range(0, len(every), 6):
        part = dict(every[start : start + 6])
        config = args.workdir / "configs" / "part.py"
        config.parent.mkdir(exist_ok=True)
        config.write_text(
            "from configs import bench, generate\n\n\ndef get_config():\n    config = bench.get_config()\n"
            f"    for label, keys in {part!r}.items():\n"
            "        config.grid.methods[label] = generate.drafter(keys['name'])\n"
            "        config.grid.methods[label].accept = keys.pop('accept')\n"
            "        config.grid.methods[label].update(keys)\n    return config\n",
            encoding="utf-8",
        )
        workdir = args.workdir / f"bench{start // 6}"
        keys = {
            "target": args.target,
            "prompts": file,
            "grid.temperatures": "(0.0,1.0)",
            "max_new_tokens": args.new,
        }
        keys |= {"trace_prompts": 0, "report": False}
        flags = [f"--config.{key}={value}" for key, value in keys.items()]
        command = [
            sys.executable,
            "-m",
            "specjax.run",
            f"--config={config}",
            f"--workdir={workdir}",
            *flags,
        ]
        environment = os.environ | {"PYTHONPATH": str(CONFIGS.parent)}
        if status := subprocess.run(command, stdout=subprocess.DEVNULL, env=environment).returncode:
            raise SystemExit(status)
        rows += json.loads((workdir / "results.json").read_text())["rows"]
    return rows


def training(workdir: Path) -> dict[str, Any]:
    """What a run's metrics say: the last values, and the held-out curve."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    looked = [record for record in records if "heldout_loss" in record]
    seconds = json.loads((workdir / "summary.json").read_text())["seconds"]
    curve = [
        [record["step"], record["heldout_loss"], record.get("heldout_tau_t0")] for record in looked
    ]
    return {name: looked[-1].get(name) for name in KEPT} | {"curve": curve, "seconds": seconds}


def verify(
    args: argparse.Namespace, trained: dict[str, Path], prompts: int
) -> dict[str, dict[str, float]]:
    """For each drafter tau at temperature 1 on many held-out prompts, foreseen from the target's text and decoded."""
    target, found = hf.load(args.target), {}
    assert target.tokenizer is not None
    texts = (
        text_files.load_files(args.text, "test")
        if args.text
        else corpora.load_texts(shared(args)["data.dir"], "test")
    )
    ids = token_streams.held_out_prompts(
        [text for _, text in texts], target.tokenizer, prompts, 32, seed=2
    )
    ids = [target.tokenizer.encode("").ids + each for each in ids]
    for name, workdir in trained.items():
        keys = (
            {"gamma": 4}
            if TRAINED[name][0] in ("pretrain", "distill")
            else {"siblings": "without_replacement"}
        )
        kind = "draft_model" if "gamma" in keys else TRAINED[name][0]
        drafter = drafters.make(kind, target.lm, model=workdir, **keys)
        look = examine.examiner(
            target.lm,
            drafter,
            target.params,
            ids,
            new_tokens=args.new,
            temperatures=(1.0,),
            eos_id=target.config.eos_token_id,
        )
        seen = look(drafter.init_params(jax.random.key(0)))
        found[name] = {"foreseen": seen["tau_t1"], "decoded": seen["decoded_tau_t1"]}
        jax.clear_caches()
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per method, for each temperature tau, alpha by depth and speed-up."""
    found = {(row["method"], row["temperature"]): row for row in rows}
    heat = sorted({row["temperature"] for row in rows})
    lines = [
        "| method | " + " | ".join(f"T={t:g}: tau, alpha by depth, speed-up" for t in heat) + " |"
    ]
    lines.append("|---|" + "---|" * len(heat))
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for t in heat:
            row = found[method, t]
            alpha = " ".join(f"{a:.2f}" for a in row["acceptance_by_depth"] or ())
            cells.append(f"{row['block_efficiency']:.2f}, {alpha}, {row['speedup']:.2f}x")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="under which the results are kept")
    parser.add_argument("--target", required=True, help="model directory or trained run")
    parser.add_argument(
        "--text", default="", help=".txt or .jsonl file; empty: the embedded corpus"
    )
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of heads (AdamW)")
    parser.add_argument(
        "--width", type=int, default=128, help="of the draft models, which have one layer"
    )
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument(
        "--generated", type=int, default=4096, help="prompts that the target continues, twice each"
    )
    parser.add_argument(
        "--examined", type=int, default=64, help="held-out prompts of the forecasts"
    )
    parser.add_argument("--prompts", type=int, default=32, help="of the bench")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument(
        "--verified",
        type=int,
        default=512,
        help="prompts on which forecasts are compared with decoding",
    )
    parser.add_argument("--only", default="", help="names, separated by semicolons")
    parser.add_argument("--out", default=str(Path(__file__).with_name("results.json")))
    args = parser.parse_args(argv)
    args.workdir.mkdir(parents=True, exist_ok=True)
    args.workdir = args.workdir.resolve()
    names = [name.strip() for name in args.only.split(";")] if args.only else list(TRAINED)
    if unknown := [name for name in names if name not in TRAINED]:
        raise SystemExit(f"unknown drafter {unknown[0]!r}; there is {'; '.join(TRAINED)}")
    if any("data.generated" in TRAINED[name][1] for name in names):
        keys = {"generation.num_prompts": args.generated, "generation.batch_size": 64}
        specjax("self_generate", args.workdir / "generated", shared(args) | keys)
    trained = {name: train(name, args) for name in names}
    rows = bench(args, trained)
    verified = verify(args, trained, args.verified) if args.verified else {}
    out = Path(args.out)
    result = json.loads(out.read_text()) if out.exists() else {"targets": {}}
    told = [
        f"{key}={Path(value).name}" if value else key
        for key, _, value in (arg.partition("=") for arg in argv)
    ]
    result["targets"][args.name] = {
        "command": shlex.join(["python", "experiments/trained_drafters/run.py", *told]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {name: version(name) for name in ("specjax", "jax")},
        "training": {name: training(workdir) for name, workdir in trained.items()},
        "forecasts": verified,
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    for name, tau in verified.items():
        print(
            f"{name}: tau at temperature 1 foreseen {tau['foreseen']:.3f}, decoded {tau['decoded']:.3f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
