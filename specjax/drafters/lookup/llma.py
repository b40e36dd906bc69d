"""LLMA: copies from reference documents. Deterministic, no weights, L1.

Yang et al. 2023 (2304.04487). The text's last n-gram is searched in the references, from
``max_ngram`` down to ``min_ngram`` tokens, and the tokens after its first occurrence are proposed.
The output is not searched: answers of retrieval-augmented generation copy the retrieved documents.
Without reference documents each row uses its prompt, which contains the retrieved documents.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import declare
from specjax.bound import Bound
from specjax.data import datastore as stores
from specjax.data.datastore import Store
from specjax.declare import key
from specjax.drafters._limited import limited
from specjax.drafters.lookup import _match, _memory
from specjax.drafters.shared_keys import LimitedKeys
from specjax.errors import UserError
from specjax.types import LM, Draft, Drafter

REFERENCE = "yang2023inference"


class Keys(LimitedKeys):
    """The keys of ``llma``."""

    datastore: str | os.PathLike | Store | Sequence[Sequence[int]] | None = key(
        None,
        "the reference documents of all rows: a directory written by configs/datastore.py, a "
        "``Store``, or lists of token ids. None: each row's own prompt. A search costs "
        "O(max_ngram * tokens) per round; ``rest`` uses an index. From Python, "
        '``ModelParams.draft = {"documents": i32[B,L]}`` gives each row its own documents, '
        "separated and padded by -1.",
    )
    gamma: int = key(20, "longest copy proposed", least=1)
    max_ngram: int = key(5, "longest n-gram searched; shorter ones are tried down to ``min_ngram``")
    min_ngram: int = key(1, "shortest n-gram searched")
    match: str = key(
        "earliest",
        'which occurrence of the longest n-gram is used, "earliest" or "latest"',
        choices=("earliest", "latest"),
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts by copying from references.

    Raises:
        UserError: gamma or an n-gram length below 1, max_ngram below min_ngram, unknown ``match``,
            a datastore without tokens or with another vocabulary.
    """
    documents = _documents(target, keys.datastore)
    drafter = Drafter(
        init_params=lambda key: {} if documents is None else {"documents": jnp.asarray(documents)},
        init=_memory.prompt_length,
        propose=Bound(_propose, keys.settings()),
        nodes=keys.gamma,
        name="llma",
        # Without documents it copies from the prompt, and not from the output.
        history=documents is None,
    )
    return limited(drafter, keys.control)


def _propose(settings: Keys, params, keys, context, prompt_length):
    documents = params.draft.get("documents") if params.draft else None
    if documents is None:
        # An occurrence must end before the text does: the pending token's successor is unknown.
        axes, extent = (0, 0), jnp.minimum(prompt_length, context.length)
        documents = context.tokens
    else:
        axes, extent = (0 if documents.ndim == 2 else None, None), documents.shape[-1]
    copy = jax.vmap(Bound(_copy, settings), (*axes, 0, 0))
    tokens, valid = copy(documents, extent, context.tokens, context.length)
    return Draft(tokens=tokens, valid=valid), prompt_length


def _copy(settings: Keys, reference, extent, tokens, length):
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
    start, found = _match.pick(jnp.where(usable, run, 0), settings.match)
    start = jnp.where(found, start, -1)
    copied = _match.follow(reference, start[None], settings.gamma, extent)[0]
    return copied, copied >= 0


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
