"""The kind of word that each token of a text belongs to: which kinds does a drafter predict well?

Classes, in the order of ``CLASSES``:

- ``special``: decodes to an empty text in any context (begin and end of text).
- ``whitespace``: only blanks, indents and line breaks.
- ``punctuation``: no letter and no digit, and not part of a word.
- ``number``: part of a word that begins with a digit.
- ``function``: part of a closed-class English word (``ENGLISH``, in any case) or of a keyword of
  Python (``KEYWORDS``, case-sensitive).
- ``content``: part of any other word: names, nouns, verbs, identifiers, words of other languages.

A word is a run of letters, digits, underscores and combining marks, with apostrophes inside it
("don't"; a contraction has the class of its first half). Prose and code are not distinguished:
"class" is a keyword in both.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Callable, Sequence

from specjax.data.spelling import spell

CLASSES = ("special", "whitespace", "punctuation", "number", "function", "content")
_ENGLISH = (
    # articles, determiners, quantifiers
    "a an the this that these those my your his her its our their each every either neither some "
    "any no all both half few fewer many much more most several such another other others own "
    "same enough less least "
    # pronouns
    "i me mine myself you yours yourself yourselves he him himself she hers herself it itself we "
    "us ours ourselves they them theirs themselves one ones oneself who whom whose which what "
    "whoever whomever whatever whichever someone somebody something anyone anybody anything "
    "everyone everybody everything nobody nothing none "
    # auxiliaries and modals
    "be am is are was were been being have has had having do does did doing done can could may "
    "might must shall should will would ought "
    # prepositions
    "about above across after against along amid among around as at before behind below beneath "
    "beside besides between beyond by despite down during except for from in inside into like "
    "near of off on onto out outside over past per since through throughout till to toward "
    "towards under underneath until unto up upon via with within without "
    # conjunctions
    "and but or nor so yet if unless because although though while whereas whether than lest "
    # adverbs of the same kind
    "not when whenever where wherever why how however there here then thus therefore hence too "
    "very also just only even again ever never"
)
ENGLISH = frozenset(_ENGLISH.split())
KEYWORDS = frozenset(keyword.kwlist)
_BEFORE_NT = ENGLISH | {"ca", "wo", "sha", "ai", "need"}  # first halves of "can't", "won't", ...
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")


def classify(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The class of every token of a text.

    A part of a word has the class of the whole word. A token that contains several things has the
    class of its first word; without a word it is punctuation if it contains any, else whitespace.
    A part of a character has the class of the token that completes it.

    Args:
        ids: tokens of the text, in order.
        decode: token ids to text, as ``tokenizers.Tokenizer.decode``.
    """
    pieces = spell(ids, decode)
    kinds = _characters("".join(pieces))
    # From the end to the beginning: a part of a character takes the class of what follows.
    result, end = [], len(kinds)
    following = "punctuation"  # of bytes that never become a character
    for token, piece in zip(reversed([*ids]), reversed(pieces), strict=True):
        if piece:
            following = _class_of(kinds[end - len(piece) : end])
            end -= len(piece)
            result.append(following)
        else:
            alone = decode([token, token])  # two: the first space of a text may be stripped
            result.append("whitespace" if alone.isspace() else following if alone else "special")
    return result[::-1]


def _class_of(kinds: Sequence[str]) -> str:
    """The class of a token from those of its characters."""
    words = [kind for kind in kinds if kind not in ("whitespace", "punctuation")]
    return words[0] if words else "punctuation" if "punctuation" in kinds else "whitespace"


def _characters(text: str) -> list[str]:
    """The class of every character."""
    kinds = ["whitespace" if c.isspace() else "punctuation" for c in text]
    # Combining marks are part of words, and \w does not match them.
    plain = text
    if not text.isascii():
        plain = "".join("_" if unicodedata.category(c)[0] == "M" else c for c in text)
    for match in _WORD.finditer(plain):
        word = text[match.start() : match.end()]
        if any(map(str.isalnum, word)):
            kinds[match.start() : match.end()] = [_word(word)] * len(word)
    return kinds


def _word(word: str) -> str:
    """The class of a word."""
    if word[0].isdigit():
        return "number"
    lower = word.lower().replace("\u2019", "'")
    contraction = lower.endswith("n't") and lower[:-3] in _BEFORE_NT
    english = contraction or lower.partition("'")[0] in ENGLISH
    return "function" if english or word in KEYWORDS else "content"
