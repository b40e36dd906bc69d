"""What the counts of a decode loop mean: one stated definition each (DESIGN words; cards A2, A3).

block_efficiency (tau)  tokens emitted per round of a row, the target's own token included, after cutting at
                        end-of-sequence and limits: between 1 and gamma + 1
accepted_per_round      draft tokens accepted per round, before cutting (tau - 1 but for the cut)
acceptance_rate (alpha) accepted / tested draft tokens, where a token is tested if all before it were accepted: the
                        probability that a draft token is accepted, given that its prefix was
acceptance_by_depth     the same by place in the chain; entry i is conditional on i accepted tokens before it
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling, testing
from specjax.models import lm
from specjax.types import LM, Records


class Counts(NamedTuple):
    """Sums over rounds and rows."""

    tokens: int
    rounds: int
    accepted: int
    tested: np.ndarray  # i64[gamma] draft tokens tested at each place
    passed: np.ndarray  # i64[gamma] of them accepted

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.tokens + other.tokens,
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            self.tested + other.tested,
            self.passed + other.passed,
        )


def count(records: Records, rows: Sequence[bool], gamma: int) -> Counts:
    """Counts of the rows marked True (the others fill up a batch)."""
    chosen = np.asarray(rows, bool)
    emitted, accepted, drafted = (np.asarray(x)[:, chosen] for x in records)
    # A finished row proposes nothing; a round that proposed or emitted something was run.
    ran = (emitted > 0) | (drafted > 0)
    place = np.arange(gamma)
    passed = (accepted[..., None] > place) & ran[..., None]
    tested = (np.minimum(accepted + 1, drafted)[..., None] > place) & ran[..., None]
    return Counts(int(emitted.sum()), int(ran.sum()), int(accepted.sum()), tested.sum((0, 1)), passed.sum((0, 1)))


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
    """The outcome of a check that nothing was lost."""

    check: str
    passed: bool
    detail: str


def greedy_identity(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> Lossless:
    """Token-by-token equality with plain greedy decoding."""
    same = sum(list(a) == list(b) for a, b in zip(expected, got, strict=True))
    return Lossless("greedy-identity", same == len(expected), f"{same}/{len(expected)} prompts")


def uniform_transform(
    model: LM,
    params,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    settings: dict,
    *,
    batch: int = 8,
    bins: int = 20,
    level: float = 1e-4,
    seed: int = 0,
) -> Lossless:
    """Tests that sampled outputs follow the target's law, at any vocabulary.

    If every token was drawn from the target's law given its prefix, then the law's mass on more probable tokens, plus a
    uniform fraction of the token's own, is uniform and independent from token to token (Rosenblatt 1952). Counted in
    ``bins`` equal cells and tested by chi-square. A rule that favours what the drafter likes, or the target's favourites,
    bends that histogram. It sees biases of the marginal law, not of noise reused across rounds: tests do that.
    """
    width = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    rng, seen = np.random.default_rng(seed), []
    for start in range(0, len(prompts), batch):
        some = slice(start, start + batch)
        rows = [list(p) + list(o) for p, o in zip(prompts[some], outputs[some], strict=True)]
        tokens = np.zeros((batch, width), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        knobs = sampling.make_sampling(batch, **settings)
        better, own = jax.device_get(_ranked_mass(model, params, jnp.asarray(tokens), knobs))
        for i, row in enumerate(rows):
            new = slice(len(prompts[start + i]) - 1, len(row) - 1)
            seen.append(better[i, new] + rng.random(len(row) - 1 - new.start) * own[i, new])
    values = np.concatenate(seen)
    counts = np.bincount(np.clip((values * bins).astype(int), 0, bins - 1), minlength=bins)
    statistic, freedom, p = testing.chi_square(counts, np.full(bins, 1 / bins))
    detail = f"chi2 = {statistic:.1f}, {freedom} degrees of freedom, {len(values)} tokens, p = {p:.3g}"
    return Lossless("uniform-transform", p > level, detail)


@functools.partial(jax.jit, static_argnums=0)
def _ranked_mass(model, params, tokens, settings):
    """Mass of the tokens more probable than the next one, and the mass that ties with it: f32[B,T-1] each."""
    laws = sampling.to_probs(lm.forward(model, params, tokens[:, :-1]).logits, settings)
    own = jnp.take_along_axis(laws, tokens[:, 1:, None], -1)
    return jnp.where(laws > own, laws, 0).sum(-1), jnp.where(laws == own, laws, 0).sum(-1)
