"""The text that each token of a continuation adds: what a token reads as depends on the tokens around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REACH = 8  # tokens of context; wider where the text shows that they are too few
PATIENCE = 8  # tokens that may settle nothing before the context is held too narrow: a character has four bytes

Decode = Callable[[list[int]], str]


def spell(ids: Sequence[int], decode: Decode, prefix: Sequence[int] = ()) -> list[str]:
    r"""The text that every token of ``ids`` adds behind ``prefix``.

    After i tokens, as much text is settled as ``decode`` of those i has in common with ``decode`` of all; a token adds what
    it settles. Hence a token that ends in half a character adds "", and the one that completes it adds the whole; and the
    texts together are what ``decode`` makes of ``ids`` behind ``prefix`` (with the character that the prefix may have begun).
    The cost of a token is a ``decode`` of some ten tokens, however long the text: a longer context is taken where a short
    one does not read as the whole text does (its first space stripped, its first character cut).

    Args:
        ids: tokens, in order.
        decode: token ids to text, as ``tokenizers.Tokenizer.decode``.
        prefix: the tokens before them; their text is not repeated.
    """
    every = [int(token) for token in (*_tail(prefix, decode), *ids)]
    whole = _text(every, decode)
    silent = {
        token for token in set(every) if not decode([token, token])
    }  # two: a lone space may be stripped
    if silent and _text([token for token in every if token not in silent], decode) != whole:
        silent = set()
    heard = [token for token in every if token not in silent]
    first = sum(token not in silent for token in every[: len(every) - len(ids)])
    texts = iter(_settle(heard, first, whole, decode))
    return ["" if token in silent else next(texts) for token in every[len(every) - len(ids) :]]


def _settle(ids: list[int], first: int, whole: str, decode: Decode) -> list[str]:
    """What every token from ``first`` on settles of ``whole``, the text of ``ids``."""
    pieces: list[str] = []
    begun = _text(ids[:first], decode)
    settled = known = _common(begun, whole, 0)
    good, at = (
        (first, settled) if settled == len(begun) else (0, 0)
    )  # the last cut whose text begins the whole
    start = offset = 0  # the context begins at this token, and its text at this place of the whole
    patience, reach, number = PATIENCE, REACH, first
    while number < len(ids):
        number += 1
        text = decode(ids[start:number])
        reached = offset + _common(text, whole, offset)
        if reached == offset + len(text):
            good, at, patience, reach = number, reached, PATIENCE, REACH
            if number - start > 2 * REACH:
                start, offset = _context(ids, number, reach, whole, at, decode)
        elif (
            start and number - good >= patience
        ):  # read again with a wider context what did not fit
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
    """(token, place in ``whole``) where a context of at least ``reach`` tokens begins that reads as the whole at ``cut``."""
    while reach < cut:
        for start in range(cut - reach, max(cut - reach - 4, 0), -1):
            text = decode(ids[start:cut])
            if text and whole.endswith(text, 0, at):  # an empty one may lose the next token's space
                return start, at - len(text)
        reach *= 2
    return 0, 0


def _tail(prefix: Sequence[int], decode: Decode) -> list[int]:
    """As many last tokens of a prefix as read the same behind as many again."""
    reach = 2 * REACH
    while 2 * reach < len(prefix):
        near, far = (decode(list(prefix[-length:])) for length in (reach, 2 * reach))
        if near and far.endswith(near):
            return list(prefix[-reach:])
        reach *= 2
    return list(prefix)


def _common(text: str, whole: str, offset: int) -> int:
    """How many characters ``text`` has in common with ``whole`` from ``offset`` on."""
    if whole.startswith(text, offset):
        return len(text)
    pairs = zip(text, whole[offset : offset + len(text)], strict=False)
    return next(
        (n for n, (one, other) in enumerate(pairs) if one != other),
        min(len(text), len(whole) - offset),
    )


def _text(ids: list[int], decode: Decode) -> str:
    return decode(ids) if ids else ""
