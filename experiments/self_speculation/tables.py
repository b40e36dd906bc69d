"""The tables of this study in the documentation."""

from __future__ import annotations

import statistics

from experiments.tables import number, source, table


def tables(results: dict) -> str:
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
