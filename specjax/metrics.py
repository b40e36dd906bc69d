"""What the counts of a decode loop mean: one stated definition each (DESIGN words; cards A2, A3).

block_efficiency (tau)  tokens emitted per round of a row, the target's own token included, after cutting at
                        end-of-sequence and limits: between 1 and gamma + 1
accepted_per_round      draft tokens accepted per round, before cutting (tau - 1 but for the cut)
acceptance_rate (alpha) accepted / tested depths, where a depth is tested if all above it were accepted and it has a node
                        there: the probability that a draft token (on a tree: one of the siblings) is accepted, given
                        that its prefix was
acceptance_by_depth     the same by depth; entry i is conditional on i accepted tokens before it
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.models import lm
from specjax.types import LM, Context, Drafter, ModelParams, Records


class Counts(NamedTuple):
    """Sums over rounds and rows."""

    tokens: int
    rounds: int
    accepted: int
    tested: np.ndarray  # i64[depth] how often a draft token was tested at each depth
    passed: np.ndarray  # i64[depth] of them accepted

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.tokens + other.tokens,
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            self.tested + other.tested,
            self.passed + other.passed,
        )


def count(records: Records, rows: Sequence[bool], depth: int) -> Counts:
    """Counts of the rows marked True (the others fill up a batch); ``depth`` is the drafter's longest path."""
    chosen = np.asarray(rows, bool)
    emitted, accepted, drafted, tested = (np.asarray(x)[:, chosen] for x in records)
    # A finished row proposes nothing; a round that proposed or emitted something was run.
    ran = (emitted > 0) | (drafted > 0)
    place = np.arange(depth)
    passed = ((accepted[..., None] > place) & ran[..., None]).sum((0, 1))
    reached = ((tested[..., None] > place) & ran[..., None]).sum((0, 1))
    return Counts(int(emitted.sum()), int(ran.sum()), int(accepted.sum()), reached, passed)


def summary(counts: Counts) -> dict:
    """The fields of a results row that counts give; None where nothing was drafted."""
    tested, passed = int(counts.tested.sum()), int(counts.passed.sum())
    by_depth = [int(p) / int(t) for p, t in zip(counts.passed, counts.tested, strict=True) if t]
    return {
        "tokens": counts.tokens,
        "rounds": counts.rounds,
        "block_efficiency": counts.tokens / counts.rounds if counts.rounds else None,
        "accepted_per_round": counts.accepted / counts.rounds if counts.rounds else None,
        "acceptance_rate": passed / tested if tested else None,
        "acceptance_by_depth": by_depth or None,
    }


class Lossless(NamedTuple):
    """The outcome of a check that nothing was lost; ``passed`` None: too few tokens to say anything."""

    check: str
    passed: bool | None
    detail: str


def greedy_identity(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> Lossless:
    """Token-by-token equality with plain greedy decoding."""
    same = sum(list(a) == list(b) for a, b in zip(expected, got, strict=True))
    return Lossless("greedy-identity", same == len(expected), f"{same}/{len(expected)} prompts")


LEAST = 400  # tokens: twenty in each of the twenty cells


def law_check(
    model: LM,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    settings: dict,
    drafter: Drafter | None = None,
    *,
    batch: int = 8,
    level: float = 1e-4,
    seed: int = 0,
) -> Lossless:
    """Tests whether sampled outputs follow the target's law, at any vocabulary, from the outputs alone.

    Two views of every token given its prefix, both with known behaviour if nothing was lost:
    - The target's mass on more probable tokens, plus a uniform fraction of the token's own, is uniform and independent from
      token to token (Rosenblatt 1952): a chi-square over 20 cells sees favourites and outsiders.
    - Whether the token is one that the drafter likes better than the target does (``Drafter.law``) is a coin whose chance
      the target's law tells: the sum of the differences is a martingale, tested as a normal z. Wrong residuals, matches
      that are drawn again, and claimed laws push tokens out of that set or into it.
    Also counted: tokens that the target never samples at all (more than one in a thousand fails).

    What it cannot see: noise reused between rounds, and biases below about 3 / sqrt(tokens). The tests of the rules are the
    proof; this is the smoke alarm on the real model.
    """
    from specjax.testing import laws  # only here: the kit brings scipy along

    width = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    rng, seen = np.random.default_rng(seed), []
    for start in range(0, len(prompts), batch):
        some = slice(start, start + batch)
        rows = [list(p) + list(o) for p, o in zip(prompts[some], outputs[some], strict=True)]
        tokens = np.zeros((batch, width), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        lengths = np.array([len(row) for row in rows] + [1] * (batch - len(rows)), np.int32)
        context = Context(jnp.asarray(tokens), jnp.asarray(lengths), sampling.make_sampling(batch, **settings))
        law = None if drafter is None else drafter.law
        views = np.stack([np.asarray(v) for v in _views(model, law, params, context)])
        seen += [views[:, i, len(prompts[start + i]) - 1 : len(row) - 1] for i, row in enumerate(rows)]
    better, own, liked, chance = np.concatenate(seen, axis=1).astype(np.float64)
    total = len(better)
    if total < LEAST:
        return Lossless("law", None, f"{total} tokens are too few to tell, p = -")
    values = better + rng.random(total) * own
    counts = np.bincount(np.clip((values * 20).astype(int), 0, 19), minlength=20)
    p_value = laws.chi_square(counts, np.full(20, 0.05))[2]
    if (spread := (chance * (1 - chance)).sum()) > 5:  # else there is no set that the drafter likes better
        z = (liked - chance).sum() / math.sqrt(spread)
        p_value = min(1.0, 2 * min(p_value, math.erfc(abs(z) / math.sqrt(2))))  # two tests
    never = int((own == 0).sum())
    passed = p_value > level and never <= total / 1000
    return Lossless("law", passed, f"{total} tokens, {never} impossible, p = {p_value:.2g}")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _views(model, law, params, context):
    """Of every next token, f32[B,T-1] each: the target's mass on better tokens; on ties with it; whether the drafter likes
    it more than the target does; the target's mass on such tokens."""
    tokens = context.tokens
    laws = sampling.to_probs(lm.forward(model, params.target, tokens).logits, context.sampling)[:, :-1]
    own = jnp.take_along_axis(laws, tokens[:, 1:, None], -1)
    better, ties = jnp.where(laws > own, laws, 0).sum(-1), jnp.where(laws == own, laws, 0).sum(-1)
    if law is None:
        return better, ties, jnp.zeros_like(better), jnp.zeros_like(better)
    likes = law(params, context)[:, :-1] > laws
    liked = jnp.take_along_axis(likes, tokens[:, 1:, None], -1)[..., 0]
    return better, ties, liked.astype(jnp.float32), jnp.where(likes, laws, 0).sum(-1)
