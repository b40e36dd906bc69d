"""What a round costs beyond the target's own forward: the mask of a tree, acceptance, bookkeeping, commit.

    PYTHONPATH=. python experiments/tree_cost/run.py            (about 3 minutes on 2 CPU cores)

The target has GPT-2's shape with 32768 tokens (12 layers, 768 wide, 12 heads, float32, random weights); the draft is a tree
of 64 nodes and costs nothing, for it is the same in every round. Measured:

- ``forward``: passes over 1 token, chains, and the tree with its pending token (65 tokens). Tree less chain is the mask.
- ``greedy``: the whole ``speculative_step`` less the bare forward of the same block; and its parts by themselves.
- ``sampled``: softmax, and each rule on laws that overlap partly (what a node costs depends on how far the walk goes).

Every number is the median of several loops, all of them in turns, whose iterations depend on each other. Everything is also
given as a share of the forward of the whole block and of one token. Writes ``results.json`` beside this file. Run it on an
idle machine: ``others_cpu`` is the share of it that other processes took meanwhile.
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

from specjax import accept, decode, rng, sampling, step, topology
from specjax.drafters import draft_tree
from specjax.models import lm
from specjax.models.transformer import TransformerConfig
from specjax.types import DETERMINISTIC, IID, LM, WITHOUT_REPLACEMENT, Context, DecodeState, Draft, Drafter, ModelParams

TARGET = TransformerConfig(
    family="gpt2",
    vocab_size=32768,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_positions=1024,
    attention_bias=True,
    mlp_bias=True,
)
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


def shaped(tree: topology.Topology, tokens: jax.Array) -> Draft:
    """A draft of that shape, without laws."""
    parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), tokens.shape)
    return Draft(tokens, jnp.ones_like(tokens, bool), parents, depth=tree.depth)


def forward(target: LM, params: Any, state: DecodeState, size: int, parents: jax.Array | None, turns: int) -> Loop:
    """Passes over ``size`` tokens, each fed what the last one found best."""

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(params, cache, tokens):
        def turn(_, carry):
            tokens, cache = carry
            out, cache = target.apply(params, tokens, cache, parents)
            # One number a token: reading the logits further would be acceptance, which is measured elsewhere.
            (logits,) = tie(tokens, out.logits)
            return tokens + (logits[..., 0] > 9).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, turns, turn, (tokens, cache))

    tokens = jnp.ones((state.length.shape[0], size), jnp.int32)
    box = [jax.tree.map(jnp.copy, state.cache)]

    def run():
        out, box[0] = loop(params, box[0], tokens)
        return out

    return run


def rounds(target: LM, drafter: Drafter, rule, params: ModelParams, state: DecodeState, turns: int) -> Loop:
    """Whole rounds; the text is as long again at the start of each loop."""

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(params, state, length):
        body = lambda _, state: step.speculative_step(target, drafter, rule, params, state)[0]  # noqa: E731
        state = state.replace(length=length, cache=state.cache.replace(length=length - 1), done=length < 0)
        return jax.lax.fori_loop(0, turns, body, state)

    length = jnp.copy(state.length)
    box = [jax.tree.map(jnp.copy, state)]

    def run():
        box[0] = loop(params, box[0], length)
        return box[0].tokens

    return run


def commits(target: LM, state: DecodeState, path: jax.Array, turns: int) -> Loop:
    """Keeps a path of the tree, again and again at the same place."""

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(cache, path):
        def turn(_, cache):
            (now,) = tie(cache.length, path)
            return target.commit(cache, (now >= 0).sum(-1), now).replace(length=cache.length)

        return jax.lax.fori_loop(0, turns, turn, cache)

    box = [jax.tree.map(jnp.copy, state.cache)]

    def run():
        box[0] = loop(box[0], path)
        return box[0].length

    return run


def repeated(part: Callable[..., Any], values: Sequence[tuple], turns: int) -> Loop:
    """``part(turn, draft, logits) -> array`` for each of the values, each turn after the last.

    The last result writes one number into the logits, so that no turn's work can be done before the loop.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(draft, logits):
        def turn(index, carry):
            logits, last = carry
            logits = logits.at[0, 0, 0].add(jnp.where(last.sum() == -7, 1, 0))
            return logits, part(index, draft, logits)

        shape = jax.eval_shape(part, jnp.zeros((), jnp.int32), draft, logits)
        return jax.lax.fori_loop(0, turns, turn, (logits, jnp.zeros(shape.shape, shape.dtype)))

    boxes = [(draft, [jnp.copy(logits)]) for draft, logits in values]

    def run():
        last = []
        for draft, box in boxes:
            box[0], result = loop(draft, box[0])
            last.append(result)
        return last

    return run


