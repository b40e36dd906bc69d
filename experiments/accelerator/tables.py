"""The results of experiments/accelerator as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(result: dict) -> str:
    """A table for each section that was measured."""
    versions = result["versions"]
    head = f"{versions.get('device')}, jax {versions['jax']}, {result['date']}"
    parts = [f"{head}: `{result['command']}`"]
    for row in result.get("bandwidth", []):
        parts.append(f"Copy: {row['bytes_per_second'] / 1e9:.0f} GB/s.")
    parts += [_plain(result), _verify(result)]
    for title, section, key in (
        ("Controlled acceptance", "controlled", "model"),
        ("Buffers", "buffers", "buffers"),
    ):
        parts.append(_speculation(title, key, result.get(section, [])))
    parts += [f"Skipped: {row['task']}, {row['why']}." for row in result["skipped"]]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [f"{title}\n", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _plain(result: dict) -> str:
    peers = {
        (row["model"], row["batch_size"]): row["tokens_per_second"]
        for row in result.get("peer", [])
    }
    rows = []
    for row in result.get("autoregressive", []):
        peer = peers.get((row["model"], row["batch_size"]))
        share = row.get("share_of_bandwidth")
        rows.append(
            (
                row["model"],
                str(row["batch_size"]),
                f"{row['tokens_per_second']:.1f}",
                "" if share is None else f"{share:.0%}",
                f"{row['step_ms']:.2f}",
                f"{row['pass_alone_ms']:.2f}",
                f"{row['with_prefill']:.1f}",
                f"{peer:.1f} ({row['with_prefill'] / peer:.2f}x)" if peer else "",
            )
        )
    heads = ("model", "batch", "tokens/s", "of the bandwidth", "step, ms", "pass alone, ms")
    return _table("Plain decoding", (*heads, "with prefill", "transformers"), rows)


def _verify(result: dict) -> str:
    rows = [
        (
            row["model"],
            str(row["batch_size"]),
            row["shape"],
            str(row["tokens"]),
            f"{row['ms']:.2f}",
            f"{row['relative']:.2f}",
        )
        for row in result.get("verify", [])
    ]
    return _table("Verifying", ("model", "batch", "shape", "tokens", "ms", "relative"), rows)


def _speculation(title: str, key: str, measured: Sequence[dict]) -> str:
    rows = []
    for row in measured:
        cost = row["costs_ms"]
        rows.append(
            (
                row[key],
                str(row["batch_size"]),
                str(row["gamma"]),
                f"{row['rate']:g}",
                f"{row['block_efficiency']:.2f}",
                f"{row['speedup']:.2f}",
                f"{row['predicted_speedup']:.2f}",
                f"{row['system_efficiency']:.2f}",
                f"{cost['step']:.2f}",
                " + ".join(f"{cost[part]:.2f}" for part in ("draft", "verify", "accept")),
                f"{row['round_ms']:.2f}",
                f"{row['gap_ms']:.2f}",
            )
        )
    heads = (key, "batch", "gamma", "rate", "tau", "speed-up", "predicted", "efficiency")
    heads = (*heads, "step", "draft + verify + accept", "round", "gap")
    return _table(f"{title} (times in ms)", heads, rows)
