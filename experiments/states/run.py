"""What a commit of recurrent layers costs, beside a copy of the state after every token.

    PYTHONPATH=. python experiments/states/run.py            (about 7 minutes on 2 CPU cores)

A decoder of 8 layers (512 wide, float32, random weights), 6 of them with the gated delta rule or
Mamba-2: 16 heads with a state of 64 by 64. After a pass over T tokens some of them are accepted.

- ``updates``: what specjax does. A pass returns, for each token and layer, a key, a value and a
  decay; the commit adds what the accepted ones wrote to the state.
- ``states``: a pass writes the state after each token, and the commit chooses one of them, as
  several serving programs do.

``pass`` is the pass and a commit that moves no state. ``updates_bytes`` and ``states_bytes`` are
what the two forms hold between pass and commit, for one row. Every time is the median of loops that
run in turns. Writes ``results.json`` beside this file. Run it on an idle machine.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import checked, options, record, start, without_folder
from experiments.loops import clock, repeat, tie
from specjax.cache import MixedCache, RecurrentState, Updates
from specjax.files import write_json
from specjax.models import families, lm
from specjax.models.transformer_config import Recurrent, TransformerConfig
from specjax.types import LM

TIMES = frozenset({"pass_ms", "updates_ms", "states_ms"})
FAMILIES = ("qwen3_next", "nemotron_h")
LAYERS = 8


def shape(family: str, layers: int = LAYERS, width: int = 512) -> TransformerConfig:
    """A decoder of which every fourth layer has attention."""
    config = families.shape(
        family,
        vocab_size=2048,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=2,
        head_dim=width // 8,
        max_positions=2048,
    )
    usual, own = config.recurrent, tuple(i for i in range(layers) if (i + 1) % 4)
    assert usual is not None
    sizes = Recurrent(8, 16, 64, 64, 4, own, usual.kind, usual.least_step)
    return dataclasses.replace(config, recurrent=sizes)


def states_of(state: RecurrentState, updates: Updates) -> RecurrentState:
    """The states after each of the T tokens of a chain: [T,B,...]."""
    groups = state.memory.shape[1] // updates.keys.shape[2]

    def one(before: RecurrentState, token: Updates) -> tuple[RecurrentState, RecurrentState]:
        keys = jnp.repeat(token.keys, groups, 1)
        written = keys[..., None] * token.values[..., None, :]
        memory = jnp.exp(token.decay)[..., None, None] * before.memory + written
        window = jnp.concatenate([before.window[:, 1:], token.inputs[:, None]], 1)
        return (after := RecurrentState(memory, window)), after

    return jax.lax.scan(one, state, jax.tree.map(lambda x: x.swapaxes(0, 1), updates))[1]


def chosen(before: RecurrentState, states: RecurrentState, count: jax.Array) -> RecurrentState:
    """The state after the first count[b] tokens."""
    every = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), before, states)
    return jax.tree.map(lambda x: x[count, jnp.arange(len(count))], every)


def committed(form: str, target: LM, cache: MixedCache, block: Any, count: jax.Array) -> Any:
    """The cache after the commit, in one of the forms; its length is that of before."""
    if form == "pass":
        after = target.commit(cache, block, jnp.zeros_like(count))
    elif form == "updates":
        after = target.commit(cache, block, count)
    else:
        after = target.commit(cache, block, jnp.zeros_like(count))
        pairs = zip(cache.states, block.updates, strict=True)
        every = tie(count, *(states_of(*pair) for pair in pairs))
        states = zip(cache.states, every, strict=True)
        after = after.replace(states=tuple(chosen(*pair, count) for pair in states))
    return after.replace(attention=after.attention.replace(length=cache.length))


def loop(form: str, target: LM, params: Any, batch: int, size: int, turns: int) -> Any:
    """Passes over ``size`` tokens and their commits; rows accept different numbers of tokens."""

    def body(turn, carry, params):
        tokens, cache = carry
        out, block = target.apply(params, tokens, cache)
        count = (turn + jnp.arange(batch)) % size + 1
        cache = committed(form, target, cache, block, count)
        return tokens + (out.logits[..., 0] > 9).astype(jnp.int32), cache

    tokens = jax.random.randint(jax.random.key(0), (batch, size), 0, target.vocab_size)
    return repeat(body, turns, (tokens, target.init_cache(batch, 256)), params)


def measured(family: str, batch: int, sizes: Sequence[int], turns: int, repeats: int) -> list[dict]:
    """The rows of a family and a batch size."""
    config = shape(family)
    target, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    forms = ("pass", "updates", "states")
    loops = {
        (form, size): (loop(form, target, params, batch, size, turns), turns)
        for size in sizes
        for form in forms
    }
    seconds: dict[Any, list[float]] = clock(loops, repeats)
    rows = []
    for size in sizes:
        row = {"family": family, "batch_size": batch, "tokens": size} | held(target, params, size)
        for form in forms:
            row[f"{form}_ms"] = 1e3 * statistics.median(seconds[form, size])
        rows.append(row)
    return rows


def held(target: LM, params: Any, size: int) -> dict[str, int]:
    """Bytes that the two forms hold between a pass over ``size`` tokens and its commit."""
    tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)
    cache = jax.eval_shape(lambda: target.init_cache(1, 256))
    _, block = jax.eval_shape(target.apply, params, tokens, cache)
    return {
        "updates_bytes": _bytes(block.updates),
        "states_bytes": size * _bytes(cache.states),
    }


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add: Callable[..., Any] = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=(1, 8))
    add("--tokens", type=int, nargs="+", default=(1, 4, 8, 16))
    add("--turns", type=int, default=30, help="passes in a loop")
    add("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    stopwatch, rows = start(args), []
    for family in FAMILIES:
        for batch in args.batch_sizes:
            rows += measured(family, batch, args.tokens, args.turns, args.repeats)
            for row in rows[-len(args.tokens) :]:
                print(row, flush=True)
    named = [without_folder(each) for each in argv]
    result = {"rows": rows} | record(__file__, named, stopwatch)
    write_json(args.out, checked(result, stopwatch, TIMES))


if __name__ == "__main__":
    main(sys.argv[1:])
