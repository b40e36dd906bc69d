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

from specjax import checks, sampling
from specjax.accept import _verdict, _walk
from specjax.rng import RESIDUAL, RowKeys
from specjax.types import SIBLINGS, Accept, Draft, Verdict

REFERENCE = "kim2023speculative"


def kept_path(draft: Draft, log_probs: jax.Array, threshold: float) -> tuple[jax.Array, jax.Array]:
    """The longest path of kept tokens i32[B,M], and the index i32[B] of its end in the output.

    ``log_probs`` f[B,N+1,V] are the target's.
    """
    before = _walk.before(draft, log_probs)
    tokens = jnp.clip(draft.tokens, 0, log_probs.shape[-1] - 1)
    own = jnp.take_along_axis(before, tokens[..., None], -1)[..., 0]
    kept = (-own <= threshold) | (draft.tokens == sampling.argmax(before))
    # A token that the settings exclude (a ban, a cut-off) is never emitted.
    return _verdict.deepest(draft, kept & (own > -jnp.inf))


def make(*, threshold: float = 0.0) -> Accept:
    """Rollback at tokens of a large loss, in any topology.

    Args:
        threshold: the largest loss of a token that is kept, in nats (the paper's experiments have 1
            to 10, its code 5); 0: greedy decoding.

    Raises:
        UserError: a threshold below 0.
    """
    checks.number("threshold", threshold, "at least 0 (0 = greedy decoding)", lambda x: x >= 0)

    def sampled(keys: RowKeys, draft: Draft, target_probs: jax.Array) -> Verdict:
        path, end = kept_path(draft, jnp.log(target_probs), threshold)
        return _verdict.along(draft, path, keys.draw(RESIDUAL, _verdict.at(target_probs, end)))

    def greedy(draft: Draft, logits: jax.Array) -> Verdict:
        path, end = kept_path(draft, jax.nn.log_softmax(logits, -1), threshold)
        return _verdict.along(draft, path, sampling.argmax(_verdict.at(logits, end)))

    return Accept(sampled, greedy, "rollback", "L3", SIBLINGS)
