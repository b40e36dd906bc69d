"""The tables of this study in the documentation: what theory predicts beside what was measured."""

from __future__ import annotations

from experiments.papers import published
from experiments.tables import Column, number, of_rows, source, table
from specjax import theory

K = 4
HEAD = (
    Column("T", "temperature", "g"),
    Column("gamma", "gamma"),
    Column("alpha", "alpha", ".3f"),
    Column("alpha in the loop", "acceptance_rate", ".3f"),
    Column("equation 1", "expected_tokens", ".2f"),
    Column("tau before cuts", "tokens_before_cut", ".2f"),
)
SPEED = (
    Column("c", "c", ".2f"),
    Column("v", "verify", ".2f"),
    Column("theorem 3.8", "improvement", ".2f", "x"),
    Column("theorem 3.8 with v", "improvement_measured_verify", ".2f", "x"),
    Column("speed-up", "speedup", ".2f", "x"),
)
WORK = (
    Column("theorem 3.11", "operations", ".2f"),
    Column("operations, of plain", "operations_measured", ".2f"),
)
CHEN = (
    Column("domain", "domain"),
    *HEAD[:1],
    *HEAD[2:3],
    Column("r' predicted", "efficiency", ".2f"),
    Column("measured", "efficiency_measured", ".2f"),
    Column("with c alone", "whole", ".2f", "x"),
    Column("with c and v", "whole_measured_verify", ".2f", "x"),
    Column("predicted", "improvement_measured_verify", ".2f", "x"),
    Column("speed-up", "speedup", ".2f", "x"),
)
LENIENCE = (
    Column("draft", "drafter"),
    Column("lenience", "lenience", "g"),
    HEAD[0],
    *HEAD[2:],
    *SPEED[-2:],
    Column("total variation", "total_variation", ".4f"),
    Column("KL, nats", "kl", ".4f"),
    Column("Jensen-Shannon, nats", "jensen_shannon", ".4f"),
)
LENGTHS = (
    Column("new tokens", "new"),
    *HEAD[-2:],
    Column("plain, s", "plain_seconds", ".3f"),
    Column("speculative, s", "seconds", ".3f"),
    *SPEED[-2:],
)
TOPS = (
    Column("draft", "drafter"),
    Column("k", "k"),
    Column("greedy", "greedy", ".1%"),
    Column("sampled", "sampled", ".1%"),
)

CLASSES = (
    HEAD[0],
    Column("class", "class"),
    Column("share", "share", ".1%"),
    Column("alpha after it", "alpha", ".3f"),
    Column("tokens with 4", "expected_tokens", ".2f"),
    Column("length", "length"),
)
CONTROLLERS = (
    HEAD[0],
    Column("controller", "controller"),
    Column("drafted per round", "drafted", ".2f"),
    Column("accepted", "acceptance_rate", ".3f"),
    HEAD[-1],
    Column("operations, of plain", "operations_measured", ".2f"),
    Column("predicted", "predicted", ".2f", "x"),
    Column("speed-up", "speedup", ".2f", "x"),
)
EXITS = (
    Column("draft token from", "exit"),
    Column("layers, T=0", "alpha_greedy_layers", ".0%"),
    Column("alpha, T=0", "alpha_greedy", ".3f"),
    Column("layers, T=1", "alpha_layers", ".0%"),
    Column("alpha, T=1", "alpha", ".3f"),
)
SLOTS = (
    HEAD[0],
    Column("acceptance by depth", lambda row: _rates(row["acceptance_by_depth"])),
    Column("tau", "block_efficiency", ".2f"),
    Column("speed-up", "speedup", ".2f", "x"),
)
SIZES = (
    Column("draft", "drafter"),
    HEAD[0],
    Column("c^", "c_hat", ".3f"),
    *HEAD[2:],
    Column("theorem 3.8 with c^ as c", lambda row: _of_work(row), ".2f", "x"),
    *SPEED,
    *WORK[:1],
    Column("best gamma", "best_gamma"),
    Column("theorem 3.8 there", "best_improvement", ".2f", "x"),
)
RULES = (
    Column("rule", "method"),
    Column("acceptance rate", "acceptance_rate", ".3f"),
    Column("tau", "block_efficiency", ".2f"),
    Column("speed-up", "speedup", ".2f", "x"),
)
CHECKPOINTS = (
    HEAD[0],
    Column("step", lambda row: f"{row['steps']} of {row['of']}"),
    HEAD[2],
    Column("theorem 3.8, c = 1", "gain_of_one", ".2f", "x"),
)


def _of_work(row: dict) -> float:
    return theory.walltime_improvement(row["alpha"], row["gamma"], row["c_hat"])


def _rates(rates: list[float]) -> str:
    return " ".join(format(rate, ".2f") for rate in rates)


