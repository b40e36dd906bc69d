"""The draft vocabulary in files of EAGLE-3: the tensors d2t and t2d.

A head with a vocabulary of W of the target's V tokens gives logits of W. ``d2t`` i64[W] holds
*offsets*: logit i belongs to token i + d2t[i]. ``t2d`` bool[V] marks the W tokens. The tokens
ascend. Source: SafeAILab/EAGLE (eagle/model/cnets.py).
"""

from __future__ import annotations

import numpy as np

from specjax.errors import UserError

TENSORS = ("d2t", "t2d")
_MADE_FOR = "the file is damaged, or its tensors belong to different heads"


def ids_of(
    where: object, d2t: np.ndarray | None, t2d: np.ndarray | None, width: int, vocab: int | None
) -> np.ndarray | None:
    """The tokens of a head's logits, i32[W] ascending; None: all tokens of the vocabulary.

    ``width`` is W, ``vocab`` is V where it is known without t2d.
    Raises UserError for tensors that are not such a map.
    """
    marked = None
    if t2d is not None:
        marked, vocab = _marked(where, t2d, width, vocab), len(t2d)
    if d2t is not None:
        ids = _tokens(where, d2t, marked, width, vocab)
    elif marked is not None:
        ids = marked
    else:
        if vocab is not None and vocab != width:
            raise UserError(
                f"{where} has a head of {width} tokens for a vocabulary of {vocab}, and no d2t; "
                "without it the tokens of the head are unknown"
            )
        return None
    check_tokens(where, ids, vocab)
    if marked is not None and not np.array_equal(marked, ids):
        raise UserError(f"{where}: d2t and t2d name different tokens; {_MADE_FOR}")
    return None if vocab == width else ids.astype(np.int32)


def tensors_of(ids: np.ndarray | None, width: int, vocab: int) -> dict[str, np.ndarray]:
    """The tensors d2t i64[W] and t2d bool[V]; ``ids`` None: all tokens.

    Raises UserError unless the ids ascend, are tokens of the vocabulary, and are W.
    """
    ids = np.arange(width) if ids is None else np.asarray(ids).astype(np.int64)
    if ids.shape != (width,):
        raise UserError(
            f"draft_ids has the shape {list(ids.shape)}, and the head gives {width} logits; give "
            "one token per logit"
        )
    check_tokens("draft_ids", ids, vocab)
    marks = np.zeros(vocab, np.bool_)
    marks[ids] = True
    return {"d2t": ids - np.arange(width), "t2d": marks}


def _marked(where: object, t2d: np.ndarray, width: int, vocab: int | None) -> np.ndarray:
    """i64[W]: the tokens that t2d marks."""
    values = np.asarray(t2d)
    if values.ndim != 1 or values.dtype.kind not in "bui" or not np.isin(values, (0, 1)).all():
        raise UserError(
            f"{where}: t2d is {values.dtype}{list(values.shape)}; it must mark each token of the "
            "vocabulary with true or false"
        )
    if vocab is not None and len(values) != vocab:
        raise UserError(
            f"{where}: t2d marks a vocabulary of {len(values)} tokens, and the other tensors have "
            f"{vocab}; {_MADE_FOR}"
        )
    marked = np.flatnonzero(values)
    if len(marked) != width:
        raise UserError(
            f"{where}: t2d marks {len(marked)} tokens, and the head gives {width} logits; "
            f"{_MADE_FOR}"
        )
    return marked


def _tokens(
    where: object, d2t: np.ndarray, marked: np.ndarray | None, width: int, vocab: int | None
) -> np.ndarray:
    """i + d2t[i], i64[W]."""
    offsets = np.asarray(d2t)
    if offsets.shape != (width,) or offsets.dtype.kind not in "ui":
        raise UserError(
            f"{where}: d2t is {offsets.dtype}{list(offsets.shape)}, and the head gives {width} "
            "logits; it must hold one integer per logit"
        )
    offsets = offsets.astype(np.int64)
    if width > 1 and marked is not None and np.array_equal(marked, offsets):
        raise UserError(
            f"{where}: d2t holds token ids; it must hold offsets, the token id minus the index"
        )
    # An unset d2t is all zeros.
    first = marked is not None and np.array_equal(marked, np.arange(width))
    if vocab != width and not offsets.any() and not first:
        wrong = "there is no t2d" if marked is None else "t2d marks others"
        raise UserError(
            f"{where}: d2t is all zeros, which means the first {width} tokens, and {wrong}; copy "
            "both tensors from the program that trained the heads"
        )
    return offsets + np.arange(width)


def check_tokens(where: object, ids: np.ndarray, vocab: int | None) -> None:
    """Raises UserError unless the ids ascend and are tokens of the vocabulary."""
    wrong = np.flatnonzero(np.diff(ids) <= 0)
    if wrong.size:
        i = int(wrong[0])
        raise UserError(
            f"{where}: the tokens of the draft vocabulary must ascend, and {ids[i]} is followed "
            f"by {ids[i + 1]}; d2t holds offsets, the token id minus the index"
        )
    outside = ids[(ids < 0) | (ids >= (ids.max(initial=0) + 1 if vocab is None else vocab))]
    if outside.size:
        size = "the vocabulary" if vocab is None else f"the vocabulary of {vocab}"
        raise UserError(
            f"{where}: the draft vocabulary has the token {outside[0]}, outside {size}; {_MADE_FOR}"
        )
