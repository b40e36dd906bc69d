"""Pairs of a source and its output, which encoder-decoder models learn.

Three sources of pairs: .jsonl files with lines {"source": text, "output": text}; conversations, of
which each answer is an output and the turns before it are its source; and the embedded corpus, of
whose functions the docstring is the output and the code without it the source.

A pair becomes one document: the source as the tokenizer encodes it, the start token of the decoder,
the output, and the token that ends it. The labels are the output and its end.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, processors

from specjax.data import dialogues, jsonl, text_files, token_streams
from specjax.data.corpora import SPLITS
from specjax.data.packing import Document
from specjax.errors import UserError
from specjax.files import buckets

DOCSTRINGS = "docstrings"  # the name of the pairs of the embedded corpus
PAD, END = "<pad>", "</s>"  # ids 0 and 1 of the tokenizers made for pairs
KEYS: dict[str, str] = dict.fromkeys(("source", "output"), "text that is not empty")
# Turns of a conversation before an answer that are its source.
TURNS = 3
# Names of the token that begins an output, and of the one that ends it, in their order.
_STARTS = (PAD, token_streams.SEPARATOR, "<s>", "<bos>", "<|begin_of_text|>")
_ENDS = (END, token_streams.SEPARATOR, "<eos>", "<|end_of_text|>", "<|im_end|>")


class Pair(NamedTuple):
    """One text to learn."""

    where: str  # file and line, for messages
    source: str
    output: str


class OutputEnds(NamedTuple):
    """The token that begins every output, and the one that ends it (None: nothing ends it)."""

    start: int
    end: int | None


def train_tokenizer(pairs: Sequence[Pair], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer as T5's: <pad> is id 0, </s> is id 1 and ends every text.

    Raises UserError if ``vocab_size`` cannot hold the 256 bytes and the special tokens.
    """
    texts = [text for pair in pairs for text in (pair.source, pair.output)]
    tokenizer = token_streams.train_tokenizer(texts, vocab_size, (PAD, END))
    ends = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {END}", special_tokens=ends)
    return tokenizer


def ends_of(tokenizer: Tokenizer) -> OutputEnds:
    """The start token and the end token of a new model with this tokenizer.

    The start token is one that the tokenizer puts into no text. Raises UserError if there is none.
    """
    start = token_streams.first_id(tokenizer, _STARTS, tokenizer.encode("a").ids)
    end = token_streams.first_id(tokenizer, _ENDS)
    if start is None or end is None:
        raise UserError(
            f"the tokenizer has no token to {'begin' if start is None else 'end'} an output with "
            f"(one of {', '.join(_STARTS if start is None else _ENDS)}); give another "
            "config.tokenizer, or none"
        )
    return OutputEnds(start, end)


def read(file: str | Path) -> list[Pair]:
    """The pairs of a .jsonl file, in its order.

    Raises UserError, with the line: not an object with these two texts, another key, an empty text.
    """
    path = buckets.local(file)
    where = f"file of pairs {path}"
    pairs = []
    for line in jsonl.objects(jsonl.read(path, where, compressed=True), where):
        value = line.check("pairs", KEYS)
        if others := sorted(value.keys() - KEYS):
            raise UserError(
                f'{line.where} has the key "{others[0]}"; its keys are "source" and "output"'
            )
        pairs.append(Pair(f"{path} line {line.number}", value["source"], value["output"]))
    if not pairs:
        raise UserError(f"{where} has no pair; give at least one")
    return pairs


def load(files: Sequence[str], split: str) -> list[Pair]:
    """The pairs of a split ("train", "valid", "test") of .jsonl files.

    The splits are 90 %, 5 % and 5 % of each file, as for texts (``text_files.part_of``). Raises
    UserError: see ``read``.
    """
    size = lambda pair: len(pair.source) + len(pair.output)  # noqa: E731
    return [pair for pairs in map(read, files) for pair in text_files.part_of(pairs, split, size)]


def turns(files: Sequence[str], split: str) -> list[Pair]:
    """The answers in a split of .jsonl files of conversations, each with the turns before it.

    The splits are those of ``dialogues.load``. Raises UserError: see ``dialogues.read``.
    """
    chosen = []
    for where, messages in dialogues.conversations_of(files, split):
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and number:
                before = messages[max(0, number - TURNS) : number]
                source = "\n".join(f"{each['role']}: {each['content']}" for each in before)
                chosen.append(Pair(where, source, message["content"]))
    return chosen


