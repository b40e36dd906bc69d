"""The columns of every table of results: their names, formats and meanings, and a row's texts.

The terminal, the HTML report, LaTeX, Markdown and the documentation show these columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specjax.errors import UserError
from specjax.report import inputs
from specjax.report.inputs import number_of, part

DASH, NOT_MEASURABLE, TOO_FEW = "-", "n/m", "too few"
LOSSY = "lossy by design"
# An efficiency above this was not measured well: the parts of a round took less time in the loop
# than alone. Somewhat more than 1 is possible.
MOST_EFFICIENT = 1.2


def spell(value: Any, number_format: str = "") -> str:
    """The value as text; "" for None, and for what is not a number if it should be one."""
    if value is None or not number_format:
        return "" if value is None else str(value)
    number = number_of(value)
    return "" if number is None else number_format.format(number)


def too_efficient(row: dict) -> bool:
    """Whether the system efficiency is so far above 1 that it was not measured."""
    value = number_of(row.get("system_efficiency"))
    return value is not None and value > MOST_EFFICIENT


def interval(row: dict) -> str:
    """The 95 % interval of the speed-up; "too few" if one or two prompts or batches are its sample.

    "" if it is not known.
    """
    prompts, batch = (number_of(row.get(key)) for key in ("prompts", "batch_size"))
    measured = number_of(row.get("speedup")) is not None
    if measured and prompts is not None and prompts <= 2 * (batch or 1):
        return TOO_FEW
    return ends(row.get("speedup_interval"), "[{:.2f}, {:.2f}]")


def ends(values: Any, number_format: str) -> str:
    """Both ends of a range; "" if they are not known."""
    numbers = [number_of(end) for end in values] if isinstance(values, list) else []
    return "" if len(numbers) != 2 or None in numbers else number_format.format(*numbers)


def _marks(row: dict) -> str:
    category = row.get("category")
    marks = [] if category is None else [f"category {category}"]
    return ", ".join([*marks, *(["warm"] if row.get("warm") is True else [])])


def _class_status(row: dict) -> str:
    status = row.get("class_status")
    if row.get("class") == "L3":
        return "lossy"
    return status if row.get("class") and status in ("proven", "declared") else ""


def _efficiency(row: dict) -> str:
    value = spell(row.get("system_efficiency"), "{:.2f}")
    return NOT_MEASURABLE if too_efficient(row) else value


def _beyond(row: dict) -> str:
    """The efficiency that is not a measurement."""
    return spell(row.get("system_efficiency"), "{:.2f}") if too_efficient(row) else ""


def _lossless(row: dict) -> str:
    check = part(row, "lossless")
    return {True: "yes", False: "NO", None: "?"}[inputs.passed(check)] if check else ""


def _check_detail(row: dict) -> str:
    check, lossy = part(row, "lossless"), row.get("class") == "L3"
    if not check:
        return LOSSY if lossy else ""
    # Sampled texts of class L2 have another law.
    lossy |= row.get("class") == "L2" and row.get("temperature") != 0
    if inputs.passed(check) is None:
        undecided = LOSSY if lossy else "too few tokens"
        return undecided if check.get("passed") is None else "neither true nor false"
    return str(check.get("detail") or "").rpartition(", ")[2]


def near_ties(row: dict) -> str:
    """How far rounding separates the texts from the target's, as a sentence; "" if not known."""
    wide = part(row, "width_gap")
    mean, most, width = (number_of(wide.get(key)) for key in ("mean", "largest", "width"))
    if mean is not None and most is not None and width is not None:
        text = f"in {wide.get('dtype')} a pass over {width:g} tokens gives probabilities within "
        return f"{text}{most:.2g} total variation of those of passes over one (mean {mean:.2g})"
    found = part(row, "argmax_gap")
    within, largest, ulps = (number_of(found.get(k)) for k in ("within", "largest_ulps", "ulps"))
    if within is None or largest is None or ulps is None:
        return ""
    yes, tokens = "yes" if within == 1 else "NO", spell(found.get("tokens"), "{:,.0f}")
    text = f"lossless up to ties of {ulps:g} ulp of {found.get('dtype')}: {yes} ("
    text += f"{within:.2%} of {tokens} tokens; the largest gap is {largest:.3g} ulp"
    if first := part(found, "first_difference"):
        text += f"; first difference at token {spell(first.get('token'), '{:g}')} of prompt "
        text += spell(first.get("prompt"), "{:g}")
    return f"{text})"


def _error(key: str) -> Callable[[dict], str]:
    """The standard error of a value, with its sign; "" if it is not known."""
    return lambda row: spell(part(row, "standard_errors").get(key), "\N{PLUS-MINUS SIGN} {:.2f}")


def _distance(row: dict) -> str:
    """What belongs to the total variation: KL, or at temperature 0 the texts that changed."""
    parts = spell(row.get("kl_divergence"), "KL {:.3g}"), spell(row.get("texts_changed"), "{:.0%}")
    return parts[0] or (parts[1] and f"{parts[1]} changed")


