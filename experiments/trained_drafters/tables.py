"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import by_temperature, number, source, table

SEED = ", seed "  # before the seed in the name of a study that repeats another

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
        if SEED in name:
            continue
        text = f"**{name}**\n\n{source(target, results)}\n\n"
        rows = target["rows"]
        text += by_temperature(rows, (1,), depths=True) if rows else _held_out(target["training"])
        text += f"\n\n{_training_times(target['training'])}{_training_costs(target)}"
        text += _by_seed(name, results["targets"])
        apart = [abs(f["foreseen"] / f["decoded"] - 1) for f in target["forecasts"].values()]
        if apart:
            text += (
                f"\n\ntau at temperature 1, forecast from the target's text and decoded: at most "
                f"{max(apart):.1%} apart for {len(apart)} drafters."
            )
        texts.append(text)
    return "\n\n".join(texts)


def _by_seed(name: str, targets: dict) -> str:
    """tau of the drafters that were trained with several seeds."""
    studies = [own for other, own in targets.items() if other.startswith(name + SEED)]
    if not studies:
        return ""
    taus = [_taus(study["rows"]) for study in (targets[name], *studies)]
    temperatures = sorted({temperature for _, temperature in taus[1]})
    lines = []
    for method in dict.fromkeys(method for method, _ in taus[1]):
        line = [method]
        for temperature in temperatures:
            found = [own[method, temperature] for own in taus if (method, temperature) in own]
            mean = sum(found) / len(found)
            line.append(f"{mean:.2f} ({', '.join(f'{tau:.2f}' for tau in found)})")
        lines.append(line)
    heads = [f"T={temperature:g}: mean tau (of each)" for temperature in temperatures]
    return f"\n\nSeveral seeds, the same text:\n\n{table(['method', *heads], lines)}"


def _taus(rows: list[dict]) -> dict[tuple[str, float], float]:
    """(Method, temperature) -> tau over all prompts."""
    return {
        (row["method"], row["temperature"]): row["block_efficiency"]
        for row in rows
        if row["category"] is None
    }


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


def _training_costs(target: dict) -> str:
    """What each drafter costs and has learned from, for studies that recorded it."""
    lines = []
    for name, training in target["training"].items():
        own = [row for row in target["rows"] if row["method"] == name and not row["temperature"]]
        if "tokens_per_second" in training and own:
            times = own[0].get("costs_ms") or {}
            cost = times["draft"] / times["step"] if {"draft", "step"} <= times.keys() else None
            seen = {key: training.get(key) for key in ("learning_rate", "labels", "flops")}
            curve = (
                [number(tau, ".2f") for _, _, tau in training["curve"]] if seen["labels"] else []
            )
            lines.append(
                (
                    name,
                    f"{own[0]['parameters']['draft'] / 1000:,.0f}",
                    number(cost, ".2f"),
                    number(training["tokens_per_second"], ",.0f"),
                    number(seen["learning_rate"], "g"),
                    number(seen["labels"] and seen["labels"] / 1e6, ".2f"),
                    number(seen["flops"] and seen["flops"] / 1e12, ".1f"),
                    ", ".join(curve),
                )
            )
    return f"\n\n{table(COSTS, lines)}" if lines else ""
