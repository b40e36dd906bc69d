"""The number that matters, during training: tokens per round on held-out prompts, foreseen from text and really decoded.

Foreseen: the target has written a text once; given it, every round's outcome has a known probability (``Drafter.foresee``), so
the expected number of rounds is a sum, with no noise of its own. Decoded: the same prompts through the compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, metrics, rng, sampling
from specjax.drafters import none
from specjax.types import CHAIN, DETERMINISTIC, LM, Batch, Drafter, ModelParams

RULES = {CHAIN: "chain", DETERMINISTIC: "deterministic"}  # the others: "recursive"


class Forecast(NamedTuple):
    """What decoding these texts takes."""

    tau: float  # tokens per round
    alpha: list[float]  # probability that the token at depth d was accepted, if those before it were


def forecast(kept: np.ndarray, prompts: Sequence[int], lengths: Sequence[int]) -> Forecast:
    """The expected rounds behind texts: kept f[B,T,M] as ``Drafter.foresee`` gives it, lengths of prompts and whole texts.

    A round that begins with token t pending ends d tokens further on with probability kept[t,0]..kept[t,d-2] (1 -
    kept[t,d-1]), or as far as its draft reaches; the chance that some round begins at a place is therefore a recursion.
    """
    rows, _, depth = kept.shape
    passed, tested, rounds = np.zeros(depth), np.zeros(depth), 0.0
    for row in range(rows):
        last = lengths[row] - 2  # the newest place that can be pending while there is something left to say
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
    return Forecast(float(tokens / rounds) if rounds else float("nan"), (passed[seen] / tested[seen]).tolist())


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
    """A function of the drafter's parameters: {"tau_t0": foreseen, "alpha_t0": ..., "decoded_tau_t0": ...} per temperature.

    The target's text is written on the first call. ``moving``: the target is trained too; parameters are {"target", "draft"},
    and the text is written anew every time. Drafters without ``foresee`` are only decoded.
    """
    packed, lengths = decode.pack_prompts(prompts)
    starts = np.asarray(lengths).tolist()
    width, keys = packed.shape[1] + new_tokens, rng.row_keys(seed, len(prompts))
    rule = accept.load(RULES.get(drafter.siblings, "recursive"))
    written: dict[float, tuple[Batch, list[int]]] = {}
    look = jax.jit(lambda params, batch, how: drafter.foresee(params, batch, how)) if drafter.foresee else None

    def begin(who: Drafter, params: ModelParams, temperature: float):
        how = sampling.make_sampling(len(prompts), temperature)
        limit = lengths + new_tokens
        return decode.prefill(
            target, who, params, packed, lengths, keys, max_len=width, limit=limit, sampling=how
        )  # fmt: skip

    def write(params: ModelParams, temperature: float) -> tuple[Batch, list[int]]:
        state = begin(none.make(target), ModelParams(params.target), temperature)
        state = decode.autoregressive(target, params, state, max_steps=new_tokens, eos_id=tuple(eos_id))
        decode.check(state)
        tokens = np.maximum(np.asarray(state.tokens), 0)[:, : width + 1]
        return Batch(jnp.asarray(tokens)), np.asarray(state.length).tolist()

    def examine(params: Any) -> dict[str, float]:
        pair = ModelParams(params["target"], params["draft"]) if moving else ModelParams(target_params, params)
        found = {}
        for temperature in temperatures:
            name = f"t{temperature:g}"
            if look is not None:
                if moving or temperature not in written:
                    written[temperature] = write(pair, temperature)
                batch, ends = written[temperature]
                kept = look(pair, batch, sampling.make_sampling(len(prompts), temperature))
                seen = forecast(np.asarray(kept, np.float64), starts, ends)
                found[f"tau_{name}"] = seen.tau
                found |= {f"alpha_{name}_depth{d}": value for d, value in enumerate(seen.alpha, 1)}
            state = begin(drafter, pair, temperature)
            state, records = decode.generate(
                target, drafter, rule, pair, state, max_steps=new_tokens, eos_id=tuple(eos_id)
            )
            decode.check(state)
            counts = metrics.count(records, [True] * len(prompts), drafter.longest)
            found[f"decoded_tau_{name}"] = counts.tokens / counts.rounds
        return found

    return examine
