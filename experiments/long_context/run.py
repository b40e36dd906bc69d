"""Drafting with a sparse view of the target's cache, after texts of 1,000 to 16,000 tokens.

    PYTHONPATH=. python experiments/long_context/run.py --parts=cost
    PYTHONPATH=. python experiments/long_context/run.py --target=DIR --texts=FILES --out=FILE

Cells are contexts x batch sizes x views; ``--contexts``, ``--batches`` and ``--views`` choose them.
Cells that are in ``--out`` already (of the same target and settings) are kept and not measured
again, so a long study can be interrupted. Parts:

- ``cost``: milliseconds of a pass over one token (``plain``), of the pass that verifies a draft
  (``verify``), and of drafting (``draft``): the view with ``gamma`` + 1 new tokens, and a draft of
  ``gamma`` tokens. For ``retrieval`` one new choice of chunks in ``refresh`` rounds is in it.
  Drafting should take the same time after every context.
- ``decode``: greedy text after prompts of so many tokens: tokens per round (tau), speed-up against
  plain decoding of the same prompts, measured in turns, and whether the texts are equal.

target.py trains a small target with texts of up to 16,000 tokens.

Without ``--target`` the target is a random Llama of 4 layers with 256 x 2 numbers per token and
layer in its cache, whose cache is filled with random numbers: for ``cost`` only. ``--texts`` are
files whose texts are joined; row r of a batch begins at a place of its own.

``predicted`` is the speed-up from the measured times and tau; ``roofline`` that of
``theory.roofline`` from the measured acceptance rate, with a machine fitted to the plain passes of
all cells. Medians. Writes ``results.json`` beside this file; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import checked, options, record, start, without_folder
from experiments.loops import Loop, clock, repeat
from specjax import accept, decode, drafters, rng, sampling, step
from specjax.cache import KVCache
from specjax.data import text_files
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import families, hf, lm
from specjax.models.transformer_config import TransformerConfig
from specjax.theory import chain, roofline
from specjax.types import LM, DecodeState, Drafter, ModelParams, Verdict

RANDOM = families.shape(
    "llama",
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    max_positions=1 << 17,
)
VIEWS = ("streaming", "snapkv", "retrieval")
# The fit is made of times, and so is what it predicts.
TIMES = frozenset(
    {
        "plain_ms",
        "verify_ms",
        "wide_ms",
        "draft_ms",
        "draft_share",
        "tokens_per_second",
        "plain_tokens_per_second",
        "speedup",
        "predicted",
        "roofline",
        "fit",
        "critical_context",
    }
)
WIDE = 128  # tokens of the pass that shows how fast the machine computes


class Target(NamedTuple):
    """The model and its prompts."""

    name: str
    config: TransformerConfig
    model: LM
    params: ModelParams
    ids: np.ndarray | None  # i32[...] of the texts; None: random numbers in the cache


def load(args: argparse.Namespace) -> Target:
    """The target of the options. Raises UserError for a part that it cannot have."""
    if not args.target:
        if args.parts != ["cost"]:
            raise UserError("a random target has no text to decode; give --target, or --parts=cost")
        model, params = lm.from_config(RANDOM), lm.init_params(RANDOM, jax.random.key(0))
        return Target("random", RANDOM, model, ModelParams(params), None)
    loaded = hf.load(args.target, dtype=jnp.float32)
    if not args.texts:
        raise UserError("there is no text to make prompts of; give --texts")
    texts = "".join("".join(text_files.pieces(Path(path))) for path in args.texts.split(","))
    # No more characters than prompts can need.
    most = 8 * (max(args.contexts) + max(args.batches) * args.apart)
    assert loaded.tokenizer is not None
    ids = np.asarray(loaded.tokenizer.encode(texts[:most]).ids, np.int32)
    name = Path(args.target).name
    return Target(name, loaded.config, loaded.lm, ModelParams(loaded.params), ids)


def begin(target: Target, context: int, batch: int, args: argparse.Namespace) -> DecodeState:
    """A state of plain decoding after ``context`` tokens, with room for drafts."""
    longest = context + args.new + args.gamma
    if target.ids is None:
        random = np.random.default_rng(0)
        rows = random.integers(0, target.config.vocab_size, (batch, 8))
    else:
        if len(target.ids) < context + (batch - 1) * args.apart:
            raise UserError(f"the texts have {len(target.ids)} tokens; give more --texts")
        rows = np.stack([target.ids[r * args.apart :][:context] for r in range(batch)])
    packed, lengths = decode.pack_prompts([row.tolist() for row in rows])
    none = drafters.make("none", target.model)
    how = {"max_len": longest, "limit": jnp.full((batch,), context + args.new, jnp.int32)}
    how["sampling"] = sampling.make_sampling(batch, 0.0)
    keys = rng.row_keys(0, batch)
    state = decode.prefill(
        target.model, none, target.params, packed, lengths, keys, chunk=args.chunk, **how
    )
    if target.ids is not None:
        return state
    return _filled(state, context)


def _filled(state: DecodeState, context: int) -> DecodeState:
    """The state after ``context`` random tokens, with random numbers in its cache."""
    cache, batch = state.cache, len(state.length)
    keys = jax.random.split(jax.random.key(1), 2 * len(cache.k))

    def noise(index: int, like: jax.Array) -> jax.Array:
        return jax.random.normal(keys[index], like.shape, like.dtype)

    length = jnp.full((batch,), context, jnp.int32)
    layers = range(len(cache.k))
    cache = cache.replace(
        k=tuple(noise(i, cache.k[i]) for i in layers),
        v=tuple(noise(len(cache.k) + i, cache.v[i]) for i in layers),
        length=length - 1,
    )
    tokens = jax.random.randint(jax.random.key(2), state.tokens.shape, 0, RANDOM.vocab_size)
    return state.replace(cache=cache, tokens=tokens, length=length)


def made(target: Target, view: str, args: argparse.Namespace) -> Drafter:
    """MagicDec with this view."""
    keys: dict[str, Any] = {"view": view, "budget": args.budget, "gamma": args.gamma}
    if view == "retrieval":
        keys["refresh"] = args.refresh
    return drafters.make("magicdec", target.model, **keys)


def drafted(target: Target, drafter: Drafter, state: DecodeState) -> DecodeState:
    """The state of plain decoding as one of this drafter."""
    slots = state.tokens.shape[1] - 1
    nothing = target.model.no_output(len(state.length))

    @jax.jit
    def init(params, state):
        return drafter.init(params, step.context_of(state), nothing, slots)

    return state.replace(draft=init(target.params, state), made_for=drafter.tag)


def passing(target: Target, state: DecodeState, size: int, iterations: int) -> Loop:
    """A loop of target passes over ``size`` tokens after the text.

    They are not committed: a loop that writes to a cache which it does not own copies it first.
    """

    def body(_, tokens, params, cache):
        out, _ = target.model.apply(params, tokens, cache)
        return sampling.argmax(out.logits)

    tokens = jnp.zeros((len(state.length), size), jnp.int32)
    return repeat(body, iterations, tokens, target.params.target, state.cache)


def drafting(target: Target, drafter: Drafter, state: DecodeState, iterations: int) -> Loop:
    """A loop of propose and update; in every round gamma + 1 tokens are new to the view."""
    batch, m = len(state.length), drafter.longest
    one = jnp.ones((batch,), jnp.int32)
    tokens = jnp.where(jnp.arange(m + 1) == 0, 7, -1)
    verdict = Verdict(jnp.tile(tokens, (batch, 1)), one, jnp.full((batch, m), -1, jnp.int32))
    nothing = target.model.no_output(batch)
    fixed = state.replace(draft=())

    def rewound(part: Any) -> Any:
        if not isinstance(part, KVCache):
            return part
        return part.replace(length=jnp.maximum(part.length - m - 1, 0))

    def body(index, carry, params, fixed):
        tokens, kept = carry
        kept = jax.tree.map(rewound, kept, is_leaf=lambda x: isinstance(x, KVCache))
        context = step.context_of(fixed).replace(tokens=tokens)
        keys = rng.RowKeys(fixed.keys, index, fixed.length, nodes=drafter.nodes)
        draft, kept = drafter.propose(params, keys, context, kept)
        kept = drafter.update(params, kept, draft, verdict, nothing)
        # The text never changes, but the compiler cannot derive this.
        return tokens + jnp.where(draft.tokens.sum() == -7, 1, 0), kept

    return repeat(body, iterations, (state.tokens, state.draft), target.params, fixed)


def costs(
    target: Target, state: DecodeState, views: list[str], args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of the passes and of drafting with each view."""
    turns = args.refresh
    loops: dict[str, tuple[Loop, int]] = {
        "plain_ms": (passing(target, state, 1, 4), 4),
        "verify_ms": (passing(target, state, args.gamma + 1, 4), 4),
        "wide_ms": (passing(target, state, WIDE, 1), 1),
    }
    for view in views:
        drafter = made(target, view, args)
        loops[view] = drafting(target, drafter, drafted(target, drafter, state), turns), turns
    seconds = clock(loops, args.repeats)
    return {name: 1e3 * statistics.median(each) for name, each in seconds.items()}