def has_distance(row: dict) -> bool:
    """Whether a row has what the column "TV" shows; rows of lossless rules have not."""
    return number_of(row.get("total_variation")) is not None or bool(_distance(row))


def _prompts(row: dict) -> str:
    return spell(row.get("prompts"), "{:g}")


# Key of a column -> its meaning.
MEANINGS = {
    "method": "the label of the drafter and its settings; warm: it has learnt from other prompts "
    "before",
    "accept": "the acceptance rule: it decides which draft tokens become part of the output",
    "class": "L1: the output law is the target's; L2: identical under greedy decoding; L3: lossy "
    "by design; proven: by the tests of specjax, or by a report of its checks; declared: by the "
    "method's author",
    "temperature": "the sampling temperature; 0 is greedy decoding",
    "batch_size": "rows decoded together",
    "prompt_set": "the set of prompts, and how many it has",
    "block_efficiency": "block efficiency: tokens per round of a row, including the target's own "
    "token, after cutting at end-of-sequence and limits; between 1 and gamma + 1; with the "
    "standard error over prompts",
    "repeated_4grams": "repeated 4-grams: the share of all sequences of four tokens in an output "
    "that occurred in it before; text that loops is easy to predict, so a large share explains a "
    "large tau",
    "acceptance_rate": "acceptance rate: accepted / tested draft tokens; a token is tested if all "
    "tokens before it were accepted (on a tree: some sibling at a tested depth); with the standard "
    "error over prompts",
    "tokens_per_second": "tokens of all rows per second of decoding, without prefill",
    "autoregressive_tokens_per_second": "tokens/s of our own autoregressive loop: same model, "
    "precision and batch",
    "speedup": "tokens/s divided by those of plain decoding, median of interleaved passes; with "
    "its 95% interval on other prompts of this kind: Student t of the log ratio over prompts, or "
    "over batches (too few: fewer than three); it does not cover what the machine does",
    "predicted_speedup": "tokens per iteration of the loop, divided by those of plain decoding, "
    "times (time of a one-token pass) / (time to draft + time to verify), each measured alone",
    "system_efficiency": "system efficiency: speed-up / predicted speed-up; n/m, not measurable: "
    "it is far above 1, so the parts of a round took longer alone than in the loop",
    "total_variation": "of a lossy rule: total variation (half the sum of absolute differences) "
    "between the law of the emitted token and the target's probabilities, mean over the places "
    "where the rule tested a draft token; with the KL divergence of that law from the target's in "
    "nats; at temperature 0 the share of texts that are not those of plain decoding",
    "lossless": "greedy: the same tokens as plain decoding, for each prompt; sampled: two "
    "statistical tests of the outputs against the target's law, which detect large errors only; ?: "
    "too few tokens for a result",
}


class Column(NamedTuple):
    """A column of the table."""

    key: str  # of a row of results.json
    head: str
    number_format: str = ""  # "" in columns of text
    # The text of a value that its format alone does not give.
    value: Callable[[dict], str] | None = None
    # What qualifies the value: its error, its interval, or a reason.
    detail: Callable[[dict], str] = lambda _: ""
    short: str = ""  # the name where there is little room
    latex: str = ""  # the name in LaTeX

    @property
    def meaning(self) -> str:
        """What the column shows."""
        return MEANINGS[self.key]

    def text(self, row: dict) -> str:
        """The value of a row as text; "" if it is not known."""
        return self.value(row) if self.value else spell(row.get(self.key), self.number_format)


COLUMNS = (
    Column("method", "method", detail=_marks),
    Column("accept", "rule"),
    Column("class", "class", detail=_class_status),
    Column("temperature", "T", "{:g}"),
    Column("batch_size", "batch", "{:g}"),
    Column("prompt_set", "prompts", detail=_prompts),
    Column("block_efficiency", "tau", "{:.2f}", detail=_error("block_efficiency"), latex=r"$\tau$"),
    Column("repeated_4grams", "loops", "{:.0%}"),
    Column(
        "acceptance_rate", "alpha", "{:.2f}", detail=_error("acceptance_rate"), latex=r"$\alpha$"
    ),
    Column("tokens_per_second", "tokens/s", "{:,.0f}"),
    Column("autoregressive_tokens_per_second", "plain", "{:,.0f}"),
    Column("speedup", "speed-up", "{:.2f}x", detail=interval),
    Column("predicted_speedup", "predicted", "{:.2f}x", short="pred"),
    Column("system_efficiency", "eff", "{:.2f}", value=_efficiency, detail=_beyond),
    Column("total_variation", "TV", "{:.3f}", detail=_distance),
    Column("lossless", "lossless", value=_lossless, detail=_check_detail),
)
BY_KEY = {column.key: column for column in COLUMNS}
CATEGORY = Column("category", "category")

