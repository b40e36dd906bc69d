"""Results and traces as a bench leaves them, made up: what the tests of the report show."""

from __future__ import annotations

import random

STORY = (
    "Once upon a time there was a little girl named Lily. She liked to play in the big park with her dog, Max.\n"
    "One day they found a red ball under the old tree. \"Look!\" said Lily.\n\n"
    "def add(a, b):\n\treturn a + b  # <script>alert(1)</script>\n    \n"
    "The sun was warm, and the wind was soft; Max ran and ran until he was very tired. "
)  # fmt: skip
METHODS = (
    ("draft_model", "chain", "L1"),
    ("prompt_lookup", "deterministic", "L1"),
    ("medusa tree", "recursive", "L1"),
)


def words(text: str) -> list[str]:
    """Pieces as a tokenizer makes them: words with their leading space, marks and white space by themselves."""
    found, piece = [], ""
    for c in text:
        if piece and not (c.isalpha() and (piece == " " or piece[-1].isalpha())):
            found.append(piece)
            piece = ""
        piece += c
    return [*found, piece]


def row(method: str = "draft_model", accept: str = "chain", law: str = "L1", **keys) -> dict:
    """A finished row."""
    rng = random.Random(repr((method, keys)))
    tau, plain = 1.5 + 2.5 * rng.random(), 400 + 100 * rng.random()
    speed = tau * 0.62
    made = {
        "method": method, "drafter": method.split()[0], "accept": accept, "class": law, "temperature": 0.0, "batch_size": 1,
        "prompts": 80, "prompt_set": "stories", "category": None, "gamma": 4, "nodes": 4,
        "parameters": {"target": 7_700_000, "draft": 1_200_000}, "context": 34.2, "tokens": 5120, "rounds": int(5120 / tau),
        "block_efficiency": tau, "accepted_per_round": tau - 0.98, "acceptance_rate": 0.3 + tau / 8,
        "acceptance_by_depth": [0.82, 0.74, 0.7, 0.66], "tokens_per_second": plain * speed,
        "autoregressive_tokens_per_second": plain, "speedup": speed, "predicted_speedup": speed * 1.08,
        "system_efficiency": 1 / 1.08,
        "spread": {"tokens_per_second": [plain * speed * 0.97, plain * speed * 1.02],
                   "autoregressive_tokens_per_second": [plain * 0.98, plain * 1.01], "speedup": [speed * 0.96, speed * 1.03]},
        "costs_ms": {"step": 2.3, "draft": 1.1, "verify": 2.9},
        "time_split": {"draft": 0.24, "verify": 0.66, "accept": 0.07, "host": 0.03},
        "prefill_seconds": 0.12, "compile_seconds": 4.6,
        "overlap": {"alpha": 0.81, "by_depth": [0.84, 0.8, 0.77], "tokens": 5120,
                    "by_class": {"word": {"alpha": 0.78, "tokens": 3000}, "space": {"alpha": 0.91, "tokens": 900},
                                 "punctuation": {"alpha": 0.88, "tokens": 700}, "digit": {"alpha": 0.41, "tokens": 120}},
                    "by_category": {"code": {"alpha": 0.9, "tokens": 2000}}},
        "lossless": {"check": "greedy-identity", "passed": True, "detail": "80/80 prompts"}, "warm": False,
    }  # fmt: skip
    return made | keys


def results(rows: list | None = None) -> dict:
    """The object of results.json: three methods, two temperatures, one lossy rule, one failed check, one category."""
    if rows is None:
        rows = [row(*method, temperature=t) for t in (0.0, 1.0) for method in METHODS]
        rows[3] = row(
            *METHODS[0],
            temperature=1.0,
            lossless={"check": "law", "passed": False, "detail": "5120 tokens, p = 2e-09"},
        )
        rows[4]["lossless"] = {
            "check": "law",
            "passed": None,
            "detail": "120 tokens are too few to tell, p = -",
        }
        rows.append(
            row("prompt_lookup", "typical", "L3", temperature=1.0, lossless=None, warm=True)
        )
        rows += [
            row(*METHODS[0], category=name, prompts=16) for name in ("code", "stories <b>", "chat")
        ]
    return {
        "schema": 1, "date": "2026-11-21", "command": "python -m specjax.run --config=configs/bench.py --config.target=DIR",
        "machine": {"cpu": "AMD EPYC (Zen 3)", "cores": 2},
        "versions": {"specjax": "0.1.0", "jax": "0.10.2", "backend": "cpu", "device": "cpu"}, "rows": rows,
    }  # fmt: skip


def trace(
    rounds: int = 40,
    *,
    tree: bool = False,
    gamma: int = 5,
    text: str = STORY,
    seed: int = 0,
    **keys,
) -> dict:
    """A continuation that repeats ``text``, of rounds with drafts that are right three times in four."""
    rng, pieces, at, made = random.Random(seed), words(text), 0, []
    ids = {piece: n for n, piece in enumerate(sorted({*pieces}))}
    chance = lambda: round(rng.random(), 4)  # noqa: E731

    def piece() -> str:
        nonlocal at
        at += 1
        return pieces[(at - 1) % len(pieces)]

    for _ in range(rounds):
        out, draft, parent = [], [], -1
        for depth in range(gamma):
            right = parent == len(draft) - 1 or tree
            right = right and len(out) == depth and rng.random() < 0.75
            guess = piece() if right else rng.choice(pieces)
            draft.append(
                [
                    guess,
                    ids[guess],
                    parent,
                    chance(),
                    chance(),
                    0 if right else rng.randrange(1, 40),
                    int(right),
                ]
            )
            if right:
                out.append([guess, ids[guess], 0, *draft[-1][3:6]])
            grown = len(draft) - 1
            if tree:
                for _ in range(rng.randrange(3)):
                    other = rng.choice(pieces)
                    draft.append(
                        [other, ids[other], parent, chance(), chance(), rng.randrange(1, 9), 0]
                    )
            parent = grown
        own = piece()
        out.append([own, ids[own], 2 if len(out) == gamma else 1, chance(), None, 0])
        made.append({"out": out, "draft": draft})
    return {
        "schema": 1, "method": "medusa tree" if tree else "draft_model", "drafter": "draft_model", "accept": "chain",
        "class": "L1", "temperature": 0.0, "category": "stories", "prompt": "Tell me a story about a girl and a dog.\n",
        "rounds": made,
    } | keys  # fmt: skip


def plain(tokens: int = 30) -> dict:
    """A continuation without drafts and without probabilities."""
    rounds = [
        {"out": [[piece, 1, 3, None, None, None]], "draft": []} for piece in words(STORY)[:tokens]
    ]
    return trace(1, method="none", drafter="none") | {"rounds": rounds}
