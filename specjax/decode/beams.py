"""Beam search of the target, plain and speculative: the same hypotheses, in fewer passes.

Class: deterministic; speculative beams are those of plain beam search, apart from the rounding of
a pass over more tokens, which decides between equal scores.

Speculative beams (Leviathan et al. 2023, 2211.17192, appendix A.4). A draft model continues the
target's beams, with their scores, by a beam search of its own: ``gamma`` steps of U beams, U at
least the target's K. The target scores these nodes in one pass, as one tree. Its step is then the
step of plain beam search, with the target's probabilities of all continuations. As long as all of
its new beams are among the draft's, their probabilities are known too, and a further step is taken.
So a pass decides from 1 to gamma + 1 steps, and the draft decides nothing but their number.

What it costs. The beams of a row are one tree over its prompt, whose keys and values are stored and
read once per row. Nothing is copied when a beam continues another one. A step has a place for each
beam, so a row has K * max_new_tokens places, and a token attends to all of them, through a mask:
K times those of its own beam. With a draft, a pass has K + U * gamma tokens of each row in the
place of K. The draft model has gamma passes in a round: one over 2 K tokens (the step before is fed
again), the others over U.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import outcome, sampling
from specjax.checks import counts, number, shown, whole
from specjax.decode import _beam_rounds as rounds
from specjax.decode import _hypotheses as hypotheses
from specjax.decode._beam_rounds import Sizes
from specjax.errors import UserError
from specjax.outcome import EosId
from specjax.prompt import check_kinds, check_prefill, check_prompt, feed
from specjax.types import LM, ModelParams

# The largest factor of a length penalty.
MOST = 1e6
REFERENCE = "leviathan2023fast"


class BeamDraft(NamedTuple):
    """A draft model and the shape of its beam search; its parameters are ``ModelParams.draft``."""

    model: LM
    gamma: int = 4  # steps per round
    beams: int | None = None  # U; None: as many as the target


class Beams(NamedTuple):
    """The best hypotheses of each row, R of them, the best first, and what they cost."""

    tokens: jax.Array  # i32[B,R,N] the new ones, -1 after the last
    length: jax.Array  # i32[B,R] the number of new tokens, with the end-of-sequence token
    scores: jax.Array  # f32[B,R] log-probability / length ** length_penalty
    steps: jax.Array  # i32[B] steps of beam search
    passes: jax.Array  # i32[B] passes of the target in which they were decided
    failed: jax.Array  # i32[B] the pass in which logits were not finite, or -1

    def outputs(self) -> list[list[list[int]]]:
        """The new tokens of each hypothesis of each row."""
        rows = zip(np.asarray(self.tokens), np.asarray(self.length), strict=True)
        return [[each[:count].tolist() for each, count in zip(*row, strict=True)] for row in rows]


def beam_search(
    target: LM,
    params: ModelParams,
    prompt: jax.Array,
    lengths: jax.Array,
    *,
    beams: int,
    max_new_tokens: int,
    returned: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos_id: EosId = None,
    draft: BeamDraft | None = None,
    chunk: int = 256,
) -> Beams:
    """The hypotheses of ``generate(num_beams=beams)`` of transformers 5: one compiled program.

    A row does not depend on the others. Call ``check`` on the result: it raises if a model gave
    logits that are not finite.

    Args:
        target: static, as ``draft``, ``beams``, ``max_new_tokens``, ``returned`` and ``chunk``.
        params: the pair's parameters.
        prompt: i32[B,P], right-padded; of a target with an encoder as ``LM.prompt`` makes it.
        lengths: i32[B], each in 1..P.
        beams: K, at least 2.
        max_new_tokens: N, of every row.
        returned: R, at most K.
        length_penalty: above 0 favours long hypotheses, below 0 short ones.
        early_stopping: True: a row ends with its K-th finished hypothesis. False: it ends when its
            best beam, at its present length, is below all finished ones. "never": the same, at the
            length that is best for it.
        eos_id: an id or several; None: every hypothesis has N tokens.
        draft: None: plain beam search.
        chunk: tokens of the prompt fed in one pass.

    Raises:
        UserError: wrong arguments, a prompt that is empty or has ids outside the vocabulary, a text
            longer than the positions of a model, a vocabulary with too few tokens.
    """
    check_kinds(target=target, params=params)
    check_prompt(prompt, lengths)
    stop = np.unique(np.asarray(outcome.stop_ids(eos_id)))
    _check(target, draft, beams, max_new_tokens, returned, early_stopping, stop)
    number("length_penalty", length_penalty, "that is finite", lambda x: True)
    if max_new_tokens ** abs(length_penalty) > MOST:
        raise UserError(
            f"length_penalty is {length_penalty} and max_new_tokens {max_new_tokens}: scores would "
            f"be divided by more than {MOST:g}, and lose their precision; give a smaller one"
        )
    sizes = Sizes(beams, max_new_tokens)
    if draft is not None:
        sizes = _with_draft(sizes, target, draft)
    longest = prompt.shape[1] + max_new_tokens
    for model in (target,) if draft is None else (target, draft.model):
        check_prefill(model, prompt, lengths, None, longest)
    prompt, lengths = (jnp.asarray(array, jnp.int32) for array in (prompt, lengths))
    models = (target, None if draft is None else draft.model)
    rules = hypotheses.rules(jnp.asarray(stop), max_new_tokens, length_penalty, early_stopping)
    return _beam_search(sizes, models, returned, chunk, params, prompt, lengths, rules)


def _check(
    target: LM, draft: Any, beams: int, most: int, returned: int, early_stopping: Any, stop: Any
) -> None:
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise UserError(f"early_stopping is {early_stopping!r}; it must be True, False or 'never'")
    if not isinstance(draft, BeamDraft | None):
        raise UserError(f"draft is {shown(draft)}; it must be a BeamDraft or None")
    counts(max_new_tokens=most, returned=returned)
    if whole("beams", beams, 1) == 1:
        raise UserError("beams is 1, which is greedy decoding; take generate, or at least 2 beams")
    if returned > beams:
        raise UserError(f"returned is {returned} and beams {beams}; return at most all beams")
    if target.vocab_size < beams + len(stop):
        raise UserError(
            f"there are {beams} beams and {len(stop)} end-of-sequence tokens, and a vocabulary of "
            f"{target.vocab_size}; take at most {target.vocab_size - len(stop)} beams"
        )


def _with_draft(sizes: Sizes, target: LM, draft: BeamDraft) -> Sizes:
    """The sizes with those of a draft. Raises UserError for wrong ones."""
    own = sizes.beams if draft.beams is None else whole("draft.beams", draft.beams, 1)
    whole("draft.gamma", draft.gamma, 1)
    if not sizes.beams <= own <= target.vocab_size:
        raise UserError(
            f"the draft has {own} beams and the target {sizes.beams}; give the draft from "
            f"{sizes.beams} to {target.vocab_size} beams"
        )
    if draft.model.vocab_size != target.vocab_size:
        raise UserError(
            f"the draft model has {draft.model.vocab_size} tokens and the target "
            f"{target.vocab_size}; they must have the same vocabulary"
        )
    return sizes._replace(gamma=draft.gamma, drafted=own)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _beam_search(
    sizes: Sizes,
    models: tuple[LM, LM | None],
    returned: int,
    chunk: int,
    params: ModelParams,
    prompt: jax.Array,
    lengths: jax.Array,
    rules: hypotheses.Rules,
) -> Beams:
    (batch, width), own = prompt.shape, (params.target, params.draft)
    tokens = jnp.where(jnp.arange(width) < lengths[:, None], prompt, -1)
    pending = jnp.take_along_axis(tokens, lengths[:, None] - 1, 1)

    def read(model: LM | None, params: Any) -> tuple[Any, Any, Any]:
        """The cache of the prompts without their last tokens; logits and block of one token."""
        if model is None:
            return None, None, None
        cache = model.init_cache(batch, width)
        _, cache = feed(model, params, tokens[:, : width - 1], lengths - 1, cache, chunk)
        out, block = jax.eval_shape(model.apply, params, pending, cache)
        return cache, out.logits, block

    read_all = [read(*each) for each in zip(models, own, strict=True)]
    caches, logits, blocks = zip(*read_all, strict=True)
    now = hypotheses.start(batch, sizes.beams, sizes.most, sampling.dtype_of(logits[0]))
    now = rounds.start(sizes, models, now, pending[:, 0], blocks)

    step = functools.partial(rounds.step, sizes, models, params, caches, rules=rules)
    now = jax.lax.while_loop(lambda now: ~now.own.done.all(), step, now)
    ended = now.own.ended[:, :returned]
    length = (ended >= 0).sum(-1).astype(jnp.int32)
    scores = now.own.ended_scores[:, :returned]
    return Beams(ended, length, scores, now.own.steps, now.passes, now.failed)
