"""The tables of this study in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.tables import by_temperature, number, source, table
from experiments.trained_drafters import chat_head

# Before the seed, or the learning rate, in the name of a study that repeats another.
SEED, RATE = ", seed ", ", rate "

COSTS = (
    "drafter",
    "thousand parameters",
    "time of a draft / of a plain step",
    "training, tokens/s",
    "learning rate",
    "million labels of all depths",
    "10^12 operations of training",
    "greedy tau of held-out text in training",
)


def tables(results: dict) -> str:
    """One table per target, tau by seed, and how far forecasts and decoding are apart."""
    texts = []
    for name, target in results["targets"].items():
        if SEED in name or RATE in name:
            continue
        text = f"**{name}**\n\n{source(target, results)}\n\n"
        rows = target["rows"]
        sizes = sorted({row["batch_size"] for row in rows})
        text += by_temperature(rows, sizes, depths=True) if rows else _held_out(target["training"])
        studies = [target, *_others(name + SEED, results).values()]
        text += f"\n\n{_training_times(target['training'])}{_training_costs(studies)}"
        text += _by_seed(studies) if len(studies) > 1 else ""
        text += _by_rate(_others(name + RATE, results))
        apart = [abs(f["foreseen"] / f["decoded"] - 1) for f in target["forecasts"].values()]
        if apart:
            text += (
                f"\n\ntau at temperature 1, forecast from the target's text and decoded: at most "
                f"{max(apart):.1%} apart for {len(apart)} drafters."
            )
        texts.append(text)
    heads = Path(__file__).with_name("chat_head.json")
    texts.append(chat_head.tables(json.loads(heads.read_text(encoding="utf-8"))))
    return "\n\n".join(texts)


def _others(name: str, results: dict) -> dict[str, dict]:
    """The studies whose names begin so, by the rest of their names."""
    targets = results["targets"].items()
    return {label.removeprefix(name): own for label, own in targets if label.startswith(name)}


def _by_rate(studies: dict[str, dict]) -> str:
    """tau at temperatures 0 and 1 of the drafters that were trained with several learning rates."""
    names = dict.fromkeys(name for study in studies.values() for name in study["training"])
    lines = []
    for name in names:
        every = [study["training"].get(name) for study in studies.values()]
        taus = [own and (own["heldout_tau_t0"], own["heldout_tau_t1"]) for own in every]
        lines.append([name, *["{:.2f}, {:.2f}".format(*pair) if pair else "" for pair in taus]])
    heads = [f"rate {rate}: held-out tau, T=0 and 1" for rate in studies]
    return f"\n\nLearning rates, one seed:\n\n{table(['drafter', *heads], lines)}" if lines else ""


def _by_seed(studies: list[dict]) -> str:
    """tau of the drafters that were trained with several seeds, on held-out text in training."""
    lines = []
    for name in studies[-1]["training"]:
        line = [name]
        for t in (0, 1):
            taus = [study["training"][name][f"heldout_tau_t{t}"] for study in studies]
            each = ", ".join(f"{tau:.2f}" for tau in taus)
            line.append(f"{sum(taus) / len(taus):.2f} ({each})")
        lines.append(line)
    heads = [f"T={t}: mean of held-out tau (of each)" for t in (0, 1)]
    return f"\n\nSeveral seeds, the same text:\n\n{table(['drafter', *heads], lines)}"


def _held_out(training: dict) -> str:
    """tau and alpha by depth of the chains on the training's own held-out prompts."""
    lines = []
    for name, own in training.items():
        line = [name]
        for t in (0, 1):
            alphas = own[f"heldout_alpha_t{t}"]
            line.append(number(own[f"heldout_tau_t{t}"], ".2f"))
            line.append(" ".join(number(alpha, ".2f") for alpha in alphas))
        lines.append([*line, number(own.get("tokens_per_second"), ",.0f")])
    heads = [head for t in (0, 1) for head in (f"T={t}: tau, held out", "alpha by depth")]
    return table(["drafter", *heads, "training, tokens/s"], lines)


def _training_times(training: dict) -> str:
    """The steps of each training run, and its wall time if it was not paused."""
    parts = {
        name: f"{t['curve'][-1][0]}" + (f" in {t['seconds']:.0f} s" if t.get("seconds") else "")
        for name, t in training.items()
    }
    if len(every := {*parts.values()}) > 1:
        every = [f"{name}: {part}" for name, part in parts.items()]
    text = f"Steps of training: {'; '.join(every)}."
    waits = [share for t in training.values() if (share := t.get("data_share")) is not None]
    if waits:
        text += f" Waiting for data: {min(waits):.1%} to {max(waits):.1%} of the time of a run."
    return text


def _training_costs(studies: list[dict]) -> str:
    """What each drafter costs and has learned from, for studies that recorded it."""
    target, lines = studies[0], []
    for name, training in target["training"].items():
        rows = [row for row in target["rows"] if row["method"] == name and not row["temperature"]]
        every = [study["training"].get(name, {}) for study in studies]
        # Those of another seed, where a run did not record them.
        rate, labels, flops = (
            next((own[key] for own in every if own.get(key)), None)
            for key in ("learning_rate", "labels", "flops")
        )
        if "tokens_per_second" not in training or not (rows or labels):
            continue
        own = rows[0] if rows else {}
        times = own.get("costs_ms") or {}
        cost = times["draft"] / times["step"] if {"draft", "step"} <= times.keys() else None
        curve = [number(tau, ".2f") for _, _, tau in training["curve"]] if labels else []
        size = own["parameters"]["draft"] / 1000 if own else None
        lines.append(
            (
                name,
                number(size, ",.0f"),
                number(cost, ".2f"),
                number(training["tokens_per_second"], ",.0f"),
                number(rate, "g"),
                number(labels and labels / 1e6, ".2f"),
                number(flops and flops / 1e12, ".1f"),
                ", ".join(curve),
            )
        )
    return f"\n\n{table(COSTS, lines)}" if lines else ""
