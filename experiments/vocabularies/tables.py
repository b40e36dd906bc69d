"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import source, table


def tables(results: dict) -> str:
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
