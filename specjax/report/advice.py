"""Which drafter to take, in words: the fastest one of each setting, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.report import columns, inputs
from specjax.report.inputs import number_of, part

# A speed-up below this is not worth a drafter.
WORTH = 1.02
# The cost of a round, in plain rounds, and what it is spent on.
PARTS = {"verify": "the verification", "draft": "the draft"}


def lines(rows: Sequence[dict]) -> list[str]:
    """One text for each temperature, batch size and set of prompts of results.json.

    Without rows that have a measured speed-up there is none.
    """
    every = [row for row in rows if number_of(row.get("speedup")) is not None]
    wholes = [row for row in every if row.get("category") is None]
    texts: dict[tuple, list[dict]] = {}
    for row in wholes:
        texts.setdefault(_setting(row), []).append(row)
    return [f"{_name(own[0], wholes)}: {_advice(own, every)}" for own in texts.values()]


def _setting(row: dict) -> tuple:
    return tuple(
        str(row.get(key)) for key in ("temperature", "batch_size", "prompt_set", "context")
    )


def _name(row: dict, wholes: Sequence[dict]) -> str:
    """The setting, with the set of prompts where there are several."""
    head = [columns.spell(row.get("temperature"), "temperature {:g}")]
    head += [columns.spell(row.get("batch_size"), "batch {:g}")]
    for key, text in (("prompt_set", "{}"), ("context", "prompts of {:g} tokens")):
        if len({str(each.get(key)) for each in wholes}) > 1:
            value = row.get(key)
            head.append(str(value) if text == "{}" else columns.spell(value, text))
    return inputs.one_line(", ".join(filter(None, head)))


def _speedup(row: dict) -> float:
    return number_of(row.get("speedup")) or 0.0


def _advice(rows: Sequence[dict], every: Sequence[dict]) -> str:
    """About the rows of one setting; ``every`` has their categories too."""
    right = [row for row in rows if inputs.passed(part(row, "lossless")) is not False]
    if not right:
        return "no drafter passed its lossless check"
    best = max(right, key=_speedup)
    speed, name = _speedup(best), inputs.one_line(inputs.label(best))
    ends = best.get("speedup_interval")
    low = number_of(ends[0]) if isinstance(ends, list) and len(ends) == 2 else None
    shown = f"{speed:.2f}x of plain decoding"
    shown += f" {text}" if (text := columns.interval(best)).startswith("[") else ""
    if speed < WORTH:
        head = f"plain decoding is the fastest; of the drafters {name} is, with {shown}"
    elif low is not None and low < 1:
        head = f"{name} may be faster than plain decoding ({shown}); measure more prompts"
    else:
        head = f"{name} is the fastest, {shown}"
    return ". ".join([head + _by_category(best, every), *_limit(best)]) + "."


def _by_category(best: dict, every: Sequence[dict]) -> str:
    """The categories with the highest and the lowest speed-up; "" if there are fewer than two."""
    own = [
        row
        for row in every
        if row.get("category") is not None
        and row.get("method") == best.get("method")
        and _setting(row) == _setting(best)
    ]
    if len(own) < 2:
        return ""
    most, least = max(own, key=_speedup), min(own, key=_speedup)
    texts = (
        f"{inputs.one_line(str(row['category']))} {_speedup(row):.2f}x" for row in (most, least)
    )
    return f"; by category from {' to '.join(texts)}"


def _limit(row: dict) -> list[str]:
    """What a round gives and costs, and what is in the way; [] if the costs are not known."""
    costs, tau = part(row, "costs_ms"), number_of(row.get("block_efficiency"))
    step = number_of(costs.get("step"))
    spent = {key: number_of(costs.get(key)) for key in PARTS}
    verify, draft = spent["verify"], spent["draft"]
    longest = number_of(row.get("gamma"))
    if not step or verify is None or draft is None or tau is None:
        return []
    total = (verify + draft) / step
    parts = ", ".join(f"{text} {(spent[key] or 0) / step:.2f}" for key, text in PARTS.items())
    text = f"A round gives {tau:.2f} tokens and costs {total:.2f} plain rounds ({parts})"
    # The factor of the speed-up without each obstacle.
    gains = {
        "the time of the verification": total / (1 + draft / step),
        "the time of the draft": total / max(verify / step, 1e-9),
    }
    if longest is not None:
        gains["the acceptance"] = (longest + 1) / tau
    worst = max(gains, key=lambda name: gains[name])
    return [f"{text}; {worst} limits it most"]
