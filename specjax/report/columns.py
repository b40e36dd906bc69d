"""The columns of a report's table with their definitions, and the values in a row's details."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """A column of the table."""

    key: str
    head: str
    meaning: str
    number_format: str = ""  # "" in columns of text


COLUMNS = (
    Column(
        "method",
        "method",
        "the label of the drafter and its settings; warm: it has learnt from other prompts before",
    ),
    Column(
        "accept",
        "rule",
        "the acceptance rule: it decides which draft tokens become part of the output",
    ),
    Column(
        "class",
        "class",
        "L1: the output law is the target's; L2: identical under greedy decoding; "
        "L3: lossy by design; proven: by the tests of specjax, or by a report of its checks; "
        "declared: by the method's author",
    ),
    Column("temperature", "T", "the sampling temperature; 0 is greedy decoding", "{:g}"),
    Column("batch_size", "batch", "rows decoded together", "{:g}"),
    Column("prompt_set", "prompts", "the set of prompts, and how many it has"),
    Column(
        "block_efficiency",
        "tau",
        "block efficiency: tokens per round of a row, including the target's own token, after "
        "cutting at end-of-sequence and limits; between 1 and gamma + 1; below it the standard "
        "error over prompts",
        "{:.2f}",
    ),
    Column(
        "repeated_4grams",
        "loops",
        "repeated 4-grams: the share of all sequences of four tokens in an output that occurred in "
        "it before; text that loops is easy to predict, so a large share explains a large tau",
        "{:.0%}",
    ),
    Column(
        "acceptance_rate",
        "alpha",
        "acceptance rate: accepted / tested draft tokens; a token is tested if all tokens before "
        "it were accepted (on a tree: some sibling at a tested depth); below it the standard "
        "error over prompts",
        "{:.2f}",
    ),
    Column(
        "tokens_per_second",
        "tokens/s",
        "tokens of all rows per second of decoding, without prefill",
        "{:,.0f}",
    ),
    Column(
        "autoregressive_tokens_per_second",
        "plain",
        "tokens/s of our own autoregressive loop: same model, precision and batch",
        "{:,.0f}",
    ),
    Column(
        "speedup",
        "speed-up",
        "tokens/s divided by those of plain decoding, median of interleaved passes; below it the "
        "minimum and the maximum",
        "{:.2f}x",
    ),
    Column(
        "predicted_speedup",
        "predicted",
        "tokens per iteration of the loop, divided by those of plain decoding, times (time of a "
        "one-token pass) / (time to draft + time to verify), each measured alone",
        "{:.2f}x",
    ),
    Column(
        "system_efficiency",
        "eff",
        "system efficiency: speed-up / predicted speed-up; n/m, not measurable: it is far above 1, "
        "so the parts of a round took longer alone than in the loop",
        "{:.2f}",
    ),
    Column(
        "lossless",
        "lossless",
        "greedy: the same tokens as plain decoding, for each prompt; sampled: two statistical "
        "tests of the outputs against the target's law, which detect large errors only; "
        "?: too few tokens for a result",
    ),
)

# (term, meaning) of what only the details of a row and the traces show.
DETAILS = (
    (
        "gamma",
        "the longest path of draft tokens that a round can accept; on a chain, draft tokens per "
        "round",
    ),
    ("nodes", "draft tokens per round; on a tree more than gamma"),
    ("acceptance by depth", "alpha of each depth, given that all depths before were accepted"),
    (
        "overlap",
        "Σ min(target's probability, draft's probability) over the vocabulary, mean over all "
        "positions of the target's text",
    ),
    (
        "95% interval of the speed-up",
        "on other prompts of this kind: Student t of the log ratio over prompts, or over batches; "
        "it does not cover what the machine does",
    ),
    (
        "step, draft, verify",
        "time of a one-token pass of the target, of one whole draft, of the pass that verifies it; "
        "median of the passes",
    ),
    (
        "probabilities of a trace",
        "of each token under the sampling settings, by the target and by the draft; at temperature "
        "0, where all would be 0 or 1, under temperature 1",
    ),
)

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
    ("prefill_seconds", "prefill", "{:.3g} s"),
    ("compile_seconds", "compilation", "{:.3g} s"),
)

CATEGORY_HEADS = (
    "category",
    "prompts",
    "tau",
    "loops",
    "alpha",
    "overlap",
    "tokens/s",
    "speed-up",
)
