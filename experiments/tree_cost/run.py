"""What a round costs beyond the target's own forward: the mask of a tree, acceptance, bookkeeping, commit.

    PYTHONPATH=. python experiments/tree_cost/run.py            (about 2 minutes on 2 CPU cores)

The target has GPT-2's shape with 32768 tokens (12 layers, 768 wide, 12 heads, float32, random weights); the draft is a tree
of 64 nodes that costs nothing, for it is the same in every round. Measured:

- ``forward_*``: passes over 1 token, over chains, and over the tree with its pending token. Tree less chain is the mask.
- ``greedy_*``: a whole ``speculative_step`` at temperature 0, and what it does beside the forward, part by part. They
  should not take more than 5 % of the forward.
- ``sampled_*``: from logits to verdict at temperature 1, softmax included, rule by rule, on laws that overlap by about a
  half: the draft's tokens are drawn from the laws that it shows. ``softmax`` is what they have in common.

Every number is the median over loops that take turns, whose iterations depend on each other. Shares are of the forward of
the whole tree and of one token. Writes ``results.json`` beside this file. Run it on an idle machine: ``others_cpu`` is the
share of it that other processes took meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.vs_transformers.run import GPT2, busy, machine
from specjax import accept, decode, rng, sampling, step
from specjax.accept import _verdict
from specjax.drafters import _growth
from specjax.models import lm
from specjax.models.transformer import TransformerConfig
from specjax.topology import shapes
from specjax.types import (
    DETERMINISTIC,
    IID,
    LM,
    WITHOUT_REPLACEMENT,
    Accept,
    Context,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
)

TARGET = dataclasses.replace(GPT2, vocab_size=32768)
# The rules, and how the siblings of their drafts came to be.
RULES = {
    "recursive": WITHOUT_REPLACEMENT,
    "traversal": WITHOUT_REPLACEMENT,
    "match": WITHOUT_REPLACEMENT,
    "deterministic": DETERMINISTIC,
    "k_seq": IID,
}
Loop = Callable[[], Any]


def tie(turn: Any, *values: Any) -> tuple:
    """``values``, of which the compiler must believe that they changed since the last turn."""
    return jax.lax.optimization_barrier((turn, values))[1]


def repeat(body: Callable[..., Any], turns: int, carry: Any, *given: Any) -> Loop:
    """A compiled loop of ``carry = body(turn, carry, *given)``, which goes on where it ended the last time."""

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(carry, given):
        return jax.lax.fori_loop(0, turns, lambda turn, carry: body(turn, carry, *given), carry)

    box = [jax.tree.map(jnp.copy, carry)]

    def run():
        box[0] = loop(box[0], given)
        return box[0]

    return run


def forward(
    target: LM, params: Any, state: DecodeState, size: int, parents: jax.Array | None, turns: int
) -> Loop:
    """Passes over ``size`` tokens. Of the logits one number is read: to read them is acceptance."""

    def body(_, carry, params, parents):
        tokens, cache = carry
        out, cache = target.apply(params, tokens, cache, parents)
        (logits,) = tie(tokens, out.logits)
        return tokens + (logits[..., 0] > 9).astype(jnp.int32), cache

    return repeat(body, turns, (state.tokens[:, :size], state.cache), params, parents)


def rounds(
    target: LM, drafter: Drafter, rule: Accept, params: ModelParams, state: DecodeState, turns: int
) -> Loop:
    """Whole rounds; each loop begins with a text of the same length."""

    def body(turn, state, params, length):
        length = jnp.where(turn == 0, length, state.length)
        state = state.replace(length=length, cache=state.cache.replace(length=length - 1))
        return step.speculative_step(target, drafter, rule, params, state)[0]

    return repeat(body, turns, state, params, state.length)


def commits(target: LM, state: DecodeState, path: jax.Array, turns: int) -> Loop:
    """Keeps a path of the tree, again and again at the same place."""

    def body(_, cache, path):
        (path,) = tie(cache.length, path)
        return target.commit(cache, (path >= 0).sum(-1), path).replace(length=cache.length)

    return repeat(body, turns, state.cache, path)


def sums(
    part: Callable[..., jax.Array], cases: Sequence[tuple[Draft, jax.Array]], turns: int
) -> Loop:
    """Sums of ``part(turn, draft, logits)`` over the turns, one for each case.

    What a turn found writes one number into the logits of the next, so that nothing can be done before the loop.
    """

    def body(turn, carry, draft):
        logits, total = carry
        logits = logits.at[0, 0, 0].add(jnp.where(total.sum() == -7, 1, 0))
        return logits, total + part(turn, draft, logits)

    loops = []
    for draft, logits in cases:
        out = jax.eval_shape(part, jnp.zeros((), jnp.int32), draft, logits)
        loops.append(repeat(body, turns, (logits, jnp.zeros(out.shape, out.dtype)), draft))
    return lambda: [loop()[1] for loop in loops]


def constant(draft: Draft, siblings: str) -> Drafter:
    """A drafter that proposes ``draft`` in every round and costs nothing."""
    return Drafter(
        init_params=lambda key: {},
        init=lambda params, context, out, slots: {},
        propose=lambda params, keys, context, state: (draft, state),
        update=lambda params, state, draft, verdict, out: state,
        nodes=draft.tokens.shape[1],
        name="constant",
        siblings=siblings,
        depth=draft.longest,
    )


def shaped(tree: shapes.Topology, tokens: jax.Array) -> Draft:
    """A draft of that shape, without laws."""
    parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), tokens.shape)
    return Draft(tokens, jnp.ones_like(tokens, bool), parents, depth=tree.depth)


def laws(
    tree: shapes.Topology, batch: int, siblings: str, seed: int, vocab: int
) -> tuple[Draft, jax.Array]:
    """A draft drawn from its own laws, and target logits f32[B,N+1,V]; the laws of both overlap by about a half."""
    noise = np.random.default_rng(seed)
    shape = (batch, tree.nodes + 1, vocab)
    logits = jnp.asarray(5 * noise.standard_normal(shape, np.float32))
    drafted = logits + jnp.asarray(noise.standard_normal(shape, np.float32))
    inner = [node for node in range(-1, tree.nodes) if tree.children[node + 1]]
    keys = rng.RowKeys(
        rng.row_keys(seed, batch), jnp.zeros((), jnp.int32), jnp.ones((batch,), jnp.int32)
    )
    context = Context(
        jnp.ones((batch, 1), jnp.int32),
        jnp.ones((batch,), jnp.int32),
        sampling.make_sampling(batch),
    )
    kind = next(name for name, kind in _growth.KINDS.items() if kind == siblings)
    draft = _growth.children(
        keys, context, drafted[:, np.array(inner) + 1], np.arange(len(inner)), inner, tree, kind
    )
    return shaped(tree, draft.tokens).replace(probs=draft.probs), logits


def clock(loops: dict[str, tuple[Loop, int]], repeats: int) -> dict[str, list[float]]:
    """Seconds of a turn of each loop (given with its number of turns), one sample a repeat, all loops in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for loop, _ in loops.values():
        jax.block_until_ready(loop())
    for _ in range(repeats):
        for name, (loop, turns) in loops.items():
            began = time.perf_counter()
            jax.block_until_ready(loop())
            seconds[name].append((time.perf_counter() - began) / turns)
    return seconds


