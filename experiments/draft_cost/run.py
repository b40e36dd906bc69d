"""The cost of the training-free drafters per round, after a text of 2048 tokens.

    PYTHONPATH=. python experiments/draft_cost/run.py            (about 3 minutes on 2 CPU cores)

The target has GPT-2's shape with 32768 tokens (12 layers, 768 wide, float32, random weights, batch
1). The text and the datastore (2^20 tokens) are draws of one Markov chain with a few likely
successors for every token, so that lookups have matches. Every drafter has its default settings;
its cost is ``propose`` and ``update`` together, in a compiled loop whose iterations depend on each
other. ``share`` is of a pass over one token, ``share_of_verify`` of the pass over the drafter's
nodes and the pending token. All data stays on the device.

Medians over loops that run in turns. Writes ``results.json`` beside this file; run it on an idle
machine.
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
from experiments.loops import Loop, clock, repeat
from specjax import drafters, rng, sampling
from specjax.bench.timing import commit_none
from specjax.data import datastore, ngram_tables
from specjax.files import write_json
from specjax.models import lm
from specjax.types import LM, Context, Drafter, ModelParams, Output, Verdict

TARGET = dataclasses.replace(GPT2, vocab_size=32768, max_positions=4096)
TIMES = frozenset({"ms", "share", "share_of_verify", "forward_ms"})
PASSES = 3  # in a loop of target passes
ROOM = 256  # positions after the text


def markov(vocab: int, size: int, seed: int, successors: int = 4) -> np.ndarray:
    """i32[size]: a text in which every token has a few likely successors."""
    random = np.random.default_rng(0)
    table = random.integers(0, vocab, (vocab, successors), dtype=np.int32)
    random = np.random.default_rng(seed)
    ranks = random.choice(
        successors, size, p=np.array([8, 4, 2, 1])[:successors] / sum((8, 4, 2, 1)[:successors])
    )
    # With probability 0.05 the text jumps to a token of a small part of the vocabulary.
    fresh = random.integers(0, vocab // 64, size)
    jump = random.random(size) < 0.05
    text, now = np.zeros(size, np.int32), 0
    for index in range(size):
        now = fresh[index] if jump[index] else table[now, ranks[index]]
        text[index] = now
    return text


def contenders(target: LM, text: np.ndarray) -> dict[str, Drafter]:
    """Every drafter that runs without a model, with its defaults."""
    documents = [part.tolist() for part in np.array_split(text, 64)]
    store = datastore.build(documents)
    tables = ngram_tables.count(documents, target.vocab_size)
    make = functools.partial(drafters.make, target=target)
    return {
        "prompt_lookup": make("prompt_lookup"),
        "llma": make("llma"),
        "ngram_lm": make("ngram_lm", tables=tables),
        "ngram_lm, sample": make("ngram_lm", tables=tables, mode="sample"),
        "jacobi": make("jacobi"),
        "lookahead": make("lookahead"),
        "token_recycling": make("token_recycling"),
        "trie": make("trie"),
        "trie, datastore": make("trie", datastore=store),
        "suffix": make("suffix"),
        "suffix, datastore": make("suffix", datastore=store),
        "sam": make("sam"),
        "rest": make("rest", datastore=store),
    }


def drafting(drafter: Drafter, context: Context, iterations: int) -> Loop:
    """A loop of propose and update with the same text."""
    params = ModelParams({}, drafter.init_params(jax.random.key(0)))
    vocab, n, m = TARGET.vocab_size, drafter.nodes, drafter.longest
    size = context.tokens.shape[1]
    empty = Output(jnp.zeros((1, 0, vocab)), jnp.zeros((1, size - 1, TARGET.hidden_size)))
    state = jax.jit(lambda p, c: drafter.init(p, c, empty, size + n))(params, context)
    logits = jax.random.normal(jax.random.key(1), (1, n + 1, vocab))
    verdict = Verdict(
        jnp.where(jnp.arange(m + 1) == 0, 7, -1)[None],
        jnp.ones((1,), jnp.int32),
        jnp.full((1, m), -1, jnp.int32),
    )
    keys = rng.row_keys(0, 1)

    def body(index, carry, params, context, logits):
        tokens, state = carry
        here = context.replace(tokens=tokens)
        draft, state = drafter.propose(
            params, rng.RowKeys(keys, index, context.length), here, state
        )
        out = Output(logits + draft.tokens[0, 0] * 1e-9, jnp.zeros((1, n + 1, 1)))
        state = drafter.update(params, state, draft, verdict, out)
        probe = draft.tokens.sum()
        if draft.probs is not None:
            probe += draft.probs[0, -1, -1] > 2
        # The text never changes, but the compiler cannot derive this.
        return tokens + jnp.where(probe == -7, 1, 0), state

    @jax.jit
    def loop(carry, params, context, logits):
        return jax.lax.fori_loop(
            0, iterations, lambda i, c: body(i, c, params, context, logits), carry
        )

    return lambda: loop((context.tokens, state), params, context, logits)


def passes(target: LM, params: Any, length: int, size: int, iterations: int) -> Loop:
    """A loop of passes over ``size`` tokens after ``length`` cached ones."""
    cache = target.init_cache(1, length + ROOM)
    cache = cache.replace(length=jnp.full((1,), length, jnp.int32))

    def body(_, carry, params):
        tokens, cache = carry
        out, block = target.apply(params, tokens, cache)
        return sampling.argmax(out.logits), commit_none(target, cache, block)

    return repeat(body, iterations, (jnp.zeros((1, size), jnp.int32), cache), params)


def measure(length: int, iterations: int, samples: int, small: bool = False) -> dict[str, Any]:
    """All times in milliseconds; ``small`` makes the model and the datastore tiny, for a test."""
    config = dataclasses.replace(TARGET, num_layers=1, hidden_size=24) if small else TARGET
    target = lm.from_config(config)
    params = lm.init_params(config, jax.random.key(0))
    chosen = contenders(target, markov(TARGET.vocab_size, 1 << (12 if small else 20), 1))
    tokens = jnp.full((1, length + ROOM), -1, jnp.int32)
    tokens = tokens.at[0, :length].set(jnp.asarray(markov(TARGET.vocab_size, length, 2)))
    context = Context(tokens, jnp.full((1,), length, jnp.int32), sampling.make_sampling(1, 1.0))
    sizes = sorted({1, *(drafter.nodes + 1 for drafter in chosen.values())})
    loops: dict[str, tuple[Loop, int]] = {
        f"forward_{size}": (passes(target, params, length, size, PASSES), PASSES) for size in sizes
    }
    for name, drafter in chosen.items():
        loops[name] = drafting(drafter, context, iterations), iterations
    seconds = clock(loops, samples)
    ms = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    rows = [
        {
            "drafter": name,
            "nodes": drafter.nodes,
            "ms": ms[name],
            "share": ms[name] / ms["forward_1"],
            "share_of_verify": ms[name] / ms[f"forward_{drafter.nodes + 1}"],
        }
        for name, drafter in chosen.items()
    ]
    forwards = {name: value for name, value in ms.items() if name.startswith("forward_")}
    return {"rows": rows, "forward_ms": forwards}


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--length", type=int, default=2048, help="tokens of the text")
    add("--turns", type=int, default=20, help="rounds in a loop")
    add("--samples", type=int, default=7, help="loops of each kind")
    add("--small", action="store_true", help="a tiny model and datastore, for a test")
    args = parser.parse_args(argv)
    stopwatch = start(args)
    result = measure(args.length, args.turns, args.samples, args.small)
    result |= record(__file__, argv, stopwatch)
    write_json(args.out, checked(result, stopwatch, TIMES))
    for row in result["rows"]:
        shares = f"{row['share']:7.1%} {row['share_of_verify']:7.1%}"
        print(f"{row['drafter']:18} {row['ms']:8.3f} ms {shares}")
    print({name: round(ms, 1) for name, ms in result["forward_ms"].items()})


if __name__ == "__main__":
    main(sys.argv[1:])
