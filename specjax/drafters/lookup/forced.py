"""Forced tokens: drafts where the row's grammar leaves no choice of text. Deterministic, L1.

Engines with grammars append such text without asking the model ("jump forward": Zheng et al. 2024,
SGLang, 2312.07104, section 4); how it is divided into tokens is then not the model's choice. Here
it is a draft, so the output keeps the law of plain decoding with the grammar
(``make_sampling(grammar=)``). Where the grammar allows one token, the draft is always accepted.
Where all allowed tokens are beginnings of one of them, the draft is the one that is most frequent
in the text so far, or else the longest, and the target may divide the text in another way. Without
a grammar, and where it leaves a choice, nothing is drafted: ``escalate`` asks another drafter then.
Drafters with logits draft within the grammar by themselves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters._limited import limited
from specjax.drafters.shared_keys import LimitedKeys
from specjax.logit_maps import grammar as grammars
from specjax.types import LM, Draft, Drafter

REFERENCE = "zheng2024sglang"


class Keys(LimitedKeys):
    """The keys of ``forced``."""

    gamma: int = key(8, "longest draft", least=1)


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts the tokens that a grammar forces."""
    drafter = Drafter(propose=Bound(_propose, keys.gamma), nodes=keys.gamma, name="forced")
    return limited(drafter, keys.control)


def _propose(gamma: int, params, keys, context, state):
    grammar = None if context.sampling.maps is None else context.sampling.maps.grammar
    if grammar is None:
        nothing = jnp.zeros((len(context.length), gamma), jnp.int32)
        return Draft(tokens=nothing, valid=nothing > 0), state
    rows, place = jnp.arange(len(context.length)), jnp.arange(context.tokens.shape[1])
    text = jnp.where(place < context.length[:, None], context.tokens, -2)

    def one(now, _):
        ways = grammar.forced[rows, now]
        times = (ways[:, :, None] == text[:, None]).sum(-1)
        # The first of the most frequent: the longest.
        token = jnp.take_along_axis(ways, jnp.argmax(times, 1)[:, None], 1)[:, 0]
        return grammars.step(grammar, now, token), token

    begin = grammars.walked(grammar, context.tokens, context.length).state
    tokens = jax.lax.scan(one, begin, length=gamma)[1].T
    return Draft(tokens=tokens, valid=jnp.cumprod(tokens >= 0, 1) > 0), state
