"""The bytes that each token of a vocabulary stands for.

Two tokenizers can spell one text differently; as bytes their tokens can be compared. Byte-level BPE
(GPT-2, Llama 3) and vocabularies in the style of SentencePiece (BPE or Unigram, with or without
byte fallback) are read; a token may be a part of a character.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from typing import Any

from tokenizers import Tokenizer

from specjax.errors import UserError

MARKER = "▁"  # of a space, in the style of SentencePiece
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte -> its character in byte-level vocabularies (GPT-2): itself, or one from number 256 on.
_SHOWN = {*range(33, 127), *range(161, 173), *range(174, 256)}
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_CHARACTERS = {byte: chr(byte) for byte in _SHOWN}
_CHARACTERS |= {byte: chr(256 + i) for i, byte in enumerate(_HIDDEN)}
_BYTES = {character: byte for byte, character in _CHARACTERS.items()}


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """The tokens of a vocabulary as bytes, read from its tokenizer when they are first needed.

    Objects with equal names, and equal ids that begin and end a text, are equal.
    """

    name: str  # of the vocabulary: ``LM.vocabulary``
    source: Tokenizer | tuple[bytes | None, ...] = dataclasses.field(compare=False, repr=False)
    begin: int | None = None  # id that begins a text
    ends: tuple[int, ...] = ()  # ids that end a text

    @functools.cached_property
    def tokens(self) -> tuple[bytes | None, ...]:
        """The bytes of each id; None: a special token, or no token at all. Raises UserError."""
        if isinstance(self.source, tuple):
            return self.source
        vocabulary = {i: token for token, i in self.source.get_vocab().items()}
        added = self.source.get_added_tokens_decoder()
        own = self.source.get_vocab(with_added_tokens=False)
        result: list[bytes | None] = [None] * (max(vocabulary, default=-1) + 1)
        for i, token in vocabulary.items():
            # A token of the model that is added again is written as the model's others.
            if i not in added or not added[i].special:
                result[i] = self._style.read(token) if token in own else added[i].content.encode()
        return tuple(result)

    @functools.cached_property
    def special(self) -> dict[str, int]:
        """The special tokens: content -> id."""
        if isinstance(self.source, tuple):
            return {}
        added = self.source.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @functools.cached_property
    def fallback(self) -> frozenset[int]:
        """The tokens that are written as one byte: "<0xE2>"."""
        if isinstance(self.source, tuple) or not self._style.fallback:
            return frozenset()
        vocabulary = self.source.get_vocab()
        return frozenset(i for token, i in vocabulary.items() if _FALLBACK.fullmatch(token))

    @functools.cached_property
    def ids(self) -> dict[bytes, int]:
        """Bytes -> the token that stands for them; not a byte token if there is another one."""
        result: dict[bytes, int] = {}
        for i in sorted(range(len(self.tokens)), key=lambda i: (i in self.fallback, i)):
            if data := self.tokens[i]:
                result.setdefault(data, i)
        return result

    @functools.cached_property
    def _style(self) -> _Style:
        assert isinstance(self.source, Tokenizer)
        return _style_of(json.loads(self.source.to_str()))

    def encode(self, data: bytes) -> list[int]:
        """Tokens that stand for the bytes; bytes that no token can express are left out.

        The tokenizer's own where it gives tokens of exactly these bytes, else the fewest.
        """
        if isinstance(self.source, Tokenizer) and (text := self._style.write(data)) is not None:
            # A Unigram model without an unknown token raises no narrower exception.
            with contextlib.suppress(Exception):
                own = [token.id for token in self.source.model.tokenize(text)]
                if b"".join(self.tokens[i] or b"" for i in own) == data:
                    return own
        return fewest(data, self.ids)


@dataclasses.dataclass(frozen=True)
class _Style:
    """How a vocabulary writes bytes as strings."""

    byte_level: bool  # each byte is a character, as in GPT-2
    marker: bool  # a space is MARKER
    fallback: bool  # "<0xE2>" is a byte

    def read(self, token: str) -> bytes:
        """The bytes of a token."""
        if self.byte_level:
            return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in token)
        if self.fallback and (match := _FALLBACK.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace(MARKER, " ") if self.marker else token).encode()

    def write(self, data: bytes) -> str | None:
        """The string in which the tokenizer's model looks for tokens; None: no such string."""
        if self.byte_level:
            return "".join(_CHARACTERS[byte] for byte in data)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        return text.replace(" ", MARKER) if self.marker else text


def fewest(data: bytes, ids: dict[bytes, int]) -> list[int]:
    """The fewest tokens that stand for the bytes, the longest first among equal numbers.

    A byte that is in no token is left out.
    """
    # (bytes left out, tokens) of the rest, and the length of the first piece; 0: left out.
    best: list[tuple[int, int]] = [(0, 0)] * (len(data) + 1)
    first = [0] * len(data)
    for start in range(len(data) - 1, -1, -1):
        best[start] = best[start + 1][0] + 1, best[start + 1][1]
        for size in range(1, len(data) - start + 1):
            lost, count = best[start + size]
            if data[start : start + size] in ids and (lost, count + 1) <= best[start]:
                best[start], first[start] = (lost, count + 1), size
    result, at = [], 0
    while at < len(data):
        if first[at]:
            result.append(ids[data[at : at + first[at]]])
        at += first[at] or 1
    return result


def _style_of(raw: dict[str, Any]) -> _Style:
    """The style of a tokenizer.json. Raises UserError for one that has no bytes."""
    kind = raw["model"].get("type", "BPE")
    if kind not in ("BPE", "Unigram"):
        raise UserError(
            f"a tokenizer with a {kind} model does not say which bytes its tokens stand for; "
            "models with other vocabularies need BPE or Unigram tokenizers"
        )
    if raw["model"].get("end_of_word_suffix") or raw["model"].get("continuing_subword_prefix"):
        raise UserError(
            "a tokenizer that marks the ends or the insides of words (end_of_word_suffix, "
            "continuing_subword_prefix) is not supported for models with other vocabularies"
        )
    parts = list(_parts([raw.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]))
    replaced = [part.get("pattern", {}).get("String") for part in parts]
    replaced += [part.get("content") for part in parts]
    return _Style(
        byte_level=any(part.get("type") == "ByteLevel" for part in parts),
        marker=MARKER in replaced or any(part.get("type") == "Metaspace" for part in parts),
        fallback=bool(raw["model"].get("byte_fallback")),
    )


def _parts(value: Any):
    """The objects with a type inside a part of a tokenizer.json."""
    if isinstance(value, list):
        for each in value:
            yield from _parts(each)
    elif isinstance(value, dict):
        yield value
        for key in ("normalizers", "pretokenizers", "decoders"):
            yield from _parts(value.get(key))