def laws(tree: topology.Topology, batch: int, siblings: str, seed: int, vocab: int) -> tuple[Draft, jax.Array]:
    """A draft drawn from its own laws, and target logits f32[B,N+1,V]; the laws of both overlap by about a half."""
    noise = np.random.default_rng(seed)
    shape = (batch, tree.nodes + 1, vocab)
    logits = jnp.asarray(5 * noise.standard_normal(shape, np.float32))
    drafted = logits + jnp.asarray(noise.standard_normal(shape, np.float32))
    inner = [node for node in range(-1, tree.nodes) if tree.children[node + 1]]
    keys = rng.RowKeys(rng.row_keys(seed, batch), jnp.zeros((), jnp.int32), jnp.ones((batch,), jnp.int32))
    context = Context(jnp.ones((batch, 1), jnp.int32), jnp.ones((batch,), jnp.int32), sampling.make_sampling(batch))
    kind = next(name for name, kind in draft_tree.KINDS.items() if kind == siblings)
    draft = draft_tree._children(keys, context, drafted[:, np.array(inner) + 1], inner, tree, kind)
    return shaped(tree, draft.tokens).replace(probs=draft.probs), logits


def clock(loops: dict[str, tuple[Loop, int]], repeats: int) -> dict[str, dict]:
    """Seconds of a turn of each loop (given with its turns): median, and all of them; taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for loop, _ in loops.values():
        jax.block_until_ready(loop())
    for _ in range(repeats):
        for name, (loop, turns) in loops.items():
            began = time.perf_counter()
            jax.block_until_ready(loop())
            seconds[name].append((time.perf_counter() - began) / turns)
    return {name: {"seconds": statistics.median(all_), "all": all_} for name, all_ in seconds.items()}


def machine() -> dict:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else "unknown", "cores": os.cpu_count(), "device": str(jax.devices()[0])}


def busy() -> float:
    """CPU seconds that other processes have used since the machine started (0 where /proc does not tell)."""
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - time.process_time()


def study(config: TransformerConfig, tree: topology.Topology, batch: int, context: int, turns: int, repeats: int) -> dict:
    """All measurements: {"forward": ..., "greedy": ..., "sampled": ...}, times in seconds."""
    target, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    vocab, size = config.vocab_size, tree.nodes + 1
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, context + tree.nodes)).astype(np.int32)
    draft = shaped(tree, jnp.asarray(tokens[:, context:]))
    drafter, greedy = constant(draft, DETERMINISTIC), accept.load("recursive")
    state = decode.prefill(
        target,
        drafter,
        ModelParams(params),
        jnp.asarray(tokens[:, :context]),
        jnp.full((batch,), context, jnp.int32),
        rng.row_keys(0, batch),
        max_len=config.max_positions - tree.nodes,
        sampling=sampling.make_sampling(batch, temperature=0.0),
    )
    keys = rng.RowKeys(state.keys, state.round, state.length)
    parents = step._block_parents(draft)
    path = jnp.full((batch, tree.depth), -1, jnp.int32)
    for depth, level in enumerate(tree.levels):  # as far from where they belong as there are
        path = path.at[:, depth].set(level[-1])
    done = jax.jit(target.apply)(params, draft.tokens, state.cache, None)[0].logits.block_until_ready()
    logits = jnp.concatenate([done[:, :1], done], 1)

    def accepting(_, draft, logits):
        return greedy.greedy(draft, logits).tokens

    def bookkeeping(_, draft, logits):
        verdict = accept._verdict.along(draft, path, path[:, 0])
        drafted, tested = step._reach(draft, verdict)
        verdict, ended = step.cut(verdict, light, ~step._finite(draft, verdict, logits), None)
        after = step.advance(light, verdict, ended, ended)
        return after.tokens.sum(-1) + after.length + drafted + tested + after.done

    light = state.replace(cache=(), draft=())
    small = 10 * turns
    loops: dict[str, tuple[Loop, int]] = {}
    for name, count, above in (("1", 1, None), ("8", 8, None), (f"{size}", size, None), ("tree", size, parents)):
        loops[f"forward {name}"] = forward(target, params, state, count, above, turns), turns
    loops["greedy step"] = rounds(target, drafter, greedy, ModelParams(params), state, turns), turns
    loops["greedy accept"] = repeated(accepting, [(draft, logits)], small), small
    loops["greedy bookkeeping"] = repeated(bookkeeping, [(draft, logits)], small), small
    loops["greedy commit"] = commits(target, state, path, small), small
    del keys
    settings = sampling.make_sampling(batch)

    def softmax(_, draft, logits):
        (probs,) = tie(draft.tokens, sampling.to_probs(logits, settings))  # made whole, though little of it is read
        return probs[..., 0]

    accepted = {}
    for name, siblings in RULES.items():
        rule = accept.load(name)
        cases = [laws(tree, batch, siblings, seed, vocab) for seed in range(3)]

        def both(turn, draft, logits, rule=rule):
            now = rng.RowKeys(state.keys, turn, state.length + turn)
            return rule.sampled(now, draft, sampling.to_probs(logits, settings)).tokens

        loops[f"sampled {name}"] = repeated(both, cases, turns), 3 * turns
    loops["softmax"] = repeated(softmax, [(draft, logits)], turns), turns
    return clock(loops, repeats)


if __name__ == "__main__":
    import pprint
    t=time.time()
    r = study(TARGET, topology.parse("4x3x2x1"), 1, 256, 4, 5)
    b, o = r["forward tree"]["seconds"], r["forward 1"]["seconds"]
    for k, v in r.items():
        print(f"{k:24}{v['seconds']*1e3:9.2f} ms {v['seconds']/b:8.3f} {v['seconds']/o:8.3f}   min {min(v['all'])*1e3:9.2f}")
    print(time.time()-t)
