"""The acceptance rate by its definition: alpha = E[sum_x min(target(x), draft(x))].

The mean is over all positions of texts that the target wrote (Leviathan et al. 2023, definition
3.1). A decode loop measures another number: it tests a token only if its prefix was accepted, that
is, at easier positions. The overlap is also computed by depth, class of token and category of
prompt.

Classes of tokens, in the order of ``CLASSES``:

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

import functools
import keyword
import re
import unicodedata
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specjax import sampling
from specjax.bench.lossless import Texts, at_tokens, compare
from specjax.data.spelling import spell
from specjax.types import DETERMINISTIC, Batch, Context, ModelParams

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


def overlap(
    texts: Texts,
    *,
    categories: Sequence[str | None] = (),
    decode: Callable[[list[int]], str] | None = None,
) -> dict | None:
    """The probability that a draft token is accepted, averaged over the tokens of the outputs.

    With ``Drafter.probs``: the sum of minima itself. Otherwise ``Training.foresee`` at depth 1:
    min(1, draft / target) of the text's own token, which has the same mean (of a deterministic
    tree: whether some sibling is the text's token). ``by_depth`` needs ``foresee``: the draft's
    d-th token, given that the tokens before it are the text's.

    Args:
        texts: with a drafter; the outputs must be the target's own, with these settings. At
            temperature 0 both distributions are one-hot, and the overlap is the rate of agreement.
        categories: of the prompts, for ``by_category``.
        decode: token ids to text, for ``by_class``.

    Returns:
        {"alpha", "tokens", "by_depth", "by_class", "by_category"}; None for each part that cannot
        be computed. None without output tokens, and for a drafter that has neither function.
    """
    drafter = texts.drafter
    assert drafter is not None
    # The probs of a deterministic tree choose its tokens; no token is drawn from them.
    probs = None if drafter.siblings == DETERMINISTIC else drafter.probs
    foresee = None if drafter.training is None else drafter.training.foresee
    if sampling.make_sampling(1, **texts.settings).maps is not None:
        foresee = None  # forecasts are made without penalties, biases and bans
    if not sum(map(len, texts.outputs)) or (probs is None and foresee is None):
        return None
    forecasts = functools.partial(_call, foresee, texts.params)
    by_token = [] if foresee is None else at_tokens(forecasts, texts)
    firsts = [row[:, 0] for row in by_token]
    values = np.concatenate(firsts) if probs is None else compare(texts).overlap
    classes = kinds = None
    if decode is not None:
        pairs = zip(texts.prompts, texts.outputs, strict=True)
        classes = [kind for p, o in pairs for kind in classify([*p, *o], decode)[len(p) :]]
    if any(categories):
        kinds = [kind for kind, o in zip(categories, texts.outputs, strict=True) for _ in o]
    return {
        "alpha": float(values.mean()),
        "tokens": len(values),
        "by_depth": _by_depth(by_token) if by_token else None,
        "by_class": _by_kind(values, classes),
        "by_category": _by_kind(values, kinds),
    }


def _by_depth(by_token: list[np.ndarray]) -> list[float]:
    """Means by depth, of the positions where the draft of that depth is inside the text."""
    columns = [
        np.concatenate([row[: max(len(row) - d, 0), d] for row in by_token])
        for d in range(by_token[0].shape[1])
    ]
    return [float(column.mean()) for column in columns if len(column)]


def _by_kind(values: np.ndarray, kinds: Sequence[str | None] | None) -> dict | None:
    if kinds is None:
        return None
    names, which = np.unique([str(kind) for kind in kinds], return_inverse=True)
    sums, counts = np.bincount(which, values), np.bincount(which)
    return {
        str(name): {"alpha": float(total / count), "tokens": int(count)}
        for name, total, count in zip(names, sums, counts, strict=True)
    }


@functools.partial(jax.jit, static_argnums=0)
def _call(foresee: Callable[..., jax.Array], params: ModelParams, text: Context):
    """[B,T,M]: the probability that the token at each depth of a draft is accepted.

    Column t is of the draft that begins with the token at t + 1, given the tokens before it.
    """
    return foresee(params, Batch(text.tokens), text.sampling)


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