def docstrings(texts: Sequence[tuple[str, str]]) -> list[Pair]:
    """The functions of (path, Python source) that have a docstring: code and first paragraph.

    Nothing is executed. Functions without other code, and files that this interpreter cannot parse,
    are left out; of functions with the same code all but the first one.
    """
    unique: dict[str, Pair] = {}
    for path, text in texts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the code that is read
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        # As ``ast`` counts lines: not at form feeds.
        for pair in _documented(path, re.split(r"\r\n|\r|\n", text), tree):
            unique.setdefault(pair.source, pair)
    return list(unique.values())


def _documented(path: str, lines: list[str], tree: ast.AST) -> Iterator[Pair]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        text, first = ast.get_docstring(node), node.body[0]
        # A docstring in a line of the signature cannot be cut out as a line.
        before = lines[first.lineno - 1][: first.col_offset]
        if not text or not text.strip() or before.strip():
            continue
        rest = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
        source = textwrap.dedent("\n".join(rest)).strip()
        output = " ".join(text.strip().split("\n\n")[0].split())
        yield Pair(f"{path} line {node.lineno}", source, output)


def split_of(every: Callable[[str], list[Pair]], split: str) -> list[Pair]:
    """The pairs ``every(split)`` without those whose source is in a later split.

    The splits are "train", "valid" and "test": what a model is examined on is in no training.
    """
    later = SPLITS[SPLITS.index(split) + 1 :]
    held_out = {pair.source for other in later for pair in every(other)}
    return [pair for pair in every(split) if pair.source not in held_out]


def held_out_sources(
    pairs: Sequence[Pair], tokenizer: Tokenizer, count: int, most: int, seed: int = 0
) -> list[list[int]]:
    """The token ids of ``count`` different sources of at most ``most`` tokens, in a random order.

    Raises UserError if there are not enough of them.
    """
    unique = list(dict.fromkeys(pair.source for pair in pairs))
    short = [each.ids for each in tokenizer.encode_batch(unique) if len(each.ids) <= most]
    if len(short) < count:
        raise UserError(
            f"only {len(short)} of {len(unique)} sources have at most {most} tokens, {count} "
            "wanted; allow more tokens, or ask for fewer prompts"
        )
    order = np.random.default_rng([seed, count, most]).permutation(len(short))
    return [short[i] for i in order[:count]]


def documents(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    ends: OutputEnds,
    length: int,
    leave_out: bool = False,
) -> tuple[list[Document], int]:
    """(a document for each pair, the number of pairs that were left out).

    Args:
        pairs: texts.
        tokenizer: encodes a source with the special tokens of a text, an output without.
        ends: the tokens around an output.
        length: of a row; a document has at most one token more.
        leave_out: leave longer pairs out. Otherwise they are refused.

    Raises UserError for a pair that is too long, a source with the start token, and an output with
    the start or the end token.
    """
    sources = tokenizer.encode_batch([pair.source for pair in pairs])
    outputs = tokenizer.encode_batch([pair.output for pair in pairs], add_special_tokens=False)
    last = [] if ends.end is None else [ends.end]
    result = []
    for pair, source, output in zip(pairs, sources, outputs, strict=True):
        if ends.start in source.ids:
            raise UserError(
                f"{pair.where}: the source has the token {ends.start}, with which the decoder "
                "begins its output; take it out of the text"
            )
        if inside := {ends.start, ends.end} & set(output.ids):
            raise UserError(
                f"{pair.where}: the output has the token {inside.pop()}, with which an output "
                "begins or ends; take it out of the text"
            )
        after = [*output.ids, *last]
        ids = np.array([*source.ids, ends.start, *after], np.int32)
        if len(ids) <= length + 1:
            result.append(Document(ids, np.arange(len(ids)) >= len(ids) - len(after)))
        elif not leave_out:
            raise UserError(
                f"{pair.where}: source and output have {len(source.ids)} and {len(after)} tokens "
                f"with their ends, which do not fit into config.train.length {length}; raise it, "
                "or give config.data.long_pairs=leave_out"
            )
    return result, len(pairs) - len(result)
