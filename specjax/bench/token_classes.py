"""What kind of word each token of a text is: which tokens a drafter foresees, and which it does not.

Classes, in the order of ``CLASSES``:

- ``special``: decodes to nothing in any text (ends and beginnings of text).
- ``whitespace``: blanks, indents, line breaks and nothing else.
- ``punctuation``: no letter and no digit, and not part of a word.
- ``number``: of a word that begins with a digit.
- ``function``: of a closed-class English word (``ENGLISH``, in any case) or of a keyword of Python (``KEYWORDS``), as
  it is written.
- ``content``: of any other word: names, nouns, verbs, identifiers, words of other languages.

A word is a run of letters, digits, underscores and the marks on them, with apostrophes inside it ("don't"; a contraction
has the class of its first half). Nothing tells prose from code: "class" is a keyword in both.
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
    "a an the this that these those my your his her its our their each every either neither some any no all both half "
    "few fewer many much more most several such another other others own same enough less least "
    # pronouns
    "i me mine myself you yours yourself yourselves he him himself she hers herself it itself we us ours ourselves they "
    "them theirs themselves one ones oneself who whom whose which what whoever whomever whatever whichever someone "
    "somebody something anyone anybody anything everyone everybody everything nobody nothing none "
    # auxiliaries and modals
    "be am is are was were been being have has had having do does did doing done can could may might must shall should "
    "will would ought "
    # prepositions
    "about above across after against along amid among around as at before behind below beneath beside besides between "
    "beyond by despite down during except for from in inside into like near of off on onto out outside over past per "
    "since through throughout till to toward towards under underneath until unto up upon via with within without "
    # conjunctions
    "and but or nor so yet if unless because although though while whereas whether than lest "
    # the adverbs that belong with them
    "not when whenever where wherever why how however there here then thus therefore hence too very also just only even "
    "again ever never"
)
ENGLISH = frozenset(_ENGLISH.split())
KEYWORDS = frozenset(keyword.kwlist)
_SHORTENED = ENGLISH | {"ca", "wo", "sha", "ai", "need"}  # what stands before "n't"
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*")


def classify(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The class of every token of a text.

    A piece of a word has the class of the whole word. A token of several things has that of its first word, else it is
    punctuation if anything in it is. Part of a character has the class of the token that completes it.

    Args:
        ids: tokens of the text, in order.
        decode: token ids to text, as ``tokenizers.Tokenizer.decode``.
    """
    pieces = spell(ids, decode)
    kinds = _characters("".join(pieces))
    found, end = [], len(kinds)
    following = "punctuation"  # of what never becomes a character
    for token, piece in zip(reversed([*ids]), reversed(pieces), strict=True):
        if piece:
            within = kinds[end - len(piece) : end]
            end -= len(piece)
            words = [kind for kind in within if kind not in ("whitespace", "punctuation")]
            following = (
                words[0] if words else "punctuation" if "punctuation" in within else "whitespace"
            )
            found.append(following)
        else:
            alone = decode([token, token])  # two: the first space of a text may be stripped
            found.append("whitespace" if alone.isspace() else following if alone else "special")
    return found[::-1]


def _characters(text: str) -> list[str]:
    """The class of every character."""
    kinds = ["whitespace" if c.isspace() else "punctuation" for c in text]
    plain = (
        text
        if text.isascii()
        else "".join("_" if unicodedata.category(c)[0] == "M" else c for c in text)
    )
    for match in _WORD.finditer(plain):
        word = text[match.start() : match.end()]
        if any(map(str.isalnum, word)):
            kinds[match.start() : match.end()] = [_word(word)] * len(word)
    return kinds


def _word(word: str) -> str:
    if word[0].isdigit():
        return "number"
    lower = word.lower().replace("\u2019", "'")
    head, shortened = lower.partition("'")[0], lower.endswith("n't") and lower[:-3] in _SHORTENED
    return "function" if shortened or head in ENGLISH or word in KEYWORDS else "content"
