"""Tokens per round on held-out prompts, measured during training in two ways.

Forecast: the target has written a text once; given this text, each outcome of a round has a known
probability (``Training.foresee``), so the expected number of rounds is a sum without sampling
noise. Decoded: the same prompts go through the compiled decode loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, sampling, sharding
from specjax.bench import metrics, passes
from specjax.bench.passes import Job, Method
from specjax.types import LM, Batch, Drafter, ModelParams


class Forecast(NamedTuple):
    """The expected result of decoding some texts."""

    tau: float  # tokens per round
    alpha: list[float]  # probability that the token at depth d is accepted if those before it are


def forecast(kept: np.ndarray, prompts: Sequence[int], lengths: Sequence[int]) -> Forecast:
    """The expected rounds for given texts.

    A round that starts with token t pending ends at depth d with probability kept[t,0] * ... *
    kept[t,d-2] * (1 - kept[t,d-1]), or at the end of its draft. So the probability that some round
    starts at a position follows by recursion.

    Args:
        kept: f[B,T,M] as ``Training.foresee`` returns it.
        prompts: lengths of the prompts.
        lengths: of prompt and continuation.
    """
    rows, _, depth = kept.shape
    passed, tested, rounds = np.zeros(depth), np.zeros(depth), 0.0
    for row in range(rows):
        # The last position that can be pending while a token is still to be decoded.
        last = lengths[row] - 2
        # The probability that a round starts at a position.
        begins = np.zeros(lengths[row] + depth + 1)
        begins[prompts[row] - 1] = 1
        for t in range(prompts[row] - 1, last + 1):
            reached = begins[t]
            rounds += reached
            for d in range(min(depth, last + 1 - t)):
                chance = float(kept[row, t, d])
                tested[d] += reached
                passed[d] += reached * chance
                begins[t + d + 1] += reached * (1 - chance)
                reached *= chance
            begins[min(t + depth, last + 1) + 1] += reached
    tokens = sum(lengths) - sum(prompts)
    seen = tested > 0
    tau = float(tokens / rounds) if rounds else float("nan")
    return Forecast(tau, (passed[seen] / tested[seen]).tolist())


class Written(NamedTuple):
    """Prompts with the continuations that the target wrote."""

    batch: Batch  # i32[B,T+1], right-padded with 0
    lengths: list[int]  # of prompt and continuation


def write(
    target: LM,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float,
    eos_id: Sequence[int] = (),
    seed: int = 0,
) -> Written:
    """Decodes the prompts without a drafter, all in one batch. Raises NonFiniteLogits."""
    settings, ends = {"temperature": temperature}, tuple(eos_id)
    job = Job(target, params.target, prompts, settings, len(prompts), new_tokens, ends, seed)
    pairs = zip(prompts, passes.run_pass(job, None).outputs, strict=True)
    texts = [[*prompt, *output] for prompt, output in pairs]
    tokens = np.zeros((len(prompts), job.width + new_tokens), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return Written(Batch(jnp.asarray(tokens)), list(map(len, texts)))


def examiner(
    target: LM,
    drafter: Drafter,
    target_params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperatures: Sequence[float],
    eos_id: Sequence[int] = (),
    seed: int = 0,
    moving: bool = False,
) -> Callable[[Any], dict[str, float]]:
    """A function of the drafter's parameters that measures tokens per round and acceptance.

    It returns, for each temperature, the forecast {"tau_t0", "alpha_t0_depth1", ...} if the drafter
    has ``foresee``, and {"decoded_tau_t0"}. The target writes its text on the first call.

    With ``moving`` the target is trained too: the parameters are {"target", "draft"},
    ``target_params`` are not read, and every call writes the text again.
    """
    starts, eos = [len(prompt) for prompt in prompts], tuple(eos_id)
    rule = accept.load(accept.default_rule(drafter))
    texts: dict[float, Written] = {}
    training = drafter.training
    foresee = jax.jit(training.foresee) if training and training.foresee else None

    def predicted(pair: ModelParams, temperature: float) -> Forecast:
        assert foresee is not None
        if moving or temperature not in texts:
            texts[temperature] = write(target, pair, prompts, new_tokens, temperature, eos, seed)
        text = texts[temperature]
        kept = foresee(pair, text.batch, sampling.make_sampling(len(prompts), temperature))
        return forecast(np.asarray(sharding.fetch(kept), np.float64), starts, text.lengths)

    def decoded(pair: ModelParams, temperature: float) -> float:
        settings = {"temperature": temperature}
        job = Job(target, pair.target, prompts, settings, len(prompts), new_tokens, eos, seed)
        done = passes.run_pass(job, Method(drafter.name, drafter, rule, pair))
        return done.tokens / metrics.total(done.counts).rounds

    def examine(params: Any) -> dict[str, float]:
        draft, own = (params["draft"], params["target"]) if moving else (params, target_params)
        pair, values = ModelParams(own, draft), {}
        for temperature in temperatures:
            name = f"t{temperature:g}"
            if foresee is not None:
                tau, alpha = predicted(pair, temperature)
                values[f"tau_{name}"] = tau
                values |= {f"alpha_{name}_depth{d}": value for d, value in enumerate(alpha, 1)}
            values[f"decoded_tau_{name}"] = decoded(pair, temperature)
        return values

    return examine


def accuracy(
    drafter: Drafter, params: ModelParams, texts: list[Written], starts: Sequence[int], width: int
) -> list[list[float]]:
    """[K][width]: how often, at depth d, the text's token is the r-th choice of the drafter.

    A tree search needs these accuracies. ``starts`` are the lengths of the prompts; every position
    of a continuation counts once. Cai et al. 2024 (2401.10774), section 2.3.3, measure their heads
    in this way. So the accuracy of a depth is not conditional on the depths before it, while the
    search takes it as the chance that a child is accepted after its parent was. Where the first
    tokens are right, later ones are right more often: the predicted tokens per round are too few.
    """
    assert drafter.training is not None and drafter.training.ranks is not None
    ranks_of = jax.jit(drafter.training.ranks)
    ranks_of_texts = [sharding.fetch(ranks_of(params, text.batch)) for text in texts]
    depth = ranks_of_texts[0].shape[-1]
    counts, places = np.zeros((depth, width)), np.zeros(depth)
    for ranks, text in zip(ranks_of_texts, texts, strict=True):
        for row, (start, length) in enumerate(zip(starts, text.lengths, strict=True)):
            for d in range(depth):
                seen = ranks[row, start - 1 : max(length - 1 - d, start - 1), d]
                seen = seen[seen >= 0]
                counts[d] += np.bincount(np.minimum(seen, width), minlength=width + 1)[:width]
                places[d] += len(seen)
    return (counts / np.maximum(places, 1)[:, None]).tolist()