def decoding(
    target: Target, state: DecodeState, views: list[str], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """For each view: tau, acceptance rate, tokens per second, speed-up, equal texts."""
    batch, length = len(state.length), np.asarray(state.length).tolist()
    rule, new = accept.load("chain"), args.new

    def plain(own: DecodeState) -> tuple[Any, Any]:
        return decode.autoregressive(target.model, target.params, own, max_steps=new), None

    def speculative(drafter: Drafter, own: DecodeState) -> tuple[Any, Any]:
        return decode.generate(target.model, drafter, rule, target.params, own, max_steps=new)

    runs: dict[str, Any] = {"plain": plain}
    begins = {"plain": state}
    for view in views:
        drafter = made(target, view, args)
        runs[view] = functools.partial(speculative, drafter)
        begins[view] = drafted(target, drafter, state)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, Any] = {}
    records: dict[str, Any] = {}
    for turn in range(args.repeats + 1):
        for name, run in runs.items():
            # A loop reuses the buffers of its state.
            own = jax.block_until_ready(jax.tree.map(jnp.copy, begins[name]))
            began = time.perf_counter()
            after, counts = jax.block_until_ready(run(own))
            if turn:  # the first one compiles
                seconds[name].append(time.perf_counter() - began)
            texts[name] = decode.outputs(after, length)
            records[name] = None if counts is None else jax.device_get(counts)
            del after
    plain_time = statistics.median(seconds["plain"])
    result = {}
    for view in views:
        counts, spent = records[view], statistics.median(seconds[view])
        emitted = int(counts.emitted.sum())
        pairs = zip(texts[view], texts["plain"], strict=True)
        result[view] = {
            "tau": emitted / int((counts.emitted > 0).sum()),
            "alpha": int(counts.accepted.sum()) / int(counts.tested.sum()),
            "tokens_per_second": emitted / spent,
            "plain_tokens_per_second": batch * new / plain_time,
            "speedup": plain_time / spent,
            "equal_texts": sum(a == b for a, b in pairs),
        }
    return result


