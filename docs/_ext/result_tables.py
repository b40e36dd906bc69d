"""Tables of the studies, made from ``experiments/*/results.json``. No number is typed.

A time that is null was not measured on a quiet machine: its cell is empty, and a column without any
cell is left out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def parts() -> dict[str, str]:
    """Study -> its MyST text: where the numbers come from, and its tables."""
    return {path.parent.name: study(path) for path in sorted(EXPERIMENTS.glob("*/results.json"))}


def study(path: Path) -> str:
    """The text of one study. Raises KeyError for a study without a table here."""
    results = json.loads(path.read_text(encoding="utf-8"))
    return TABLES[path.parent.name](results)


def source(*layers: dict) -> str:
    """Command, machine, versions, date and load: of the first layer that has them."""

    def first(key: str) -> Any:
        return next((layer[key] for layer in layers if layer.get(key)), None)

    machine, versions = first("machine") or {}, first("versions") or {}
    named = [
        f"{name} {versions[name]}" for name in ("jax", "torch", "transformers") if name in versions
    ]
    lines = [
        f"- Command: `PYTHONPATH=. {first('command')}`",
        f"- Machine: {machine.get('cpu')}, {machine.get('cores')} cores; {', '.join(named)}",
        f"- Date: {str(first('date'))[:10]}",
    ]
    others = next((x["others_cpu"] for x in layers if x.get("others_cpu") is not None), None)
    share = "not recorded" if others is None else f"{max(0.0, others):.3f}"
    lines.append(f"- Share of the machine that other processes used: {share}")
    if times := first("times"):
        lines.append(f"- Times: {times}")
    return "\n".join(lines)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A MyST table, without columns that are empty."""
    cells = [list(map(str, row)) for row in rows]
    kept = [n for n in range(len(heads)) if any(row[n] for row in cells)]
    lines = [list(heads), ["---"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(line[n] for n in kept) + " |" for line in lines)


def number(value: float | None, spec: str, unit: str = "") -> str:
    return "" if value is None else format(value, spec) + unit


def system_efficiency(results: dict) -> str:
    """Speed-up, prediction and their ratio for each rate and length."""
    rows = sorted(results["rows"], key=lambda row: (row["gamma"], row["acceptance_rate"]))
    lines = [
        (
            row["method"],
            number(row["block_efficiency"], ".2f"),
            number(row["speedup"], ".2f", "x"),
            number(row["predicted_speedup"], ".2f", "x"),
            number(row["system_efficiency"], ".3f"),
        )
        for row in rows
    ]
    heads = ("setting", "tau", "speed-up", "predicted", "system efficiency")
    return f"{source(results)}\n\n{table(heads, lines)}"


def vs_transformers(results: dict) -> str:
    """Both sides, row by row."""
    lines = [
        (
            row["pair"],
            row["method"],
            number(row["temperature"], "g"),
            number(row["specjax"]["tokens_per_second"], ",.0f"),
            number(row["transformers"]["tokens_per_second"], ",.0f"),
            number(row["ratio"], ".2f", "x"),
            f"{row['specjax']['block_efficiency']:.2f}",
            f"{row['transformers']['block_efficiency']:.2f}",
            row["identical"] or "",
        )
        for row in results["rows"]
    ]
    models = "\n".join(f"- `{name}`: {what}" for name, what in results["models"].items())
    heads = (
        "models",
        "method",
        "T",
        "specjax tokens/s",
        "transformers tokens/s",
        "ratio",
        "tau",
        "its tau",
        "same texts",
    )
    return f"{source(results)}\n{models}\n- Precision: {results['dtype']}\n\n{table(heads, lines)}"


def tree_cost(results: dict) -> str:
    """The parts of a round, in ms and as shares of the forward."""
    lines = [
        (
            row["name"].replace("_", " "),
            number(row["ms"], ".2f"),
            number(row["of_tree_forward"], ".1%"),
            number(row["of_one_token_forward"], ".1%"),
        )
        for row in results["rows"]
    ]
    tree = results["tree"]
    where = f"- Model: {results['model']}\n- Tree: {tree['spec']}, {tree['nodes']} nodes; context "
    heads = ("part", "ms", "of the tree's forward", "of a one-token forward")
    return f"{source(results)}\n{where}{results['context']}\n\n{table(heads, lines)}"


def draft_cost(results: dict) -> str:
    """The cost of each drafter per round."""
    rows = sorted(results["rows"], key=lambda row: row["ms"] or 0)
    lines = [
        (
            row["drafter"],
            row["nodes"],
            number(row["ms"], ".3f"),
            number(row["share"], ".2%"),
            number(row["share_of_verify"], ".2%"),
        )
        for row in rows
    ]
    heads = ("drafter", "nodes", "ms per round", "of a one-token pass", "of the verifying pass")
    return f"{source(results)}{_one_pass(results)}\n\n{table(heads, lines)}"


def _one_pass(results: dict) -> str:
    """A line with the time of the target's pass over one token, if it was measured."""
    times = results["forward_ms"]
    return f"\n- One-token pass: {times['forward_1']:.1f} ms" if times else ""


def draft_steps(results: dict) -> str:
    """The cost of drafting with parameters, as shares of the target's pass over one token."""
    parts = ("first", "network", "draft", "growth")
    lines = [
        (
            row["drafter"],
            row["nodes"],
            number(row["draft_ms"], ".1f"),
            *(number(row[f"{part}_share"], ".1%") for part in parts),
        )
        for row in results["rows"]
    ]
    heads = ("drafter", "nodes", "ms per draft", "first pass", "all passes", "draft", "growth")
    return f"{source(results)}{_one_pass(results)}\n\n{table(heads, lines)}"


def head_training(results: dict) -> str:
    """The cost of a training step, in passes of the target over the same tokens."""
    lines = [
        (
            row["method"],
            number(row["step_ms"], ".0f"),
            number(row["ratio"], ".2f"),
            number(row["forward_ratio"], ".2f"),
        )
        for row in results["rows"]
    ]
    heads = ("method", "ms per step", "step", "loss without gradient")
    one = "- The target's pass over the batch, with logits: "
    one += number(results["forward_ms"], ".0f", " ms") or "not measured"
    return f"{source(results)}\n{one}\n\n{table(heads, lines)}"


def training_free(results: dict) -> str:
    """One table per target: a row per method, a column per temperature."""
    texts = []
    for name, target in results["targets"].items():
        rows = target["rows"]
        texts.append(f"**{name}**\n\n{source(target, results)}\n\n{_by_temperature(rows, (1, 8))}")
    return "\n\n".join(texts)


def trained_drafters(results: dict) -> str:
    """One table per target, and how far forecasts and decoding are apart."""
    texts = []
    for name, target in results["targets"].items():
        text = f"**{name}**\n\n{source(target, results)}\n\n"
        rows = target["rows"]
        text += _by_temperature(rows, (1,), depths=True) if rows else _held_out(target["training"])
        text += f"\n\n{_training_times(target['training'])}{_training_costs(target)}"
        apart = [abs(f["foreseen"] / f["decoded"] - 1) for f in target["forecasts"].values()]
        if apart:
            text += (
                f"\n\ntau at temperature 1, forecast from the target's text and decoded: at most "
                f"{max(apart):.1%} apart for {len(apart)} drafters."
            )
        texts.append(text)
    return "\n\n".join(texts)


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
    parts = [
        f"{name}: {t['curve'][-1][0]}" + (f" in {t['seconds']:.0f} s" if t.get("seconds") else "")
        for name, t in training.items()
    ]
    text = f"Steps of training: {'; '.join(parts)}."
    waits = [share for t in training.values() if (share := t.get("data_share")) is not None]
    if waits:
        text += f" Waiting for data: {min(waits):.1%} to {max(waits):.1%} of the time of a run."
    return text


def _training_costs(target: dict) -> str:
    """What each drafter costs, for studies that timed the steps of training."""
    lines = []
    for name, training in target["training"].items():
        own = [row for row in target["rows"] if row["method"] == name and not row["temperature"]]
        if "tokens_per_second" in training and own:
            times = own[0].get("costs_ms") or {}
            cost = times["draft"] / times["step"] if {"draft", "step"} <= times.keys() else None
            size = f"{own[0]['parameters']['draft'] / 1000:,.0f}"
            rate = number(training["tokens_per_second"], ",.0f")
            lines.append((name, size, number(cost, ".2f"), rate))
    heads = ("drafter", "thousand parameters", "time of a draft / of a plain step")
    return f"\n\n{table([*heads, 'training, tokens/s'], lines)}" if lines else ""


def _by_temperature(rows: list[dict], batches: Sequence[int], depths: bool = False) -> str:
    """Columns per temperature: tau (alpha by depth), and tokens/s and speed-up per batch size."""
    rows = [row for row in rows if row["category"] is None]
    temperatures = sorted({row["temperature"] for row in rows})
    heads = ["method"]
    for temperature in temperatures:
        heads.append(f"T={temperature:g}: tau")
        if depths:
            heads.append("alpha by depth")
        heads += [f"batch {batch}: tokens/s, speed-up" for batch in batches]
    at = {(row["method"], row["temperature"], row["batch_size"]): row for row in rows}
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [method]
        for temperature in temperatures:
            first = at.get((method, temperature, batches[0]))
            line.append("" if first is None else f"{first['block_efficiency']:.2f}")
            if depths:
                alphas = (first or {}).get("acceptance_by_depth") or []
                line.append(" ".join(number(alpha, ".2f") for alpha in alphas))
            line += [_speed(at.get((method, temperature, batch))) for batch in batches]
        lines.append(line)
    plain = ["plain decoding"]
    for temperature in temperatures:
        plain += ["1.00", *([""] if depths else [])]
        plain += [_plain(rows, temperature, batch) for batch in batches]
    return table(heads, [plain, *lines])


def _speed(row: dict | None) -> str:
    if row is None or row["tokens_per_second"] is None:
        return ""
    return f"{row['tokens_per_second']:,.0f}, {row['speedup']:.2f}x"


def _plain(rows: list[dict], temperature: float, batch: int) -> str:
    """The range of plain decoding over the rows: runs in several processes have several values."""
    rates = [
        rate
        for row in rows
        if (row["temperature"], row["batch_size"]) == (temperature, batch)
        and (rate := row["autoregressive_tokens_per_second"]) is not None
    ]
    if not rates:
        return ""
    low, high = f"{min(rates):,.0f}", f"{max(rates):,.0f}"
    return low if low == high else f"{low} to {high}"


def tpu_programs(results: dict) -> str:
    """What each executable shows; numbers of instructions, not of times."""
    lines = [
        (
            row["program"],
            row["chip"],
            row["mesh"],
            f"{row['estimated_cycles'] / 1e6:.2f}",
            number(row["traffic"], ".2f", "x"),
            f"{row['compiler_bytes'] / 1e9:.2f}",
            f"{row['argument_bytes'] / 1e9:.2f}",
            f"{row['temporary_bytes'] / 1e6:,.0f}",
            f"{row['aliased_bytes'] / 1e9:.2f}",
            "{inside_loops} / {outside_loops}".format(**row["collectives"]),
            "{within_main} / {from_chip} / {to_chip}".format(**row["copies_in_loops"]),
            row["float32_of_bfloat16"],
            row["host_transfers"],
        )
        for row in results["rows"]
    ]
    heads = "program, chip, mesh, M cycles, traffic, compiler's GB, arguments GB, temporary MB, "
    heads += "aliased GB, collectives, copies, float32, host"
    where = f"- libtpu {results['versions']['libtpu']}; no TPU"
    return f"{source(results)}\n{where}\n\n{table(heads.split(', '), lines)}"


def real_model(results: dict) -> str:
    """By temperature tau and loops of each task, then the speed-ups of each batch size."""
    rows = results["rows"]
    settings = sorted({(row["temperature"], row["batch_size"]) for row in rows})
    tasks = list(dict.fromkeys(row["category"] for row in rows))
    at = {
        (row["temperature"], row["batch_size"], row["method"], row["category"]): row for row in rows
    }
    methods = list(dict.fromkeys(row["method"] for row in rows))
    heads = ["method", *("all" if task is None else task.replace("_", " ") for task in tasks)]
    texts = [source(results)]
    for temperature in dict.fromkeys(t for t, _ in settings):
        batch = next(b for t, b in settings if t == temperature)
        for title, text in (("tau and its standard error over prompts", _tau), ("loops", _loops)):
            lines = [
                (method, *(text(at[temperature, batch, method, task]) for task in tasks))
                for method in methods
            ]
            texts.append(f"**Temperature {temperature:g}: {title}**\n\n{table(heads, lines)}")
    for temperature, batch in settings:
        title = (
            f"**Temperature {temperature:g}, batch {batch}: speed-up, median over batches, and the "
            "95 % interval of the ratio of all tokens/s**"
        )
        lines = [
            (method, *(_gain(at[temperature, batch, method, task]) for task in tasks))
            for method in methods
        ]
        plain = [
            at[temperature, batch, methods[0], task]["autoregressive_tokens_per_second"]
            for task in tasks
        ]
        first = ("plain decoding, tokens/s", *(number(rate, ".1f") for rate in plain))
        texts.append(f"{title}\n\n{table(heads, [first, *lines])}")
    return "\n\n".join(texts)


def _tau(row: dict) -> str:
    error = number(row["standard_errors"]["block_efficiency"], ".2f")
    return f"{number(row['block_efficiency'], '.2f')} ± {error}"


def _loops(row: dict) -> str:
    return number(row["repeated_4grams"], ".0%")


def _gain(row: dict) -> str:
    low, high = row["speedup_interval"] or (None, None)
    ends = f" [{number(low, '.2f')}, {number(high, '.2f')}]" if low is not None else ""
    return number(row["speedup"], ".2f", f"x{ends}")


def long_context(results: dict) -> str:
    """The table of each target that was measured."""
    others = sorted((EXPERIMENTS / "long_context").glob("*.json"))
    parts = [json.loads(p.read_text(encoding="utf-8")) for p in others if p.name != "results.json"]
    return "\n\n".join(map(_contexts, [results, *parts]))


def _contexts(results: dict) -> str:
    """Times of passes and drafts, tau and speed-ups, for each context, batch size and view."""
    lines = [
        (
            row["view"],
            row["batch"],
            number(row["context"], ","),
            *(number(row.get(key), ".1f") for key in ("plain_ms", "verify_ms", "draft_ms")),
            number(row.get("tau"), ".2f"),
            number(row.get("alpha"), ".2f"),
            *(number(row.get(key), ".2f") for key in ("speedup", "predicted", "roofline")),
        )
        for row in results["rows"]
    ]
    settings, fit = results["settings"], results["fit"]
    facts = [f"- Target: {settings['target']}, float32; budget {settings['budget']}, gamma "]
    facts[0] += f"{settings['gamma']}, chunks chosen every {settings['refresh']} rounds"
    if fit:
        facts.append(
            f"- Fitted to the plain passes: {fit['bandwidth'] / 1e9:.1f} GB/s, "
            f"{fit['flops'] / 1e9:.0f} GFLOPS, {1e3 * fit['overhead']:.1f} ms for each pass"
        )
        critical = results.get("critical_context")
        facts.append(f"- Critical context: {'none' if critical is None else f'{critical:,.0f}'}")
    if trained := results.get("trained"):
        facts.append(f"- Target trained by: `PYTHONPATH=. {trained['command']}`")
        losses = zip(trained["ends"], trained["loss"], strict=True)
        each = ", ".join(f"{number(loss, '.2f')} up to token {end:,}" for end, loss in losses)
        facts.append(f"- Its loss on other text, nats per token: {each}")
    heads = ("view", "batch", "context", "plain ms", "verify ms", "draft ms", "tau", "alpha")
    heads += ("speed-up", "from the times", "roofline")
    return "\n".join([source(results), *facts, "", table(heads, lines)])


def self_speculation(results: dict) -> str:
    """One table per part, each with its command."""
    tables = {
        "acceptance": _exits,
        "steps": _exit_steps,
        "reuse": _exit_reuse,
        "drafts": _exit_drafts,
        "adapters": _exit_adapters,
        "targets": _exit_targets,
    }
    parts = results["parts"].items()
    return "\n\n".join(f"{source(part)}\n{tables[name](part)}" for name, part in parts)


def _exits(part: dict) -> str:
    """The acceptance of every exit layer."""
    tokens = " and ".join(f"{count} at T={t}" for t, count in part["tokens"].items())
    lines = [
        (
            row["exit_layer"],
            *(f"{row[f'acceptance_t{t}']:.3f} ± {row[f'error_t{t}']:.3f}" for t in (0, 1)),
            number(row["parameter_share"], ".3f"),
            *(f"{row[f'best_gamma_t{t}']}: {row[f'predicted_speedup_t{t}']:.2f}x" for t in (0, 1)),
        )
        for row in part["rows"]
    ]
    heads = "exit layer, T=0: first choices agree, T=1: acceptance, parameters read, "
    heads += "T=0: best gamma: predicted speed-up, T=1: best gamma: predicted speed-up"
    where = f"- {part['prompts']} prompts; tokens that the target wrote: {tokens}"
    return f"{where}\n\n{table(heads.split(', '), lines)}"


def _exit_steps(part: dict) -> str:
    """The cost of a draft step."""
    lines = [
        (
            row["exit_layer"],
            number(row["ms"], ".2f"),
            *(number(row[key], ".3f") for key in ("share", "layer_share", "parameter_share")),
            number(row["reuse_saves"], ".1%"),
        )
        for row in part["rows"]
    ]
    heads = "exit layer, ms of a step, of a pass, E / L, parameters read, "
    heads += "reuse would save of the verification"
    return f"\n{table(heads.split(', '), lines)}"


def _exit_reuse(part: dict) -> str:
    """Rounds without and with the reuse of the draft's layers in the verification."""
    lines = [
        (
            row["exit_layer"],
            row["batch"],
            number(row["tau"], ".2f"),
            *(number(row[f"ms_of_round_{label}"], ".1f") for label in ("plain", "reuse")),
            *(number(row[f"tokens_per_second_{label}"], ".1f") for label in ("plain", "reuse")),
            _median(row["ratios"]),
        )
        for row in part["rows"]
    ]
    heads = "exit layer, batch, tau, ms of a round, with reuse, tokens/s, with reuse, "
    heads += "speed-up by reuse (lowest to highest)"
    where = f"- {part['prompts']} prompts, {part['new']} tokens of each, temperature 0, "
    where += f"gamma {part['rows'][0]['gamma']}"
    return f"{where}\n\n{table(heads.split(', '), lines)}"


def _median(ratios: list[float] | None) -> str:
    """The median of sorted ratios, with the lowest and the highest."""
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _exit_drafts(part: dict) -> str:
    """Measured tokens per round."""
    lines = [
        (
            row["exit_layer"],
            row["gamma"],
            *(f"{row[f'{key}_t{t}']:.2f}" for t in (0, 1) for key in ("tau", "expected_tau")),
        )
        for row in part["rows"]
    ]
    heads = ("exit layer", "gamma", "T=0: tau", "from alpha", "T=1: tau", "from alpha")
    return f"\n{table(heads, lines)}"


def _exit_adapters(part: dict) -> str:
    """Adapters that were trained on a small target."""
    lines = [
        (
            row["exit_layer"],
            row["adapter"],
            number(row["parameters"], ","),
            *(f"{row[key]:.3f}" for key in ("agreement", "alpha")),
            *(f"{row[key]:.2f}" for key in ("tau_t0", "tau_t1")),
        )
        for row in part["rows"]
    ]
    heads = "exit layer, adapter, parameters, T=0: agreement, T=1: acceptance, T=0: tau, T=1: tau"
    where = f"- Adapters on {part['small']}, {part['steps']} steps; chains of {part['gamma']}"
    return f"{where}\n\n{table(heads.split(', '), lines)}"


def _exit_targets(part: dict) -> str:
    """Targets that learnt to exit."""
    lines = [
        (
            row["target"],
            number(row["loss"], ".3f"),
            *(f"{alpha:.2f}" for alpha in row["acceptance_t1"][:-1]),
        )
        for row in part["rows"]
    ]
    layers = len(part["rows"][0]["acceptance_t1"])
    heads = ("target", "held-out loss", *(f"T=1: exit {n}" for n in range(1, layers)))
    return f"- Targets that were trained here, {part['steps']} steps\n\n{table(heads, lines)}"


def draft_lengths(results: dict) -> str:
    """Every controller by setting, then all of them on one pair, some by task, and their cost."""
    every, cost, *chat = (
        json.loads((EXPERIMENTS / "draft_lengths" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("all", "cost", "chat", "chat_hydra", "chat_draft")
    )
    first = f"{_ratios(results)}\n\n{_goodput_counts(results)}"
    tables = [first, _ratios(every), *map(_lengths_by_task, chat)]
    return "\n\n".join([*tables, _costs_of_controllers(cost)])


def _ratios(results: dict) -> str:
    """The best fixed length, and each controller's share of it, for each setting."""
    names = list(dict.fromkeys(n for s in results["settings"] for n in s["ratios"]))
    lines = [
        (
            each["target"],
            each["drafter"],
            f"{each['temperature']:g}",
            each["batch_size"],
            each["best"].replace("fixed:", ""),
            f"{each['best_speedup']:.2f}",
            *(number(each["ratios"].get(name), ".2f") for name in names),
        )
        for each in results["settings"]
    ]
    heads = ("target", "drafter", "T", "batch", "best length", "its speed-up")
    commands = [f"- Bench: `{command}`" for command in results["commands"]]
    return "\n".join([source(results), *commands, "", table([*heads, *names], lines)])


def _goodput_counts(results: dict) -> str:
    """In how many settings of each target goodput control is not behind."""
    parts = []
    for target in dict.fromkeys(each["target"] for each in results["settings"]):
        own = [each for each in results["settings"] if each["target"] == target]
        plain = sum(each["controllers"]["goodput"] >= 0.98 for each in own)
        best = sum(each["ratios"]["goodput"] >= 0.97 for each in own)
        parts.append(f"{target}: {plain} and {best} of {len(own)}")
    what = "Settings in which `goodput` has at least 0.98 of plain decoding, and 0.97 of the best "
    return f"{what}choice. {'; '.join(parts)}."


def _costs_of_controllers(results: dict) -> str:
    """The time of rounds with the same drafts, for each controller."""
    lines = [
        (
            row["control"],
            row["batch"],
            number(row["round_ms"], ".2f"),
            number(row["ratio"], ".3f"),
            " to ".join(f"{each:.2f}" for each in row["quartiles"] or ()),
        )
        for row in results["rows"]
    ]
    heads = ("controller", "batch", "ms of a round, median", "ratio to none, median", "quartiles")
    return "\n".join([source(results), "", table(heads, lines)])


def _lengths_by_task(results: dict) -> str:
    """As ``draft_lengths``, by task, from the rows of experiments/real_model.

    Where no speed-up was measured the cells are tau.
    """
    timed = any(row["speedup_of_totals"] is not None for row in results["rows"])
    cells: dict[tuple, dict[str, float | None]] = {}
    for row in results["rows"]:
        drafter = row["method"].split()[0]
        key = drafter, row["temperature"], row["batch_size"], row["category"] or "all"
        control = row["method"].rpartition("control=")[2]
        value = row["speedup_of_totals" if timed else "block_efficiency"]
        cells.setdefault(key, {})[control] = value
    names = [n for n in next(iter(cells.values())) if not n.startswith("fixed:")]
    lines = []
    for (drafter, temperature, batch, task), speeds in cells.items():
        fixed = {name: speed for name, speed in speeds.items() if name not in names}
        known = {name: speed for name, speed in fixed.items() if speed is not None}
        label = max(known, key=lambda name: known[name], default="plain")
        best = max(known.get(label, 1.0), 1.0)
        length = label.removeprefix("fixed:") if best > 1 else "plain"
        what = drafter, f"{temperature:g}", batch, task.replace("_", " ")
        each = [number(speed, ".2f") for speed in fixed.values()]
        if not timed:
            lines.append((*what, *each, "", *(number(speeds[name], ".2f") for name in names)))
            continue
        shares = {name: x if (x := speeds[name]) is None else x / best for name in names}
        own = (number(speeds[name], ".2f", f" ({number(shares[name], '.2f')})") for name in names)
        lines.append((*what, *each, length, *own))
    fixed = [name for name in next(iter(cells.values())) if name not in names]
    lengths = (name.replace("fixed:", "length ") for name in fixed)
    heads = ("drafter", "T", "batch", "task", *lengths, "best", *names)
    about = f"- Target: {results['target']['name']}; {results['questions']} questions of each task "
    about += f"or more, {results['new_tokens']} new tokens; "
    about += "speed-ups of totals, and in brackets the ratio to the best choice" if timed else "tau"
    return "\n".join([source(results), about, "", table(heads, lines)])


def benches(results: dict) -> str:
    """One table for each bench."""
    texts = [f"- Command: `PYTHONPATH=. {results['command']}`"]
    for name, each in results["benches"].items():
        sizes = sorted({row["batch_size"] for row in each["rows"]})
        shown = _by_temperature(each["rows"], sizes)
        facts = source(each).replace("Command: `PYTHONPATH=. ", "Bench: `")
        texts.append(f"**{name}** ({each['target']})\n\n{facts}\n\n{shown}")
    return "\n\n".join(texts)


def goodput(results: dict) -> str:
    """Latency and goodput of every policy by load, and of adaptive ones against the best length."""
    parts = [f"{source(results)}\n- Seeds: {results['seeds']}"]
    for name, about in results["settings"].items():
        rows = [row for row in results["rows"] if row["setting"] == name]
        parts.append(f"**{name}** ({about}): mean latency of a request in seconds, by load")
        parts.append(_by_load(rows, lambda row: f"{row['latency']['mean']:.3g}"))
        parts.append(f"{name}: tokens per second")
        parts.append(_by_load(rows, lambda row: f"{row['goodput']:,.0f}"))
        parts.append(f"{name}: against the best fixed length")
        parts.append(_against_fixed(rows))
    return "\n\n".join(parts)


def _by_load(rows: list[dict], cell: Callable[[dict], str]) -> str:
    """One line per load, one column per policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    loads: dict[float, dict] = {}
    for row in rows:
        loads.setdefault(row["load"], {})[row["policy"]] = cell(row)
    lines = [(f"{share:g}", *(each[name] for name in policies)) for share, each in loads.items()]
    return table(("load", *policies), lines)


def _against_fixed(rows: list[dict]) -> str:
    """Goodput and mean latency as multiples of those of the best fixed length, with errors."""
    lines = [
        (
            number(row["load"], "g"),
            row["policy"],
            f"{row['relative_goodput'][0]:.3f} +- {row['relative_goodput'][1]:.3f}",
            f"{row['relative_latency'][0]:.3f} +- {row['relative_latency'][1]:.3f}",
            row["best_fixed"]["latency"],
            *(f"{row['latency'][p]:.3g}" for p in ("p50", "p90", "p99")),
            *(f"{1e3 * row['per_token'][p]:.3g}" for p in ("p50", "p99")),
            number(row["rows"], ".1f"),
            number(row["drafted"], ".2f"),
        )
        for row in rows
        if not row["policy"].startswith("fixed")
    ]
    heads = ("load", "policy", "goodput", "latency", "best fixed", "p50 s", "p90 s", "p99 s")
    heads += ("per token p50 ms", "p99 ms", "rows", "drafted")
    return table(heads, lines)


def online(results: dict) -> str:
    """One table per temperature: alpha of each topic as it begins and as it ends, and the times."""
    settings, topics = results["settings"], results["topics"]
    size = settings["requests"]
    last = range(size - 2 * settings["window"], size)
    where = f"- {size} requests of each topic, {settings['new']} tokens each; chains of "
    where += f"{settings['gamma']}; AdamW at {settings['rate']:g}; first "
    where += f"{settings['window']} and last {len(last)} requests of a topic"
    texts = [source(results), where]
    for temperature in sorted({row["temperature"] for row in results["rows"]}):
        lines = []
        for row in results["rows"]:
            if row["temperature"] != temperature:
                continue
            line = [row["arm"]]
            for number_, _ in enumerate(topics):
                own = [w for w in row["windows"] if w["first"] // size == number_]
                end = [w["alpha"] for w in own if w["first"] % size in last]
                line.append(f"{own[0]['alpha']:.2f} to {sum(end) / len(end):.2f}")
            request, update = row["seconds_per_request"], row["seconds_per_update"]
            line += [f"{row['tau']:.2f}"]
            line += [number(each and 1e3 * each, ".0f") for each in (request, update)]
            updates = row["seconds_of_updates"]
            lines.append([*line, number(updates and updates / (row["seconds"] + updates), ".0%")])
        heads = ["draft model", *(f"alpha, {topic}" for topic in topics), "tau"]
        heads += ["ms per request", "ms per update", "time of updates"]
        texts += ["", f"**Temperature {temperature:g}**", "", table(heads, lines)]
    return "\n".join(texts)


def mtp_loss(results: dict) -> str:
    """The target's own loss, alone and with heads, and tokens per round of the heads."""

    def spread(mean: float | None, sd: float | None, spec: str) -> str:
        return "" if mean is None else f"{mean:{spec}} ± {sd:{spec.lstrip('+')}}"

    lines = [
        (
            row["method"],
            number(row["parameters"], ","),
            spread(row["loss"], row["loss_sd"], ".3f"),
            spread(row["difference"], row["difference_sd"], "+.3f")
            if row["method"] != "alone"
            else "",
            spread(row["tau_t0"], row["tau_t0_sd"], ".2f"),
        )
        for row in results["methods"]
    ]
    heads = ("trained", "parameters", "held-out loss", "difference to alone", "tau, T = 0")
    shape = results["shape"]
    what = (
        f"- {results['steps']} steps of 8 x 64 tokens, seeds {results['seeds']}, "
        f"{shape['num_layers']} layers of width {shape['hidden_size']}; means ± standard deviation"
    )
    own = [row for row in results["methods"] if row["method"] != "alone"]
    by_seed = [
        (seed, *(f"{row['differences'][i]:+.3f}" for row in own))
        for i, seed in enumerate(results["seeds"])
    ]
    seeds = table(("seed", *(f"{row['method']}: difference" for row in own)), by_seed)
    return f"{source(results)}\n{what}\n\n{table(heads, lines)}\n\n{seeds}"


def t5(results: dict) -> str:
    """What was trained, then each method at each gamma, beside what theory expects."""
    trained = [
        (
            name,
            f"{facts['parameters']:,}",
            facts["steps"],
            number(facts.get("heldout_loss"), ".3f"),
            number(facts.get("heldout_alpha"), ".3f"),
        )
        for name, facts in results["training"].items()
    ]
    models = table(("model", "parameters", "steps", "held-out loss", "held-out alpha"), trained)
    lines = [
        (
            row["method"],
            number(row["temperature"], "g"),
            row["gamma"],
            number(row["alpha"], ".2f"),
            number(row["tau"], ".2f"),
            number(row["tokens_before_cut"], ".2f"),
            number(row["expected_tokens"], ".2f"),
            number(row["c"], ".2f"),
            number(row["verify"], ".2f"),
            number(row["speedup"], ".2f", "x"),
            number(row["improvement"], ".2f"),
            number(row["improvement_measured_verify"], ".2f"),
        )
        for row in results["rows"]
    ]
    heads = ("method", "T", "gamma", "alpha", "tau", "before cuts", "expected", "c", "v")
    heads += ("speed-up", "theorem 3.8", "theorem 3.8 with v")
    what = f"- Pairs: {results['pairs']}\n- Training: `{results['trained_by']}`"
    text = f"{source(results)}\n{what}\n\n{models}\n\n{table(heads, lines)}"
    # Results from before Spec-Drafters have no such rows.
    if far := results.get("differences"):
        rows = [(r["method"], r["gamma"], f"{r['texts']:.0%}", f"{r['tokens']:.0%}") for r in far]
        names = ("method, T=0", "gamma", "texts that differ from greedy ones", "tokens")
        text += f"\n\n{table(names, rows)}"
    return text


def beams(results: dict) -> str:
    """Speculative beams beside plain beam search: one line for each shape of the draft."""
    lines = [
        (
            row["pair"],
            row["beams"],
            row["gamma"],
            row["draft_beams"],
            row["nodes"],
            f"{row['steps'] / row['passes']:.2f}",
            f"{row['passes'] / row['steps']:.2f}",
            number(row["plain_ms_per_step"], ".2f"),
            number(row["speedup"], ".2f", "x"),
            f"{row['identical']}/{row['prompts']}",
        )
        for row in results["rows"]
    ]
    models = "\n".join(
        f"- `{name}`: a target of {sizes['target_parameters']:,} parameters, a draft model of "
        f"{sizes['draft_parameters']:,}"
        for name, sizes in results["models"].items()
    )
    heads = (
        *("pair", "beams", "gamma", "draft's beams", "tokens per pass", "steps per pass"),
        *("passes per step", "plain, ms per step", "speed-up", "same hypotheses"),
    )
    return f"{source(results)}\n{models}\n\n{table(heads, lines)}"


def vocabularies(results: dict) -> str:
    """What the vocabularies have in common, and tau and the acceptance rate of each method."""
    pairs = [
        (
            each["target"],
            each["draft"],
            f"{each['shared']:,} of {each['sizes'][0]:,}",
            f"{each['shared_of_text']:.1%}",
            f"{each['pieces_of_text']:.2f}",
            f"{each['other_cut']:.1%}",
        )
        for each in results["pairs"]
    ]
    heads = ("target", "draft", "shared tokens", "of the text", "draft tokens", "other cut")
    rows = {(r["target"], r["draft"], r["method"], r["temperature"]): r for r in results["rows"]}
    lines = []
    for key in dict.fromkeys(key[:3] for key in rows):
        own = [rows.get((*key, temperature)) for temperature in (0.0, 1.0)]
        each = [f"{row[name]:.2f}" if row else "" for row in own for name in ("tau", "alpha")]
        lines.append((*key, *each))
    names = ("target", "draft", "method", "tau, T=0", "alpha, T=0", "tau, T=1", "alpha, T=1")
    where = f"- Drafts: chains of {results['gamma']} tokens, trees {results['tree']}"
    return f"{source(results)}\n{where}\n\n{table(heads, pairs)}\n\n{table(names, lines)}"


TABLES: dict[str, Callable[[dict], str]] = {
    "beams": beams,
    "benches": benches,
    "t5": t5,
    "online": online,
    "system_efficiency": system_efficiency,
    "vs_transformers": vs_transformers,
    "tree_cost": tree_cost,
    "draft_cost": draft_cost,
    "draft_steps": draft_steps,
    "head_training": head_training,
    "mtp_loss": mtp_loss,
    "training_free": training_free,
    "trained_drafters": trained_drafters,
    "tpu_programs": tpu_programs,
    "real_model": real_model,
    "long_context": long_context,
    "draft_lengths": draft_lengths,
    "self_speculation": self_speculation,
    "goodput": goodput,
    "vocabularies": vocabularies,
}