def study(
    config: TransformerConfig,
    tree: shapes.Topology,
    batch: int,
    context: int,
    turns: int,
    repeats: int,
):
    """All measurements, as they go into results.json."""
    target, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    size, small = tree.nodes + 1, 10 * turns
    noise = np.random.default_rng(0).integers(0, config.vocab_size, (batch, context + tree.nodes))
    tokens = jnp.asarray(noise, jnp.int32)
    draft = shaped(tree, tokens[:, context:])
    drafter, rule = constant(draft, DETERMINISTIC), accept.load("recursive")
    state = decode.prefill(
        target, drafter, ModelParams(params), tokens[:, :context], jnp.full((batch,), context, jnp.int32),
        rng.row_keys(0, batch), max_len=config.max_positions - tree.nodes,
        sampling=sampling.make_sampling(batch, temperature=0.0),
    )  # fmt: skip
    # The path that commit keeps: as far from where it belongs as there is one.
    path = jnp.broadcast_to(
        jnp.asarray([level[-1] for level in tree.levels], jnp.int32), (batch, tree.depth)
    )
    hot, light = sampling.make_sampling(batch), state.replace(cache=(), draft=())
    cases = {
        kind: [laws(tree, batch, kind, i, config.vocab_size) for i in range(3)]
        for kind in set(RULES.values())
    }

    def greedy_accept(_, draft, logits):
        return rule.greedy(draft, logits).tokens

    def greedy_bookkeeping(_, draft, logits):
        verdict = _verdict.along(draft, path, path[:, 0])
        drafted, tested = step._counts(draft, verdict, False)
        verdict, ended = step.cut(verdict, light, None)
        verdict = step.withdraw(verdict, ~step._finite(draft, verdict, logits, rule.whole_tree))
        after = step.advance(light, verdict, ended, ended)
        return after.tokens.sum(-1) + after.length + drafted + tested + after.done

    def softmax(_, draft, logits):
        (probs,) = tie(
            draft.tokens, sampling.to_probs(logits, hot)
        )  # made whole, though little of it is read
        return probs[..., 0]

    def sampled(name):
        def part(turn, draft, logits):
            keys = rng.RowKeys(state.keys, turn, state.length + turn)
            verdict = accept.load(name).sampled(keys, draft, sampling.to_probs(logits, hot))
            return jnp.stack(
                [verdict.count - 1, verdict.tokens.max(-1)]
            )  # the second, or nothing need be drawn

        return part

    loops: dict[str, tuple[Loop, int]]
    loops = {
        f"forward_chain_{n}": (forward(target, params, state, n, None, turns), turns)
        for n in (1, 8, 64, size)
    }
    loops["forward_tree"] = (
        forward(target, params, state, size, step.block_parents(draft), turns),
        turns,
    )
    loops["greedy_step"] = rounds(target, drafter, rule, ModelParams(params), state, turns), turns
    for part in (greedy_accept, greedy_bookkeeping):
        loops[part.__name__] = sums(part, cases[DETERMINISTIC][:1], small), small
    loops["greedy_commit"] = commits(target, state, path, small), small
    loops["softmax"] = sums(softmax, cases[DETERMINISTIC][:1], small), small
    for name, kind in RULES.items():
        loops[f"sampled_{name}"] = sums(sampled(name), cases[kind], turns), turns * len(cases[kind])
    accepted = {
        n: float(np.mean([t[0] for t in loops[f"sampled_{n}"][0]()])) / turns for n in RULES
    }
    seconds = clock(loops, repeats)

    median = {name: statistics.median(all_) for name, all_ in seconds.items()}
    whole, one = median["forward_tree"], median["forward_chain_1"]
    for more, less in (("greedy_step", "forward_tree"), ("forward_tree", f"forward_chain_{size}")):
        pairs = zip(seconds[more], seconds[less], strict=True)  # neighbours in time
        median[f"{more} less {less}"] = statistics.median(a - b for a, b in pairs)
    median["greedy parts together"] = sum(
        median[f"greedy_{part}"] for part in ("accept", "bookkeeping", "commit")
    )
    for name in RULES:
        median[f"{name} less softmax"] = median[f"sampled_{name}"] - median["softmax"]
    rows = [
        {"name": n, "ms": 1e3 * s, "of_tree_forward": s / whole, "of_one_token_forward": s / one}
        | ({"all_ms": [1e3 * x for x in seconds[n]]} if n in seconds else {})
        for n, s in median.items()
    ]
    return {"rows": rows, "accepted_per_round": accepted}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--tree", default="4x3x2x1", help="as topology.parse reads it; the default has 64 nodes"
    )
    parser.add_argument(
        "--context", type=int, default=256, help="tokens of the text before the first round"
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=4,
        help="passes in one loop of forwards; short parts take ten times",
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=TARGET.num_layers)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()

    config, tree = dataclasses.replace(TARGET, num_layers=args.layers), shapes.parse(args.tree)
    since, others = time.perf_counter(), busy()
    measured = study(config, tree, args.batch, args.context, args.turns, args.repeats)
    others = (busy() - others) / (time.perf_counter() - since) / (os.cpu_count() or 1)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "others_cpu": round(others, 3),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - since),
        "versions": {name: version(name) for name in ("jax", "flax")},
        "model": f"random GPT-2 ({args.layers} layers, 768 wide, 12 heads, vocabulary 32768), float32",
        "batch": args.batch,
        "context": args.context,
        "tree": {"spec": args.tree, "nodes": tree.nodes, "depth": tree.depth},
        **measured,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'':32}{'ms':>9}  of the tree's forward  of one token's")
    for row in measured["rows"]:
        print(
            f"{row['name']:32}{row['ms']:9.2f}{row['of_tree_forward']:14.1%}{row['of_one_token_forward']:16.1%}"
        )
    print(
        "accepted a round:",
        ", ".join(f"{name} {count:.2f}" for name, count in measured["accepted_per_round"].items()),
    )
    print(f"other processes took {others:.0%} of the machine")


if __name__ == "__main__":
    main()
