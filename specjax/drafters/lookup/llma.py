"""LLMA: copy from reference documents. Deterministic, no weights, L1.

Yang et al. 2023 (2304.04487), card C2. The text's last n-gram is looked for in the references, from ``max_ngram`` down to
``min_ngram``; the tokens after its first occurrence are proposed. What was generated is not searched: retrieval-augmented
answers copy from what was retrieved. Without documents of their own, rows take their prompt as the reference, which is where
retrieved documents stand.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import ngrams, one_of, whole
from specjax.data import datastore as stores
from specjax.data.datastore import Store
from specjax.drafters.lookup import _match
from specjax.errors import UserError
from specjax.types import LM, Draft, Drafter


def make(
    target: LM,
    *,
    datastore: str | os.PathLike | Store | Sequence[Sequence[int]] | None = None,
    gamma: int = 20,
    max_ngram: int = 5,
    min_ngram: int = 1,
    match: str = "earliest",
) -> Drafter:
    """Drafts by copying from references.

    Args:
        target: the model to be accelerated.
        datastore: the reference documents, for all rows: a directory that configs/datastore.py wrote, a ``Store``, or lists of
            token ids. None: each row's own prompt. Searching costs O(max_ngram * tokens) a round; ``rest`` has an index. From
            Python, ``ModelParams.draft = {"documents": i32[B,L]}`` gives every row its own, separated and padded by -1.
        gamma: longest copy proposed.
        max_ngram: longest n-gram looked for; shorter ones are tried down to ``min_ngram``.
        min_ngram: the trigger: shortest n-gram looked for.
        match: which occurrence of the longest n-gram to take, "earliest" or "latest".

    Raises:
        UserError: gamma or an n-gram length below 1, max_ngram below min_ngram, unknown ``match``, a datastore that is none or
            has another vocabulary.
    """
    whole("gamma", gamma, 1)
    ngrams(max_ngram, min_ngram)
    one_of("match", match, ("earliest", "latest"))
    documents = _documents(target, datastore)

    def copy(reference, extent, tokens, length):
        """One row: reference i32[L], of which the first ``extent`` slots count -> (i32[gamma], valid)."""
        end = jnp.arange(reference.shape[0])
        run = _match.runs(reference, tokens, length, max_ngram)
        run = jnp.where((end < extent) & (reference >= 0) & (run >= min_ngram), run, 0)
        best = run.max()
        hit = (run == best) & (best > 0)
        start = jnp.argmax(hit) if match == "earliest" else end[-1] - jnp.argmax(hit[::-1])
        found = _match.windows(reference, start[None], gamma, extent)[0]
        return found, (found >= 0) & (best > 0)

    def propose(params, keys, context, prompt_length):
        given = params.draft.get("documents") if params.draft else None
        if given is None:
            # What the pending token is followed by is what we look for: an occurrence ends before the end of the text.
            extent = jnp.minimum(prompt_length, context.length)
            tokens, valid = jax.vmap(copy)(context.tokens, extent, context.tokens, context.length)
        else:
            per_row = 0 if given.ndim == 2 else None
            search = jax.vmap(
                lambda reference, *row: copy(reference, reference.shape[0], *row), (per_row, 0, 0)
            )
            tokens, valid = search(given, context.tokens, context.length)
        return Draft(tokens=tokens, valid=valid), prompt_length

    return Drafter(
        init_params=lambda key: {} if documents is None else {"documents": jnp.asarray(documents)},
        init=lambda params, context, target_out, slots: context.length,
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=gamma,
        name="llma",
    )


def _documents(target: LM, given: Any) -> np.ndarray | None:
    """i32[L], a -1 after every document. Raises UserError."""
    if given is None:
        return None
    if isinstance(given, str | os.PathLike):
        given = stores.load(given, target)
    tokens = given.tokens if isinstance(given, Store) else stores.flatten(given)
    if not (tokens >= 0).any():
        raise UserError("datastore has no tokens; give reference documents")
    stores.check(Store(tokens, tokens), target)
    return np.asarray(tokens, np.int32)
