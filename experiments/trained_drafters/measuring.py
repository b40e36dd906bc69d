"""Decodes held-out prompts with the drafters of experiments/trained_drafters."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

from experiments.trained_drafters.trained import methods
from experiments.trained_drafters.training import CONFIGS, corpus_dir, run_config
from specjax import drafters
from specjax.data import corpora, text_files, token_streams
from specjax.models import hf
from specjax.train import examine

METHODS_PER_BENCH = 6  # each compiles a dozen programs, and the memory maps of a process are few
PROMPT_TOKENS = 32
LEFT_OUT = {"spread", "overlap", "standard_errors", "time_split"}  # large, and no table reads them


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


def prompt_file(args: argparse.Namespace) -> Path:
    """A file with held-out prompts."""
    file, tokenizer = args.workdir / "prompts.jsonl", tokenizer_of(hf.load(args.target))
    prompts = held_out(args, tokenizer, args.prompts, seed=1)
    lines = [json.dumps({"prompt": tokenizer.decode(ids)}) + "\n" for ids in prompts]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def bench(args: argparse.Namespace, trained: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The rows of results.json, from several processes with a few methods each."""
    chosen, rows = methods(trained), []
    every = [(label, chosen[label]) for label in args.methods or chosen]
    keys = {
        "target": args.target,
        "prompts": args.bench or prompt_file(args),
        "repeats": args.repeats,
        "grid.temperatures": "(0.0,1.0)",
        "grid.batch_sizes": f"({args.bench_rows},)",
        "max_new_tokens": args.new,
        "trace_prompts": 0,
        "report": False,
    }
    if args.bench:
        keys["chat"] = "own"
    env = os.environ | {"PYTHONPATH": str(CONFIGS.parent)}
    for start in range(0, len(every), METHODS_PER_BENCH):
        config = args.workdir / "configs" / "part.py"
        config.parent.mkdir(exist_ok=True)
        part = dict(every[start : start + METHODS_PER_BENCH])
        config.write_text(bench_config(part), encoding="utf-8")
        workdir = args.workdir / f"bench{start // METHODS_PER_BENCH}"
        run_config(config, workdir, keys, env)
        found = json.loads((workdir / "results.json").read_text())["rows"]
        rows += [{key: row[key] for key in row if key not in LEFT_OUT} for row in found]
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


def verify(
    args: argparse.Namespace, trained: Mapping[str, Path], count: int
) -> dict[str, dict[str, float]]:
    """For each drafter tau at temperature 1, forecast from the target's text and decoded."""
    target, result = hf.load(args.target), {}
    tokenizer = tokenizer_of(target)
    prompts = held_out(args, tokenizer, count, seed=2)
    chosen = methods(trained)
    for name in trained:
        keys = dict(chosen.get(f"{name}, sampled", chosen[name]))
        del keys["accept"]
        drafter = drafters.make(keys.pop("name"), target.lm, **keys)
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
