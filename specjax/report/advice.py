"""Which drafter to take, in words: the fastest one of each setting, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specjax.bench.metrics import WORTH
from specjax.report import columns, inputs
from specjax.report.inputs import number, number_of, part


def lines(rows: Sequence[dict]) -> list[str]:
    """One text for each temperature, batch size and set of prompts of results.json.

    Without rows that have a measured speed-up there is none.
    """
    parts: dict[int, list[dict]] = {}
    for row, owner in zip(rows, inputs.owners(rows), strict=True):
        if owner is not None and number_of(row.get("speedup")) is not None:
            parts.setdefault(id(owner), []).append(row)
    wholes = [row for row in rows if row.get("category") is None and _speedup(row)]
    settings: dict[tuple, list[dict]] = {}
    for row in wholes:
        settings.setdefault(_setting(row), []).append(row)
    return [f"{_name(own[0], wholes)}: {_advice(own, parts)}" for own in settings.values()]


def _setting(row: dict) -> tuple:
    keys = ("target", "temperature", "batch_size", "prompt_set", "context", "new_tokens")
    return tuple(str(row.get(key)) for key in keys)


def _name(row: dict, wholes: Sequence[dict]) -> str:
    """The setting, with the set of prompts where there are several."""
    head = [columns.spell(row.get("target"))]
    head += [columns.spell(row.get("temperature"), "temperature {:g}")]
    head += [columns.spell(row.get("batch_size"), "batch {:g}")]
    if prompts := columns.prompt_names(wholes):
        head.append(next(name for name, each in zip(prompts, wholes, strict=True) if each is row))
    return inputs.one_line(", ".join(filter(None, head)))


def _speedup(row: dict) -> float:
    return number_of(row.get("speedup")) or 0.0


def _advice(rows: Sequence[dict], parts: Mapping[int, Sequence[dict]]) -> str:
    """About the rows of one setting; ``parts`` has the rows of their categories by their ids."""
    right = [row for row in rows if inputs.passed(part(row, "lossless")) is not False]
    if not right:
        return "no drafter passed its lossless check"
    best = max(right, key=_speedup)
    speed, name = _speedup(best), inputs.one_line(inputs.label(best))
    ends = best.get("speedup_interval")
    low = number_of(ends[0]) if isinstance(ends, list) and len(ends) == 2 else None
    shown = f"{speed:.2f}x of plain decoding"
    shown += f" {text}" if (text := columns.interval(best)).startswith("[") else ""
    name += f" ({columns.LOSSY})" if best.get("class") == "L3" else ""
    if speed < WORTH:
        head = f"no drafter is worth its time; the fastest is {name}, with {shown}"
    elif low is not None and low < 1:
        head = f"{name} may be faster than plain decoding ({shown}); measure more prompts"
    else:
        head = f"{name} is the fastest, {shown}"
    return ". ".join([head + _by_category(parts.get(id(best), ())), *_limit(best)]) + "."


def _by_category(rows: Sequence[dict]) -> str:
    """The categories with the highest and the lowest speed-up; "" if there are fewer than two."""
    if len(rows) < 2:
        return ""
    least, *_, most = sorted(rows, key=_speedup)
    texts = (
        f"{inputs.one_line(str(row['category']))} {_speedup(row):.2f}x" for row in (most, least)
    )
    return f"; by category from {' to '.join(texts)}"


def _limit(row: dict) -> list[str]:
    """What a round gives and costs, and what is in the way; [] if the costs are not known."""
    costs, tau = part(row, "costs_ms"), number(row, "block_efficiency")
    step, verify, draft = (number(costs, key) for key in ("step", "verify", "draft"))
    if None in (step, verify, draft, tau) or min(step, verify, tau) <= 0 or draft < 0:
        return []
    total = (verify + draft) / step
    parts = f"the verification {verify / step:.2f}, the draft {draft / step:.2f}"
    text = f"A round gives {tau:.2f} tokens and costs {total:.2f} plain rounds ({parts})"
    # The factor of the speed-up without each obstacle.
    gains = {
        "the time of the verification": total / (1 + draft / step),
        "the time of the draft": total / (verify / step),
    }
    if (longest := number(row, "gamma")) is not None:
        gains["the acceptance"] = (longest + 1) / tau
    worst = max(gains, key=lambda name: gains[name])
    return [f"{text}; {worst} limits it most"]