def with_factors(row: dict) -> dict:
    """A row with r' and the speed-up if all tokens were accepted, predicted and measured."""
    tokens, gamma, c, v = (row[key] for key in ("expected_tokens", "gamma", "c", "verify"))
    share, whole = theory.loop_factors(tokens, gamma, c)
    measured, cost = theory.loop_factors(row["tokens_before_cut"], gamma, c, {gamma + 1: v})
    own = {"efficiency": share, "efficiency_measured": measured, "whole": whole}
    return row | own | {"whole_measured_verify": cost}


def further(name: str, pair: dict, results: dict) -> str:
    """The tables of ``further.py`` for a pair."""
    parts = {
        "alpha and length by class of the pending token": of_rows(pair["classes"], CLASSES),
        "Controllers, at most 8 tokens": of_rows(pair["controllers"], CONTROLLERS),
        "The target's layers as a draft": of_rows(pair["exits"], EXITS),
        "Placeholder tokens without training": of_rows(pair["slots"], SLOTS),
    }
    if "rules" in pair:
        title = "Draft model at temperature 1: chains of 4, and trees of 4 chains"
        parts[title] = of_rows(pair["rules"], RULES)
    if "sizes" in pair:
        rows = sorted(pair["sizes"], key=lambda row: row["temperature"])
        parts["Drafts by size, gamma 4"] = of_rows(rows, SIZES)
    titled = [f"{title}:\n\n{each}" for title, each in parts.items()]
    return "\n\n".join([f"**{name}, further**\n\n{source(pair, results)}", *titled])


def by_temperature(rows: list[dict]) -> str:
    """alpha of each kind of draft: a column per temperature."""
    known = {(row["drafter"], row["temperature"]): row["alpha"] for row in rows}
    heats = sorted({row["temperature"] for row in rows})
    kinds = dict.fromkeys(row["drafter"] for row in rows)
    lines = [[kind, *(number(known[kind, each], ".3f") for each in heats)] for kind in kinds]
    return table(["alpha of", *(f"T={each:g}" for each in heats)], lines)


def by_class(rows: list[dict]) -> str:
    """alpha by class of token: a line per draft at temperature 0 and 1."""
    rows = [row for row in rows if row["temperature"] in (0, 1)]
    names = list(dict.fromkeys(name for row in rows for name in row["by_class"]))
    lines = []
    for row in rows:
        cells = [number(row["by_class"].get(name, {}).get("alpha"), ".2f") for name in names]
        lines.append([row["drafter"], f"{row['temperature']:g}", *cells])
    return table(["alpha of", "T", *names], lines)


def tables(results: dict) -> str:
    """The tables of each pair, K = 4 in all domains, then the further ones."""
    texts, domains = [], []
    for name, pair in results["pairs"].items():
        rows, whole = pair["chains"], [row for row in pair["chains"] if row["category"] is None]
        gammas = [row for row in whole if row["temperature"] in (0, 1)]
        gammas.sort(key=lambda row: (row["temperature"], row["gamma"]))
        heats = sorted((r for r in whole if r["gamma"] == K), key=lambda row: row["temperature"])
        parts = {
            "Leviathan et al. 2023: alpha by temperature": by_temperature(pair["alphas"]),
            f"With gamma {K}": of_rows(heats, (*HEAD, *SPEED)),
            "By gamma": of_rows(gammas, (*HEAD, *SPEED, *WORK)),
            f"Lenience, gamma {K}": of_rows(pair["lenience"], LENIENCE),
            f"By length of the output, gamma {K}, T=0": of_rows(pair["lengths"], LENGTHS),
            "Miao et al. 2024: the target's token among the draft's k best": of_rows(
                pair["tops"], TOPS
            ),
            "alpha by class of token": by_class(pair["alphas"]),
        }
        titled = [f"{title}:\n\n{each}" for title, each in parts.items()]
        texts += [f"**{name}**\n\n{source(pair, results)}", *titled]
        # A single category has the numbers of the whole.
        several = len({row["category"] for row in rows}) > 2
        chosen = [r for r in (rows if several else gammas) if r["gamma"] == K]
        chosen = [row for row in chosen if row["temperature"] in (0, 1)]
        domains += [
            row | {"domain": ": ".join(filter(None, (name, row["category"])))} for row in chosen
        ]
    # Without times there are no factors of a loop.
    domains = [with_factors(row) if row["c"] is not None else row for row in domains]
    texts += [f"**Chen et al. 2023: K = {K} in each domain**", of_rows(domains, CHEN)]
    for name, pair in results.get("further", {}).items():
        if name == "checkpoints":
            title = "**Earlier checkpoints of the target as its draft model**"
            rows = sorted(pair["rows"], key=lambda row: row["temperature"])
            texts += [f"{title}\n\n{source(pair, results)}", of_rows(rows, CHECKPOINTS)]
        else:
            texts.append(further(name, pair, results))
    texts.append(published.tables(results))
    return "\n\n".join(texts)
