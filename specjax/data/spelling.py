"""The text that each token of a continuation adds; a token's text depends on its neighbours."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

REACH = 8  # tokens of context; more are used where the text shows that these are too few
# Tokens that may settle no text before the context is considered too short. A character has up to
# four bytes, and a token may be one byte.
PATIENCE = 8

Decode = Callable[[list[int]], str]


def spell(ids: Sequence[int], decode: Decode, prefix: Sequence[int] = ()) -> list[str]:
    r"""The text that each token of ``ids`` adds after ``prefix``.

    After i tokens, the settled text is the common beginning of ``decode`` of these i and ``decode``
    of all tokens; a token adds the text that it settles. So a token that ends inside a character
    adds "", and the token that completes the character adds all of it. The joined texts are what
    ``decode`` gives for ``ids`` after ``prefix`` (with the character that the prefix may begin).

    A token costs one ``decode`` of about ten tokens, however long the text is. A longer context is
    used where a short one does not decode as the whole text (because its first space is stripped,
    or its first character is cut).

    Args:
        ids: tokens, in order.
        decode: token ids to text, for example ``tokenizers.Tokenizer.decode``.
        prefix: the tokens before them; their text is not in the result.
    """
    every = [int(token) for token in (*_tail(prefix, decode), *ids)]
    whole = _text(every, decode)
    # Tokens without text. Each is decoded twice in a row: a single space might be stripped.
    empty = {token for token in set(every) if not decode([token, token])}
    if empty and _text([token for token in every if token not in empty], decode) != whole:
        empty = set()
    visible = [token for token in every if token not in empty]
    before = len(every) - len(ids)
    first = sum(token not in empty for token in every[:before])
    texts = iter(_settle(visible, first, whole, decode))
    return ["" if token in empty else next(texts) for token in every[before:]]


def _settle(ids: list[int], first: int, whole: str, decode: Decode) -> list[str]:
    """The part of ``whole``, the text of ``ids``, that each token from ``first`` on settles."""
    pieces: list[str] = []
    begun = _text(ids[:first], decode)
    settled = known = _common(begun, whole, 0)
    # The text of ``ids[:good]`` is the last one so far that begins the whole text; ``at`` is its
    # length.
    good, at = (first, settled) if settled == len(begun) else (0, 0)
    # The context begins at the token ``start``; its text at the position ``offset`` of the whole.
    start = offset = 0
    patience, reach, number = PATIENCE, REACH, first
    while number < len(ids):
        number += 1
        text = decode(ids[start:number])
        reached = offset + _common(text, whole, offset)
        if reached == offset + len(text):
            good, at, patience, reach = number, reached, PATIENCE, REACH
            if number - start > 2 * REACH:
                start, offset = _context(ids, number, reach, whole, at, decode)
        elif start and number - good >= patience:
            # The context is too short: repeat these tokens with a longer one.
            patience, reach, number = 2 * patience, 4 * reach, max(good, first)
            del pieces[number - first :]
            settled = known + sum(map(len, pieces))
            start, offset = _context(ids, good, reach, whole, at, decode)
            continue
        pieces.append(whole[settled:reached])
        settled = max(settled, reached)
    return pieces


def _context(
    ids: list[int], cut: int, reach: int, whole: str, at: int, decode: Decode
) -> tuple[int, int]:
    """(first token, its position in ``whole``) of a context that ends before the token ``cut``.

    It has at least ``reach`` tokens, and its text equals the end of ``whole[:at]``.
    """
    while reach < cut:
        for start in range(cut - reach, max(cut - reach - 4, 0), -1):
            text = decode(ids[start:cut])
            # After an empty context the next token may lose its space.
            if text and whole.endswith(text, 0, at):
                return start, at - len(text)
        reach *= 2
    return 0, 0


def _tail(prefix: Sequence[int], decode: Decode) -> list[int]:
    """The last tokens of the prefix: enough that twice the number decodes to the same ending."""
    reach = 2 * REACH
    while 2 * reach < len(prefix):
        short, long = (decode(list(prefix[-length:])) for length in (reach, 2 * reach))
        if short and long.endswith(short):
            return list(prefix[-reach:])
        reach *= 2
    return list(prefix)


def _common(text: str, whole: str, offset: int) -> int:
    """The number of characters that ``text`` has in common with ``whole`` from ``offset`` on."""
    if whole.startswith(text, offset):
        return len(text)
    # It compares characters, of any texts.
    return len(os.path.commonprefix([text, whole[offset : offset + len(text)]]))  # noqa: RUF071


def _text(ids: list[int], decode: Decode) -> str:
    return decode(ids) if ids else ""
