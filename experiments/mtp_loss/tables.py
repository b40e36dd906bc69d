"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import number, source, table


def tables(results: dict) -> str:
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
