"""TriForce: a small model drafts for the target with a retrieved part of its cache. L1 ("chain").

Sun et al. 2024 (2404.11912). Three levels: the small model has a streaming cache (the first and the
most recent tokens); the target's weights with the chunks of its cache that fit the newest query
test the small model's tokens; the target with its whole cache tests what these emit. A pass of each
of the lower levels takes the same time after a text of any length.

In the published code a token of the small model that is rejected is replaced by a sample of the
middle level's whole distribution, while the outer test takes this distribution for that of the
emitted tokens: sampled text then has another law. Here the middle level is an exact speculative
system (the residual distribution after a rejection), so its tokens are samples of its own
distribution, and the text has the target's law.
"""

from __future__ import annotations

import os

from specjax import accept, declare
from specjax import sparse_views as views
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import none
from specjax.drafters.draft_models import _small_model
from specjax.drafters.nested import _row, _stages, _system
from specjax.drafters.nested._row import Row
from specjax.drafters.nested._system import System
from specjax.drafters.self_speculation import magicdec
from specjax.drafters.shared_keys import model_params
from specjax.prompt import check_window
from specjax.types import LM, Drafter, Params

REFERENCE = "sun2024triforce"

# The committed tokens that the small model's cache can lack when a draft begins: its own newest
# token that was accepted, and the last token of the middle level.
BEHIND = 2


class Keys(declare.Keys):
    """The keys of ``triforce``."""

    model: LM | str | os.PathLike = key(
        help="the small model: an ``LM``, or any model that ``hf.load`` takes, without sliding "
        "windows. It needs positions for the whole text: its keys have their true positions."
    )
    gamma: int = key(6, "tokens per round that the middle level emits", least=1)
    budget: int = key(
        4096, "tokens of the target's cache that the middle level reads, a multiple of ``chunk``"
    )
    chunk: int | None = key(None, "tokens that are retrieved together; None: 8")
    refresh: int | None = key(None, "rounds after which the chunks are chosen again; None: 16")
    model_gamma: int = key(
        1, "tokens that the small model drafts for a pass of the middle level", least=1
    )
    model_budget: int = key(256, "tokens of the small model's cache", least=1)
    sinks: int = key(
        16, "the first tokens of the text that are always in it, of ``model_budget``", least=0
    )
    params: Params = model_params("small")


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with the target and a retrieved part of its cache, for which a small model drafts.

    Raises:
        UserError: numbers out of range, budgets that are too small, another vocabulary than the
            target's, a model that cannot be loaded, or whose cache has no keys to choose from.
    """
    gamma = keys.gamma
    model, params = _small_model.load(target, keys.model, keys.params)
    small = views.streaming_model(model, budget=keys.model_budget, sinks=keys.sinks)
    of_view = {"chunk": keys.chunk, "refresh": keys.refresh}
    view = magicdec.view_of("retrieval", target, keys.budget, gamma + 1, **of_view)
    rule = accept.load("chain")
    # The small model drafts inside the middle level, whose buffer has room for ``gamma`` tokens.
    reader = _system.own_cache(small, Bound(_stages.params_at, ()), [gamma + BEHIND])
    lowest = System(reader, none.make(small), rule, keys.model_gamma, lag=BEHIND, depth=2)
    row = Row((lowest,), None, target.vocab_size)
    inner = _row.build("triforce", row, None)
    middle = System(magicdec.with_view(target, view), inner, rule, gamma)
    init_params = Bound(_small_model.init_params, "triforce", params)
    made = _row.build("triforce", Row((middle,), None, target.vocab_size), init_params)
    check_window(target, made)
    # Tokens of a prompt are fed together, so the small model reads more than in later rounds.
    return _row.checked(made, small)._replace(history=True)