def cell(target: Target, context: int, batch: int, views: list[str], args: Any) -> list[dict]:
    """The rows of one context and batch size."""
    state = begin(target, context, batch, args)
    ms = costs(target, state, views, args) if "cost" in args.parts else {}
    texts = decoding(target, state, views, args) if "decode" in args.parts else {}
    passes = {name: ms[name] for name in ("plain_ms", "verify_ms", "wide_ms") if ms}
    rows = []
    for view in views:
        row = {"context": context, "batch": batch, "view": view} | passes
        if ms:
            row |= {"draft_ms": ms[view], "draft_share": ms[view] / ms["plain_ms"]}
        rows.append(row | texts.get(view, {}))
    return rows


def fitted(target: Target, rows: list[dict]) -> dict[str, float] | None:
    """A machine of the roofline model, from the plain passes and the widest ones of all cells.

    Seconds of a pass are fitted as bytes / bandwidth + overhead, by least squares.
    """
    timed = [row for row in rows if "plain_ms" in row]
    if len({(row["context"], row["batch"]) for row in timed}) < 2:
        return None
    model = roofline.model_of(target.config, 4)
    size = [model.weight_bytes + r["batch"] * r["context"] * model.kv_bytes for r in timed]
    spent = [1e-3 * row["plain_ms"] for row in timed]
    slope, overhead = np.polyfit(size, spent, 1)
    if slope <= 0:  # noise: these passes are too short to show what reading costs
        return None
    work = [r["batch"] * WIDE * (model.flops + r["context"] * model.attention_flops) for r in timed]
    flops = [each / (1e-3 * row["wide_ms"]) for each, row in zip(work, timed, strict=True)]
    machine = {"bandwidth": 1 / slope, "flops": max(flops), "overhead": max(overhead, 0.0)}
    return {name: float(value) for name, value in machine.items()}