# Term -> meaning, of what only the details of a row and the traces show.
DETAILS = {
    "gamma": "the longest path of draft tokens that a round can accept; on a chain, draft tokens "
    "per round",
    "nodes": "draft tokens per round; on a tree more than gamma",
    "acceptance by depth": "alpha of each depth, given that all depths before were accepted",
    "overlap": "Σ min(target's probability, draft's probability) over the vocabulary, mean over "
    "all positions of the target's text",
    "near ties": "each greedy token scored by a plain pass over its whole text: the largest logit "
    "minus the token's, in ulps at the largest logit of the dtype in which the model computes; "
    "yes: every token is within the stated number; of texts that differ from plain decoding, and "
    "of all in a dtype narrower than float32. Of sampled texts in such a dtype: the total "
    "variation between the target's probabilities by passes over the verified tokens and over one",
    "tau along the text": "tokens per round of the rounds that begin at positions 0, 32, 64, 128, "
    "... of the output, and of the context (prompt and output), with 95 % intervals over prompts",
    "speed-up of the passes": "of the slowest and of the fastest of the interleaved passes",
    "step, draft, verify": "time of a one-token pass of the target, of one whole draft, of the "
    "pass that verifies it; median of the passes",
    "probabilities of a trace": "of each token under the sampling settings, by the target and by "
    "the draft; at temperature 0, where all would be 0 or 1, under temperature 1",
}

# (key, head, number format) of the values in the details of a row.
FACTS = (
    ("drafter", "drafter", ""),
    ("gamma", "gamma", "{:g}"),
    ("nodes", "nodes", "{:g}"),
    ("tokens", "tokens", "{:,.0f}"),
    ("rounds", "rounds", "{:,.0f}"),
    ("accepted_per_round", "accepted per round", "{:.2f}"),
    ("verified_per_round", "verified per round", "{:.2f} tokens"),
    ("context", "mean prompt", "{:.0f} tokens"),
    ("new_tokens", "new tokens, at most", "{:g}"),
    ("prefill_seconds", "prefill", "{:.3g} s"),
    ("compile_seconds", "compilation", "{:.3g} s"),
    ("tokens_per_second_per_device", "on each device", "{:,.0f} tokens/s"),
    ("bandwidth_share", "plain decoding's share of the bandwidth", "{:.0%} of the datasheet's"),
)


def table(
    rows: Sequence[dict], joints: Mapping[str, str], heads: Sequence[str] = ()
) -> tuple[list[Column], list[list[str]]]:
    """(columns, the texts of each row in them): tables of text, of rows without categories or with.

    Args:
        rows: of results.json.
        joints: key of a column with its details -> what stands between a value and its detail.
        heads: names of the columns; () = all that hold a measurement or distinguish rows.

    Raises:
        UserError: there is no such column.
    """
    prompts = prompt_names(rows)
    chosen = [COLUMNS[0], CATEGORY, *COLUMNS[1:]]
    known = [column.head for column in chosen]
    if unknown := [head for head in heads if head not in known]:
        raise UserError(f"column {unknown[0]!r} is not one of {', '.join(known)}")
    if heads:
        chosen = [chosen[known.index(head)] for head in heads]
    else:
        one_category = all(row.get("category") is None for row in rows)
        left_out = {"prompt_set": not prompts, "category": one_category}
        left_out["total_variation"] = not any(map(has_distance, rows))
        chosen = [column for column in chosen if not left_out.get(column.key)]
    texts = []
    for index, row in enumerate(rows):
        named = {**row, "prompt_set": prompts[index]} if prompts else row
        texts.append([joined(named, column, joints) for column in chosen])
    return chosen, texts


def joined(row: dict, column: Column, joints: Mapping[str, str]) -> str:
    """The value of a row, with its detail if ``joints`` has the column; see ``table``."""
    joint = joints.get(column.key)
    parts = [column.text(row), "" if joint is None else column.detail(row)]
    return (joint or "").join(filter(None, map(inputs.one_line, parts))) or DASH


def prompt_names(rows: Sequence[dict]) -> list[str]:
    """A name for the prompts of each row; [] if all rows have the same prompts and lengths.

    The mean length of the prompts is part of it if one set has several lengths, and the length of
    the outputs if there are several.
    """
    sets = [
        (str(row.get("prompt_set") or DASH), spell(row.get("context"), "{:.0f}")) for row in rows
    ]
    outputs = [spell(row.get("new_tokens"), "{:g}") for row in rows]
    if len(set(sets)) < 2 and len(set(outputs)) < 2:
        return []
    lengths = Counter(name for name, _ in set(sets))
    names = [
        f"{name}, {size} tokens" if lengths[name] > 1 and size else name for name, size in sets
    ]
    if len(set(outputs)) < 2:
        return names
    return [f"{name}, {new} new" if new else name for name, new in zip(names, outputs, strict=True)]
