"""LLMA: copies from reference documents. Deterministic, no weights, L1.

Yang et al. 2023 (2304.04487). The text's last n-gram is searched in the references, from
``max_ngram`` down to ``min_ngram`` tokens, and the tokens after its first occurrence are proposed.
The output is not searched: answers of retrieval-augmented generation copy the retrieved documents.
Without reference documents each row uses its prompt, which contains the retrieved documents.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bound import Bound
from specjax.checks import ngrams, one_of, whole
from specjax.data import datastore as stores
from specjax.data.datastore import Store
from specjax.drafters._limited import limited
from specjax.drafters.lookup import _match, _memory
from specjax.errors import UserError
from specjax.types import LM, Draft, Drafter

REFERENCE = "yang2023inference"


class Settings(NamedTuple):
    """Static settings; see ``make``."""

    gamma: int
    max_ngram: int
    min_ngram: int
    match: str


def make(
    target: LM,
    *,
    datastore: str | os.PathLike | Store | Sequence[Sequence[int]] | None = None,
    gamma: int = 20,
    max_ngram: int = 5,
    min_ngram: int = 1,
    match: str = "earliest",
    control: str = "",
) -> Drafter:
    """Drafts by copying from references.

    Args:
        target: the model to be accelerated.
        datastore: the reference documents of all rows: a directory written by
            configs/datastore.py, a ``Store``, or lists of token ids. None: each row's own prompt.
            A search costs O(max_ngram * tokens) per round; ``rest`` uses an index. From Python,
            ``ModelParams.draft = {"documents": i32[B,L]}`` gives each row its own documents,
            separated and padded by -1.
        gamma: longest copy proposed.
        max_ngram: longest n-gram searched; shorter ones are tried down to ``min_ngram``.
        min_ngram: shortest n-gram searched.
        match: which occurrence of the longest n-gram is used, "earliest" or "latest".
        control: limits the drafts by what earlier rounds accepted; see ``control.parse``.

    Raises:
        UserError: gamma or an n-gram length below 1, max_ngram below min_ngram, unknown ``match``,
            a datastore without tokens or with another vocabulary.
    """
    whole("gamma", gamma, 1)
    ngrams(max_ngram, min_ngram)
    one_of("match", match, ("earliest", "latest"))
    documents = _documents(target, datastore)
    drafter = Drafter(
        init_params=lambda key: {} if documents is None else {"documents": jnp.asarray(documents)},
        init=_memory.prompt_length,
        propose=Bound(_propose, Settings(gamma, max_ngram, min_ngram, match)),
        update=_memory.unchanged,
        nodes=gamma,
        name="llma",
        # Without documents it copies from the prompt, and not from the output.
        history=documents is None,
    )
    return limited(drafter, control)


def _propose(settings: Settings, params, keys, context, prompt_length):
    copy = Bound(_copy, settings)
    documents = params.draft.get("documents") if params.draft else None
    if documents is None:
        # An occurrence must end before the text does: the pending token's successor is unknown.
        extent = jnp.minimum(prompt_length, context.length)
        tokens, valid = jax.vmap(copy)(context.tokens, extent, context.tokens, context.length)
    else:
        per_row = 0 if documents.ndim == 2 else None
        search = jax.vmap(
            lambda reference, *row: copy(reference, reference.shape[0], *row), (per_row, 0, 0)
        )
        tokens, valid = search(documents, context.tokens, context.length)
    return Draft(tokens=tokens, valid=valid), prompt_length


def _copy(settings: Settings, reference, extent, tokens, length):
    """One row's copy, (tokens i32[gamma], valid bool[gamma]).

    Args:
        settings: of the method.
        reference: i32[L], of which the first ``extent`` slots are searched.
        extent: i32[].
        tokens, length: the text, i32[S] and i32[].
    """
    end = jnp.arange(reference.shape[0])
    run = _match.runs(reference, tokens, length, settings.max_ngram)
    usable = (end < extent) & (reference >= 0) & (run >= settings.min_ngram)
    run = jnp.where(usable, run, 0)
    best = run.max()
    hit = (run == best) & (best > 0)
    earliest = settings.match == "earliest"
    start = jnp.argmax(hit) if earliest else end[-1] - jnp.argmax(hit[::-1])
    copied = _match.windows(reference, start[None], settings.gamma, extent)[0]
    return copied, (copied >= 0) & (best > 0)


def _documents(target: LM, datastore: Any) -> np.ndarray | None:
    """The reference documents, i32[L], a -1 after each. Raises UserError."""
    if datastore is None:
        return None
    if isinstance(datastore, str | os.PathLike):
        datastore = stores.load(datastore, target)
    tokens = datastore.tokens if isinstance(datastore, Store) else stores.flatten(datastore)
    if not (tokens >= 0).any():
        raise UserError("datastore has no tokens; give reference documents")
    stores.check(Store(tokens, tokens), target)
    return np.asarray(tokens, np.int32)
