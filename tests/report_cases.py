"""Made-up results and traces, in the form in which a bench writes them, for tests of the report."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.report import html

STORY = (
    "Once upon a time there was a little girl named Lily. "
    "She liked to play in the big park with her dog, Max.\n"
    'One day they found a red ball under the old tree. "Look!" said Lily.\n\n'
    "def add(a, b):\n\treturn a + b  # <script>alert(1)</script>\n    \n"
    "The sun was warm, and the wind was soft; Max ran and ran until he was very tired. "
)
METHODS = (
    ("draft_model", "chain", "L1"),
    ("prompt_lookup", "deterministic", "L1"),
    ("medusa tree", "recursive", "L1"),
)
CLASSES = {
    "word": {"alpha": 0.78, "tokens": 3000},
    "space": {"alpha": 0.91, "tokens": 900},
    "punctuation": {"alpha": 0.88, "tokens": 700},
    "digit": {"alpha": 0.41, "tokens": 120},
}


def pieces_of(text: str) -> list[str]:
    """The text as a tokenizer splits it: words with their leading space, other characters alone."""
    pieces, piece = [], ""
    for c in text:
        if piece and not (c.isalpha() and (piece == " " or piece[-1].isalpha())):
            pieces.append(piece)
            piece = ""
        piece += c
    return [*pieces, piece]


def row(
    method: str = "draft_model", accept: str = "chain", lossless_class: str = "L1", **keys
) -> dict:
    """A finished row; ``keys`` replace its values."""
    rng = random.Random(repr((method, keys)))
    tau, plain = 1.5 + 2.5 * rng.random(), 400 + 100 * rng.random()
    speedup = tau * 0.62
    return {
        "method": method,
        "drafter": method.split()[0],
        "accept": accept,
        "class": lossless_class,
        "temperature": 0.0,
        "batch_size": 1,
        "prompts": 80,
        "prompt_set": "stories",
        "category": None,
        "gamma": 4,
        "nodes": 4,
        "parameters": {"target": 7_700_000, "draft": 1_200_000},
        "context": 34.2,
        "tokens": 5120,
        "rounds": int(5120 / tau),
        "block_efficiency": tau,
        "accepted_per_round": tau - 0.98,
        "repeated_4grams": 0.13,
        "acceptance_rate": 0.3 + tau / 8,
        "acceptance_by_depth": [0.82, 0.74, 0.7, 0.66],
        "tokens_per_second": plain * speedup,
        "autoregressive_tokens_per_second": plain,
        "speedup": speedup,
        "predicted_speedup": speedup * 1.08,
        "system_efficiency": 1 / 1.08,
        "spread": {
            "tokens_per_second": [plain * speedup * 0.97, plain * speedup * 1.02],
            "autoregressive_tokens_per_second": [plain * 0.98, plain * 1.01],
            "speedup": [speedup * 0.96, speedup * 1.03],
        },
        "costs_ms": {"step": 2.3, "draft": 1.1, "verify": 2.9},
        "time_split": {"draft": 0.24, "verify": 0.66, "accept": 0.07, "host": 0.03},
        "prefill_seconds": 0.12,
        "compile_seconds": 4.6,
        "overlap": {
            "alpha": 0.81,
            "by_depth": [0.84, 0.8, 0.77],
            "tokens": 5120,
            "by_class": CLASSES,
            "by_category": {"code": {"alpha": 0.9, "tokens": 2000}},
        },
        "lossless": {"check": "greedy-identity", "passed": True, "detail": "80/80 prompts"},
        "warm": False,
    } | keys


def write(path: Path, *report: Any, **options: Any) -> None:
    """A file with the page of ``html.render``."""
    path.write_text(html.render(*report, **options), encoding="utf-8")


def results(rows: list | None = None) -> dict:
    """The object of results.json.

    Without ``rows``: three methods, two temperatures, a lossy rule, a failed check, categories.
    """
    return {
        "schema": 1,
        "date": "2026-11-21",
        "command": "python -m specjax.run --config=configs/bench.py --config.target=DIR",
        "machine": {"cpu": "AMD EPYC (Zen 3)", "cores": 2},
        "versions": {"specjax": "0.1.0", "jax": "0.10.2", "backend": "cpu", "device": "cpu"},
        "rows": _rows() if rows is None else rows,
    }


def _rows() -> list[dict]:
    rows = [row(*method, temperature=t) for t in (0.0, 1.0) for method in METHODS]
    failed = {"check": "law", "passed": False, "detail": "5120 tokens, p = 2e-09"}
    rows[3] = row(*METHODS[0], temperature=1.0, lossless=failed)
    rows[4]["lossless"] = {
        "check": "law",
        "passed": None,
        "detail": "120 tokens are too few to tell, p = -",
    }
    rows.append(row("prompt_lookup", "typical", "L3", temperature=1.0, lossless=None, warm=True))
    categories = ("code", "stories <b>", "chat")
    return rows + [row(*METHODS[0], category=name, prompts=16) for name in categories]


def trace(
    rounds: int = 40,
    *,
    tree: bool = False,
    gamma: int = 5,
    text: str = STORY,
    seed: int = 0,
    **keys,
) -> dict:
    """A continuation that repeats ``text``; three of four draft tokens are right.

    ``keys`` replace the values of the trace.
    """
    rng, pieces = random.Random(seed), pieces_of(text)
    ids = {piece: n for n, piece in enumerate(sorted({*pieces}))}
    upcoming = itertools.cycle(pieces)
    return {
        "schema": 1,
        "method": "medusa tree" if tree else "draft_model",
        "drafter": "draft_model",
        "accept": "chain",
        "class": "L1",
        "temperature": 0.0,
        "category": "stories",
        "prompt": "Tell me a story about a girl and a dog.\n",
        "rounds": [_round(rng, pieces, ids, upcoming, gamma, tree) for _ in range(rounds)],
    } | keys


def _round(
    rng: random.Random,
    pieces: list[str],
    ids: dict[str, int],
    upcoming: Iterator[str],
    gamma: int,
    tree: bool,
) -> dict:
    """One round; ``upcoming`` gives the pieces of the continuation."""

    def probability() -> float:
        return round(rng.random(), 4)

    out, draft, parent = [], [], -1
    for depth in range(gamma):
        right = parent == len(draft) - 1 or tree
        right = right and len(out) == depth and rng.random() < 0.75
        guess = next(upcoming) if right else rng.choice(pieces)
        values = probability(), probability(), 0 if right else rng.randrange(1, 40)
        draft.append([guess, ids[guess], parent, *values, int(right)])
        if right:
            out.append([guess, ids[guess], 0, *values])
        new_parent = len(draft) - 1
        for _ in range(rng.randrange(3) if tree else 0):
            other = rng.choice(pieces)
            values = probability(), probability(), rng.randrange(1, 9)
            draft.append([other, ids[other], parent, *values, 0])
        parent = new_parent
    own, origin = next(upcoming), 2 if len(out) == gamma else 1
    out.append([own, ids[own], origin, probability(), None, 0])
    return {"out": out, "draft": draft}


def plain_trace(tokens: int = 30) -> dict:
    """A continuation without drafts and without probabilities."""
    rounds = [
        {"out": [[piece, 1, 3, None, None, None]], "draft": []}
        for piece in pieces_of(STORY)[:tokens]
    ]
    return trace(1, method="none", drafter="none") | {"rounds": rounds}


def notices_of(page: str) -> list[str]:
    """The notices at the top of an HTML report."""
    aside = re.search(r'<aside class="notices".*?</aside>', page, re.S)
    return re.findall(r"<p>(.*?)</p>", aside[0]) if aside else []
