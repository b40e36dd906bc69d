"""The tables of this study in the documentation: what theory predicts beside what was measured."""

from __future__ import annotations

from experiments.tables import Column, number, of_rows, source, table

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
    """The tables of each pair, then K = 4 in all domains."""
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
    table_of_domains = of_rows(domains, (Column("domain", "domain"), *HEAD, *SPEED))
    title = f"**Chen et al. 2023: K = {K} in each domain**"
    return "\n\n".join([*texts, title, table_of_domains])
