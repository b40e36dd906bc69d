"""The number that matters, during training: tokens per round on held-out prompts, foreseen from text and really decoded.

Foreseen: the target has written a text once; given it, every round's outcome has a known probability (``Training.foresee``), so
the expected number of rounds is a sum, with no noise of its own. Decoded: the same prompts through the compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, rng, sampling
from specjax.bench import metrics
from specjax.drafters import none
from specjax.types import CHAIN, DETERMINISTIC, LM, Batch, Drafter, ModelParams

RULES = {CHAIN: "chain", DETERMINISTIC: "deterministic"}  # the others: "recursive"


class Forecast(NamedTuple):
    """What decoding these texts takes."""

    tau: float  # tokens per round
    alpha: list[
        float
    ]  # probability that the token at depth d was accepted, if those before it were


def forecast(kept: np.ndarray, prompts: Sequence[int], lengths: Sequence[int]) -> Forecast:
    """The expected rounds behind texts: kept f[B,T,M] as ``Training.foresee`` gives it, lengths of prompts and whole texts.

    A round that begins with token t pending ends d tokens further on with probability kept[t,0]..kept[t,d-2] (1 -
    kept[t,d-1]), or as far as its draft reaches; the chance that some round begins at a place is therefore a recursion.
    """
    rows, _, depth = kept.shape
    passed, tested, rounds = np.zeros(depth), np.zeros(depth), 0.0
    for row in range(rows):
        last = (
            lengths[row] - 2
        )  # the newest place that can be pending while there is something left to say
        begins = np.zeros(lengths[row] + depth + 1)
        begins[prompts[row] - 1] = 1
        for t in range(prompts[row] - 1, last + 1):
            alive = begins[t]
            rounds += alive
            for d in range(min(depth, last + 1 - t)):
                chance = float(kept[row, t, d])
                tested[d] += alive
                passed[d] += alive * chance
                begins[t + d + 1] += alive * (1 - chance)
                alive *= chance
            begins[min(t + depth, last + 1) + 1] += alive
    tokens = sum(lengths) - sum(prompts)
    seen = tested > 0
    return Forecast(
        float(tokens / rounds) if rounds else float("nan"), (passed[seen] / tested[seen]).tolist()
    )


class Written(NamedTuple):
    """Prompts with what the target wrote after them."""

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
    """Plain decoding of the prompts, all in one batch. Raises NonFiniteLogits."""
    state = _begin(
        target,
        none.make(target),
        ModelParams(params.target),
        prompts,
        new_tokens,
        temperature,
        seed,
    )
    state = decode.autoregressive(target, params, state, max_steps=new_tokens, eos_id=tuple(eos_id))
    decode.check(state)
    tokens = np.maximum(np.asarray(state.tokens), 0)[:, : max(map(len, prompts)) + new_tokens]
    return Written(Batch(jnp.asarray(tokens)), np.asarray(state.length).tolist())


def _begin(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompts,
    new_tokens: int,
    temperature: float,
    seed: int,
):
    packed, lengths = decode.pack_prompts(prompts)
    return decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(seed, len(prompts)),
        max_len=packed.shape[1] + new_tokens,
        limit=lengths + new_tokens,
        sampling=sampling.make_sampling(len(prompts), temperature),
    )


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
    """A function of the drafter's parameters: {"tau_t0": foreseen, "alpha_t0_depth1": ..., "decoded_tau_t0": ...}.

    The target's text is written on the first call. ``moving``: the target is trained too; parameters are {"target", "draft"},
    and the text is written anew every time. Drafters without ``foresee`` are only decoded.
    """
    starts, eos = [len(p) for p in prompts], tuple(eos_id)
    rule = accept.load(RULES.get(drafter.siblings, "recursive"))
    texts: dict[float, Written] = {}
    foresee = None if drafter.training is None else drafter.training.foresee
    look = None if foresee is None else jax.jit(foresee)

    def examine(params: Any) -> dict[str, float]:
        pair = (
            ModelParams(params["target"], params["draft"])
            if moving
            else ModelParams(target_params, params)
        )
        found = {}
        for temperature in temperatures:
            name = f"t{temperature:g}"
            if look is not None:
                if moving or temperature not in texts:
                    texts[temperature] = write(
                        target, pair, prompts, new_tokens, temperature, eos, seed
                    )
                text = texts[temperature]
                kept = look(pair, text.batch, sampling.make_sampling(len(prompts), temperature))
                seen = forecast(np.asarray(kept, np.float64), starts, text.lengths)
                found[f"tau_{name}"] = seen.tau
                found |= {f"alpha_{name}_depth{d}": value for d, value in enumerate(seen.alpha, 1)}
            state = _begin(target, drafter, pair, prompts, new_tokens, temperature, seed)
            state, records = decode.generate(
                target, drafter, rule, pair, state, max_steps=new_tokens, eos_id=eos
            )
            decode.check(state)
            counts = metrics.count(records, [True] * len(prompts), drafter.longest)
            found[f"decoded_tau_{name}"] = counts.tokens / counts.rounds
        return found

    return examine


def accuracy(
    drafter: Drafter,
    params: ModelParams,
    texts: Sequence[Written],
    starts: Sequence[int],
    width: int,
) -> list[list[float]]:
    """[K][width]: how often, at depth d, the text says what the drafter ranks r-th; for ``tree_search``.

    ``starts`` are the lengths of the prompts; every place of a continuation counts once. Cai et al. 2024 (2401.10774),
    section 2.3.3, measure their heads so.
    """
    assert drafter.training is not None and drafter.training.ranks is not None
    look, counts, places = jax.jit(drafter.training.ranks), None, None
    for text in texts:
        ranks = np.asarray(look(params, text.batch))
        depth = ranks.shape[-1]
        counts = np.zeros((depth, width)) if counts is None else counts
        places = np.zeros(depth) if places is None else places
        for row, (start, length) in enumerate(zip(starts, text.lengths, strict=True)):
            for d in range(depth):
                seen = ranks[row, start - 1 : max(length - 1 - d, start - 1), d]
                seen = seen[seen >= 0]
                counts[d] += np.bincount(np.minimum(seen, width), minlength=width + 1)[:width]
                places[d] += len(seen)
    assert counts is not None and places is not None
    return (counts / np.maximum(places, 1)[:, None]).tolist()
