"""The cost of drafting with parameters: one step, a whole draft, and what growing it adds.

    PYTHONPATH=. python experiments/draft_steps/run.py            (about 4 minutes on 2 CPU cores)

The target has GPT-2's shape with 32768 tokens (12 layers, 768 wide, float32, random weights, batch
1), after a text of 512 tokens. Every drafter has new parameters. Measured, in milliseconds and as
shares of one pass of the target over one token:

- ``first``: the drafter's first pass (its logits included);
- ``draft``: proposing a whole draft, and the update after a verdict;
- ``network``: the same passes of the drafter's network, one after the other, with layouts that are
  constants and without choosing tokens, growing a tree or gathering (with what joins the target's
  taps);
- ``growth``: the difference between the last two. It should be at most 5 % of the target's pass.

Medians over loops that run in turns and whose iterations depend on each other. Writes
``results.json`` beside this file; run it on an idle machine.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import GPT2, checked, options, record, start
from experiments.draft_cost.run import ROOM, passes
from experiments.loops import Loop, clock, repeat, tie
from specjax import drafters, rng, sampling, tree
from specjax.drafters.growth import Nodes
from specjax.drafters.growth.plans import Fixed
from specjax.drafters.heads.eagle._network import Network
from specjax.files import write_json
from specjax.models import lm
from specjax.types import LM, Context, Drafter, ModelParams, Output, Verdict

TARGET = dataclasses.replace(GPT2, vocab_size=32768)
PARTS = ("first", "network", "draft", "growth")
TIMES = frozenset(f"{part}_{unit}" for part in PARTS for unit in ("ms", "share"))
TIMES |= {"verify_ms", "forward_ms"}
PASSES = 4  # in a loop of target passes
TREE = {"tree": "dynamic", "nodes": 24, "depth": 4, "top_k": 6}
CHAIN = {"gamma": 4}


def contenders(target: LM) -> dict[str, Drafter]:
    """Label -> drafter, without parameters."""
    ids = np.arange(0, target.vocab_size, 4, dtype=np.int32)
    made = {
        "medusa, chain": ("medusa", {"heads": 4}),
        "hydra, chain": ("hydra", {"heads": 4}),
        "redrafter, chain": ("redrafter", {"tree": "chain:4"}),
        "redrafter, beam": ("redrafter", {"tree": "beam", "top_k": 6, "depth": 4}),
        "eagle, chain": ("eagle", CHAIN),
        "eagle, dynamic tree": ("eagle", TREE),
        "eagle3, chain": ("eagle3", CHAIN),
        "eagle3, dynamic tree": ("eagle3", TREE),
        "eagle3, a quarter of the tokens, chain": ("eagle3", CHAIN | {"draft_ids": ids}),
        "eagle3, a quarter of the tokens, dynamic tree": ("eagle3", TREE | {"draft_ids": ids}),
    }
    return {
        label: drafters.make(name, target=target, **keys) for label, (name, keys) in made.items()
    }


def prepare(drafter: Drafter, target: LM, params: Any, text: jax.Array) -> tuple:
    """(parameters of the pair, context, state after the prompt)."""
    assert drafter.training is not None and drafter.training.start is not None
    pair = ModelParams(params, drafter.training.start(params, jax.random.key(1)))
    size = text.shape[1]
    tokens = jnp.pad(text, ((0, 0), (0, ROOM)), constant_values=-1)
    context = Context(tokens, jnp.full((1,), size, jnp.int32), sampling.make_sampling(1, 0.0))
    random = jax.random.normal(jax.random.key(2), (1, size - 1, target.width or 0))
    out = Output(jnp.zeros((1, 0, target.vocab_size)), random, (random,) * len(drafter.taps))
    state = jax.jit(lambda p, c, o: drafter.init(p, c, o, size + ROOM))(pair, context, out)
    return pair, context, state


def rounds(drafter: Drafter, target: LM, prepared: tuple, iterations: int) -> Loop:
    """A loop of propose and update; every verdict accepts nothing."""
    pair, context, state = prepared
    n, m, keys = drafter.nodes, drafter.longest, rng.row_keys(0, 1)
    hidden = jax.random.normal(jax.random.key(3), (1, n + 1, target.width or 0))
    verdict = Verdict(
        jnp.where(jnp.arange(m + 1) == 0, 7, -1)[None],
        jnp.ones((1,), jnp.int32),
        jnp.full((1, m), -1, jnp.int32),
    )

    def body(index, carry, pair, context, hidden):
        tokens, state = carry
        here = context.replace(tokens=tokens)
        row = rng.RowKeys(keys, index, context.length)
        draft, state = drafter.propose(pair, row, here, state)
        seen = hidden + draft.tokens[0, -1] * 1e-9
        out = Output(jnp.zeros((1, n + 1, target.vocab_size)), seen, (seen,) * len(drafter.taps))
        state = drafter.update(pair, state, draft, verdict, out)
        # The text never changes, but the compiler cannot derive this. The shapes of the passes do
        # not depend on how many slots are new.
        return tokens + jnp.where(draft.tokens.sum() == -7, 1, 0), state

    return repeat(body, iterations, (context.tokens, state), pair, context, hidden)


def network(drafter: Drafter, prepared: tuple, iterations: int, steps: bool = True) -> Loop:
    """The passes of ``rounds`` alone; without ``steps`` the first pass only."""
    (pair, context, state), (stepper, (growth, _)) = prepared, drafter.propose.args[0]  # type: ignore[attr-defined]
    if isinstance(growth, Fixed):
        widths = [1] * (growth.depth - 1)
    else:
        widths = [width for width, _ in growth.levels if width]

    def body(_, carry, pair, context):
        tokens, state = carry
        # Heads read no token, and could be computed once for all iterations.
        (kept,) = tie(tokens, state.kept)
        begun = stepper.begin(pair, context.replace(tokens=tokens), kept)
        probe, block = begun.logits.max(-1).sum(), begun.memory
        roots = 0 if begun.memory is None else 1
        above = [-1] * roots
        for depth, width in enumerate(widths if steps else (), start=1):
            # Children of the first nodes of the level before.
            first = len(above) - (widths[depth - 2] if depth > 1 else 0)
            own = [first if depth > 1 else roots - 1] * width
            above += own
            layout = tree.layout(jnp.asarray([above], jnp.int32), width)
            # The tokens depend on the pass before.
            fed = jnp.full((1, width), 5, jnp.int32) + (probe > 1e9).astype(jnp.int32)
            nodes = Nodes(fed, np.array(own), depth, layout)
            logits, memory = stepper.step(pair, begun.kept, nodes, block)
            block = memory if block is None else tree.join(block, memory)
            probe += logits.max(-1).sum()
        kept = read(stepper.begin.args[0], pair, begun.kept, probe) if steps else begun.kept
        return tokens + (probe > 1e9).astype(jnp.int32), state.replace(kept=kept)

    return repeat(body, iterations, (context.tokens, state), pair, context)


def read(made_of: Any, pair: ModelParams, kept: Any, probe: jax.Array) -> Any:
    """With the target's features of the next round, where a network joins them from several taps.

    That is a product with a matrix, once in a round.
    """
    if not isinstance(made_of, Network) or not made_of.shape.taps:
        return kept
    seen = kept.features + probe * 1e-9  # the target is as wide as the network
    out = Output(jnp.zeros((*seen.shape[:2], 0)), seen, (seen,) * len(made_of.shape.taps))
    return kept.replace(features=made_of.read(pair, out))


def measure(length: int, iterations: int, samples: int, small: bool = False) -> dict[str, Any]:
    """All times; ``small`` makes the model tiny, for a test."""
    shape = {"num_layers": 2, "hidden_size": 24, "head_dim": 2, "vocab_size": 64} if small else {}
    config = dataclasses.replace(TARGET, **shape)
    target = lm.from_config(config)
    params = lm.init_params(config, jax.random.key(0))
    text = jax.random.randint(jax.random.key(4), (1, length), 0, config.vocab_size)
    chosen = contenders(target)
    sizes = sorted({1, *(drafter.nodes + 1 for drafter in chosen.values())})
    loops: dict[str, tuple[Loop, int]] = {
        f"forward_{size}": (passes(target, params, length, size, PASSES), PASSES) for size in sizes
    }
    for label, drafter in chosen.items():
        prepared = prepare(drafter, target, params, text)
        turns = functools.partial(network, drafter, prepared, iterations)
        loops[f"draft, {label}"] = rounds(drafter, target, prepared, iterations), iterations
        loops[f"network, {label}"] = turns(), iterations
        loops[f"first, {label}"] = turns(steps=False), iterations
    seconds = clock(loops, samples)
    ms = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    one = ms["forward_1"]
    rows = []
    for label, drafter in chosen.items():
        draft, own, first = (ms[f"{part}, {label}"] for part in ("draft", "network", "first"))
        # The pairs of one turn are next to each other in time.
        pairs = zip(seconds[f"draft, {label}"], seconds[f"network, {label}"], strict=True)
        growth = 1e3 * statistics.median(a - b for a, b in pairs)
        times = {"first": first, "draft": draft, "network": own, "growth": growth}
        row: dict[str, Any] = {"drafter": label, "nodes": drafter.nodes}
        row |= {f"{name}_ms": value for name, value in times.items()}
        row |= {f"{name}_share": value / one for name, value in times.items()}
        rows.append(row | {"verify_ms": ms[f"forward_{drafter.nodes + 1}"]})
    forwards = {name: value for name, value in ms.items() if name.startswith("forward_")}
    return {"rows": rows, "forward_ms": forwards}


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--length", type=int, default=512, help="tokens of the text")
    add("--turns", type=int, default=8, help="rounds in a loop")
    add("--samples", type=int, default=9, help="loops of each kind")
    add("--small", action="store_true", help="a tiny model, for a test")
    args = parser.parse_args(argv)
    stopwatch = start(args)
    result = measure(args.length, args.turns, args.samples, args.small)
    result |= record(__file__, argv, stopwatch)
    write_json(args.out, checked(result, stopwatch, TIMES))
    for row in result["rows"]:
        cells = " ".join(
            f"{name} {row[f'{name}_ms']:6.2f} ms {row[f'{name}_share']:6.1%}  " for name in PARTS
        )
        print(f"{row['drafter']:45} {cells}")
    print({name: round(ms, 1) for name, ms in result["forward_ms"].items()})


if __name__ == "__main__":
    main(sys.argv[1:])
