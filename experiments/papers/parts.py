"""What ``run`` and ``further`` share: alpha by definition, benches, theory beside their rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

import jax

from experiments.common import BENCH_TIMES
from experiments.papers.pairs import Pair
from specjax import theory
from specjax.bench.lossless import Texts
from specjax.bench.overlap import overlap
from specjax.run import measure
from specjax.types import Accept, Drafter

TIMES = BENCH_TIMES | {
    *("c", "verify", "improvement", "improvement_measured_verify"),
    *("plain_tokens_per_second", "seconds", "plain_seconds", "best_gamma", "best_improvement"),
}
GAMMA = 4  # Chen's K, and that of all parts but the one over gammas
PER_BENCH = 4  # methods; the memory maps of a process are few


def say(*words: object) -> None:
    """A line of progress."""
    print(*words, file=sys.stderr, flush=True)


def alphas(pair: Pair) -> list[dict[str, Any]]:
    """alpha by definition of every kind of draft at every temperature, and its parts."""
    rows = []
    for kind in pair.models:
        drafter = pair.drafter(kind, GAMMA)
        for temperature, texts in pair.texts.items():
            settings = {"temperature": temperature}
            given = Texts(pair.target.lm, pair.params(drafter), *texts, settings, drafter)
            decode = pair.target.text_tokenizer.decode
            found = overlap(given, categories=pair.kinds, decode=decode)
            assert found is not None
            kept = {key: found[key] for key in ("alpha", "tokens", "by_class", "by_category")}
            rows.append({"drafter": kind, "temperature": temperature, **kept})
    return rows


def bench(
    pair: Pair,
    methods: Mapping[str, tuple[Drafter, Accept]],
    args: argparse.Namespace,
    part: str,
    **keys: Any,
) -> list[dict[str, Any]]:
    """The rows of the methods; several benches with a few of them each."""
    rows, labels = [], list(methods)
    keys = {"max_new_tokens": args.new, "repeats": args.repeats} | keys
    for first in range(0, len(labels), PER_BENCH):
        some = labels[first : first + PER_BENCH]
        say(f"{pair.name}: {', '.join(some)}")
        found = measure(
            pair.target,
            {label: methods[label] for label in some},
            keys.get("prompts", pair.prompts),
            workdir=args.workdir / pair.name / "benches" / f"{part}{first}",
            show=False,
            report=False,
            trace_prompts=0,
            **{key: value for key, value in keys.items() if key != "prompts"},
        )
        rows += found["rows"]
        jax.clear_caches()
    return rows


def beside_theory(row: dict[str, Any], kind: str, alpha: float, pair: Pair) -> dict[str, Any]:
    """A row of a bench, and what theory predicts from alpha, the costs and the operations."""
    gamma, costs, work = row["gamma"], row["costs_ms"], pair.work_of(kind)
    c, verify = costs["draft"] / gamma / costs["step"], costs["verify"] / costs["step"]
    passed = row["lossless"]["passed"] if row["lossless"] else None
    kept = ("method", "category", "temperature", "acceptance_rate", "costs_ms", "speedup")
    return {
        "drafter": kind,
        "gamma": gamma,
        **{key: row[key] for key in (*kept, "speedup_interval", "tokens_per_second")},
        "plain_tokens_per_second": row["autoregressive_tokens_per_second"],
        "alpha": alpha,
        "tau": row["block_efficiency"],
        # Before a text is cut at its end, as the formula counts.
        "tokens_before_cut": row["accepted_per_round"] + 1,
        "expected_tokens": theory.expected_tokens(alpha, gamma),
        "c": c,
        "verify": verify,
        "improvement": theory.walltime_improvement(alpha, gamma, c),
        "improvement_measured_verify": theory.walltime_improvement(
            alpha, gamma, c, {gamma + 1: verify}
        ),
        "c_hat": work,
        "operations": theory.operations(alpha, gamma, work),
        "operations_measured": (gamma * work + gamma + 1) / (row["accepted_per_round"] + 1),
        "lossless": passed,
    }
