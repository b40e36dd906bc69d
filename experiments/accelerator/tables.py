"""The tables of this study, printed and in the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.accelerator import published
from experiments.tables import source, table

SHARES = ("of the copy's bandwidth", "of the datasheet's", "tokens/s on paper")


def tables(result: dict) -> str:
    """A table for each section that was measured."""
    first, *more = result["runs"]
    head = [source(result | first), f"- Device: {result['versions'].get('device')}"]
    head += [f"- Then: `PYTHONPATH=. {run['command']}`" for run in more]
    parts = ["\n".join(head)]
    for row in result.get("bandwidth", []):
        parts.append(f"Copy: {row['bytes_per_second'] / 1e9:.0f} GB/s.")
    parts += [_datasheet(result), _plain(result), _contexts(result), _verify(result)]
    parts.append(_attention(result))
    for title, section, key in (
        ("Controlled acceptance", "controlled", "model"),
        ("Buffers", "buffers", "buffers"),
    ):
        parts.append(_speculation(title, key, result.get(section, [])))
    parts.append(published.table())
    parts += [f"Skipped: {row['task']}, {row['why']}." for row in result["skipped"]]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns that have no value."""
    return f"{title}\n\n{table(heads, rows)}" if rows else ""


def _datasheet(result: dict) -> str:
    sheet = result.get("datasheet")
    if not sheet:
        return "no datasheet"
    bandwidth, flops = (
        f"{sheet['bandwidth'] / 1e9:.0f} GB/s",
        f"{sheet['flops'] / 1e12:.4g} TFLOP/s",
    )
    numbers = f"Datasheet of {sheet['name']}: {bandwidth}, {flops} in bfloat16"
    return f'{numbers} ({sheet["source"]}). "On paper" is a prediction from it.'


def _shares(row: dict) -> tuple[str, ...]:
    """The shares of the copy's and of the datasheet's bandwidth, and tokens/s on paper."""
    share, sheet = row.get("share_of_bandwidth"), row.get("share_of_datasheet")
    measured = "" if share is None else f"{share:.0%}"
    return measured, *(("", "") if sheet is None else (f"{sheet:.0%}", _on_paper(row)))


def _on_paper(row: dict) -> str:
    value = row.get("paper_tokens_per_second")
    return "" if value is None else f"{value:.1f}"


def _contexts(result: dict) -> str:
    rows = [
        (
            row["model"],
            str(row["batch_size"]),
            f"{row['context']:.0f}",
            f"{row['tokens_per_second']:.1f}",
            *_shares(row),
            f"{row['step_ms']:.2f}",
        )
        for row in result.get("contexts", [])
    ]
    heads = ("model", "batch", "cached tokens", "tokens/s", *SHARES, "step, ms")
    return _table("Plain decoding after long prompts", heads, rows)


def _plain(result: dict) -> str:
    peers = {
        (row["model"], row["batch_size"]): row["tokens_per_second"]
        for row in result.get("peer", [])
    }
    rows = []
    for row in result.get("autoregressive", []):
        peer = peers.get((row["model"], row["batch_size"]))
        rows.append(
            (
                row["model"],
                str(row["batch_size"]),
                f"{row['tokens_per_second']:.1f}",
                *_shares(row),
                f"{row['step_ms']:.2f}",
                f"{row['pass_alone_ms']:.2f}",
                f"{row['with_prefill']:.1f}",
                f"{peer:.1f} ({row['with_prefill'] / peer:.2f}x)" if peer else "",
            )
        )
    heads = ("model", "batch", "tokens/s", *SHARES, "step, ms", "pass alone, ms")
    return _table("Plain decoding", (*heads, "with prefill", "transformers"), rows)


def _verify(result: dict) -> str:
    rows = result.get("verify", [])
    return _columns(
        "Verifying: ms of a pass over so many tokens",
        ("model", "batch", "shape"),
        [
            ((row["model"], row["batch_size"], row["shape"]), row["tokens"], f"{row['ms']:.2f}")
            for row in rows
        ],
    )


def _attention(result: dict) -> str:
    cells = []
    for row in result.get("attention", []):
        block = f"{row['shape']} of {row['tokens']}"
        key = (row["model"], row["batch_size"], row["context"], block)
        error = f" ({row['error']:.1e})" if "error" in row else ""
        cells.append(
            (key, row["implementation"], f"{row['us']:.1f}{error}" if "us" in row else row["why"])
        )
    title = "Attention of one layer: us (error in bfloat16)"
    return _columns(title, ("model", "batch", "cached tokens", "block"), cells)


def _columns(title: str, keys: Sequence[str], cells: Sequence[tuple[tuple, object, str]]) -> str:
    """A table of (row, column, text)."""
    columns = list(dict.fromkeys(column for _, column, _ in cells))
    texts: dict[tuple, dict] = {}
    for key, column, text in cells:
        texts.setdefault(key, {})[column] = text
    rows = [(*map(str, key), *(row.get(c, "") for c in columns)) for key, row in texts.items()]
    return _table(title, (*keys, *map(str, columns)), rows)


def _speculation(title: str, key: str, measured: Sequence[dict]) -> str:
    rows = []
    for row in measured:
        cost, paper = row["costs_ms"], row.get("paper_speedup")
        rows.append(
            (
                row[key],
                str(row["batch_size"]),
                str(row["gamma"]),
                f"{row['rate']:g}",
                f"{row['block_efficiency']:.2f}",
                f"{row['tokens_per_second']:.1f}",
                _on_paper(row),
                f"{row['speedup']:.2f}",
                f"{row['predicted_speedup']:.2f}",
                "" if paper is None else f"{paper:.2f}",
                f"{row['system_efficiency']:.2f}",
                f"{cost['step']:.2f}",
                " + ".join(f"{cost[part]:.2f}" for part in ("draft", "verify", "accept")),
                f"{row['round_ms']:.2f}",
                f"{row['gap_ms']:.2f}",
            )
        )
    heads = (key, "batch", "gamma", "rate", "tau", "tokens/s", SHARES[-1], "speed-up", "predicted")
    heads = (
        *heads,
        "speed-up on paper",
        "efficiency",
        "step",
        "draft + verify + accept",
        "round",
        "gap",
    )
    return _table(f"{title} (times in ms)", heads, rows)
