"""Rollback: a draft token is kept while its loss under the target is small. L3, lossy.

The rule of BiLD, Kim et al. 2023 (2302.07863), section 3.3. The loss of a token is -log of its
probability under the target, the cross entropy of its one-hot distribution. A token is kept if its
loss is at most ``threshold``, or if it is the target's best one. At the first other token the draft
is rolled back, and the target's own token takes its place. With threshold 0 the text is that of
greedy decoding.

The published code tests only the first token whose loss is above the threshold: if that is the
target's best one, all tokens after it are kept without a test, so its threshold 0 is not greedy
decoding. Here every token is tested.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import declare, sampling
from specjax.accept import verdict
from specjax.declare import key
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict

REFERENCE = "kim2023speculative"


def kept_path(draft: Draft, log_probs: jax.Array, threshold: float) -> tuple[jax.Array, jax.Array]:
    """The longest path of kept tokens i32[B,M], and the index i32[B] of its end in the output.

    ``log_probs`` f[B,N+1,V] are the target's.
    """
    before = verdict.before(draft, log_probs)
    own = verdict.of_tokens(draft, before)
    kept = (-own <= threshold) | (draft.tokens == sampling.argmax(before))
    # A token that the settings exclude (a ban, a cut-off) is never emitted.
    return verdict.deepest(draft, kept & (own > -jnp.inf))


class Keys(declare.Keys):
    """The keys of ``rollback``."""

    threshold: float = key(
        0.0,
        "the largest loss of a token that is kept, in nats (the paper's experiments have 1 to 10,"
        " its code 5); 0: greedy decoding",
        least=0,
    )


@declare.method(Keys)
def make(own: Keys) -> Accept:
    """Rollback at tokens of a large loss, in any topology.

    Raises:
        UserError: a threshold below 0.
    """

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        path, end = kept_path(draft, jnp.log(target_probs), own.threshold)
        return verdict.along(draft, path, keys.draw(RESIDUAL, verdict.at(target_probs, end)))

    def greedy(draft: Draft, logits: jax.Array) -> Verdict:
        path, end = kept_path(draft, jax.nn.log_softmax(logits, -1), own.threshold)
        return verdict.along(draft, path, sampling.argmax(verdict.at(logits, end)))

    def law(target_probs: jax.Array, draft_probs: jax.Array, depth: jax.Array) -> jax.Array:
        tokens = jnp.arange(target_probs.shape[-1])
        kept = -jnp.log(target_probs) <= own.threshold
        kept |= tokens == sampling.argmax(target_probs)[..., None]
        return verdict.law_of_test(draft_probs, kept & (target_probs > 0), target_probs)

    return Accept(sampled, greedy, "rollback", "L3", SIBLINGS, law=law)