def predict(target: Target, result: dict, args: argparse.Namespace) -> None:
    """Adds the predictions to the rows."""
    model, fit = roofline.model_of(target.config, 4), None
    if result["fit"]:
        fit = roofline.Machine(**result["fit"])
        critical = roofline.critical_context(fit, model, args.gamma + 1)
        result["critical_context"] = critical if np.isfinite(critical) else None
    for row in result["rows"]:
        if "tau" not in row or "draft_ms" not in row:
            continue
        times = row["draft_ms"], row["verify_ms"], row["plain_ms"]
        row["predicted"] = chain.speedup(row["tau"], *times)
        if fit is not None:
            where = {"batch": row["batch"], "context": row["context"], "gamma": args.gamma}
            row["roofline"] = roofline.multiplier(
                fit, model, model, alpha=row["alpha"], budget=args.budget, **where
            )


def trained(target: str) -> dict | None:
    """How target.py trained this target, and its loss; None if it did not."""
    path = Path(target).parent / "loss.json"
    return json.loads(path.read_text()) if target and path.exists() else None


def main(argv: list[str]) -> None:
    """Entry point."""
    args = _options().parse_args(argv)
    stopwatch, target = start(args), load(args)
    settings = {name: getattr(args, name) for name in ("budget", "gamma", "refresh", "new")}
    settings |= {"target": target.name, "parts": args.parts}
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    # Rows whose times are null are measured again.
    rows = known["rows"] if known.get("settings") == settings and "times" not in known else []
    for context in args.contexts:
        for batch in args.batches:
            have = {r["view"] for r in rows if (r["context"], r["batch"]) == (context, batch)}
            missing = [view for view in args.views if view not in have]
            if not missing:
                continue
            rows += cell(target, context, batch, missing, args)
            result = {"settings": settings, "rows": rows, "fit": fitted(target, rows)}
            predict(target, result, args)
            if trained(args.target):
                result["trained"] = trained(args.target)
            shown = [without_folder(argument) for argument in argv]
            result |= record(__file__, shown, stopwatch)
            write_json(args.out, checked(result, stopwatch, TIMES))
            for row in rows[-len(missing) :]:
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
            jax.clear_caches()


def _options() -> argparse.ArgumentParser:
    parser = options(__file__, __doc__)
    add = parser.add_argument
    listed = lambda kind: lambda text: [kind(each) for each in text.split(",")]  # noqa: E731
    add("--target", default="", help="a Hugging Face directory; empty: a random model")
    add("--texts", default="", help="text files, separated by commas")
    add("--parts", type=listed(str), default=["cost", "decode"], help="cost, decode")
    add("--contexts", type=listed(int), default=[1024, 4096, 8192, 16384], help="tokens")
    add("--batches", type=listed(int), default=[1, 8], help="rows")
    add("--views", type=listed(str), default=list(VIEWS), help="of streaming, snapkv, retrieval")
    add("--budget", type=int, default=512, help="tokens of a view")
    add("--gamma", type=int, default=4, help="draft tokens per round")
    add("--refresh", type=int, default=16, help="rounds between choices of chunks")
    add("--new", type=int, default=64, help="tokens to decode after each prompt")
    add("--apart", type=int, default=2000, help="tokens between the beginnings of prompts")
    add("--chunk", type=int, default=256, help="tokens of a prompt that are fed in one pass")
    add("--repeats", type=int, default=3, help="samples of each time")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
