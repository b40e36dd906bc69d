"""Milliseconds of each kind of operation in a target pass, for the jax that runs it.

    PYTHONPATH=. taskset -c 0 python experiments/op_times/run.py --target=DIR --out=FILE

Run it once with each version of jax, on an idle machine, and compare the kinds: an operation that
a version compiles badly stands out. A compiled loop of passes over 1, 2 and 6 tokens (--sizes) is
profiled at batch 1 (``jax.profiler``); the times of its operations are grouped by what the program
text says of them:

- "head": products with the vocabulary; "products": all others, with weights and in attention;
- "products in loops": products that XLA has fused into a loop over the result, which is slow;
- "copies": copies and transposes; "loops": fusions without a product; "reductions", "other".

The time between operations is in no kind. Operations that run at the same time on several cores
count in full, and their sum is then above the time of a pass: ``taskset -c 0`` gives sums that can
be compared. It works for CPUs, whose profile names every operation. Without --target the model has
GPT-2's shape and random weights. Prints a table; writes the same, with the slowest operations, to
--out.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments import loops
from experiments.common import GPT2, checked, options, record, start
from experiments.programs import hlo
from specjax import sampling
from specjax.bench.timing import commit_none
from specjax.files import write_json
from specjax.models import hf, lm
from specjax.types import LM

KINDS = ("head", "products", "products in loops", "copies", "loops", "reductions", "other")
# They last as long as what they contain.
CONTAINERS = ("while", "call", "conditional")
PROMPT = 16  # tokens in the cache
SLOWEST = 10  # operations that are listed by themselves
TIMES = ("ms", "kinds")  # null where the machine was busy


def kind_of(program: hlo.Program, each: hlo.Instruction, vocab: int) -> str:
    """One of ``KINDS``, of an instruction of a compiled program."""
    parts = program.of(each, "calls") if each.opcode == "fusion" else []
    inside = [one for part in parts for one in part.instructions.values()]
    dots = [one for one in (each, *inside) if one.opcode == "dot"]
    if dots and "kind=kLoop" in each.attributes:
        return "products in loops"
    if dots:
        return "head" if any(vocab in one.arrays[0].dims for one in dots) else "products"
    root = parts[0].root.opcode if parts else each.opcode
    if root in ("copy", "transpose"):
        return "copies"
    if root.startswith("reduce"):
        return "reductions"
    return "loops" if parts else "other"


def events(folder: str | Path) -> Counter[str]:
    """Microseconds of every operation of the profile in a folder, by its name in the program."""
    total: Counter[str] = Counter()
    for path in Path(folder).rglob("*.trace.json.gz"):
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            name = event.get("args", {}).get("hlo_op")
            if name and event.get("ph") == "X":
                total[name] += event["dur"]
    return total


def passes(target: LM, params: Any, size: int, slots: int, iterations: int) -> dict[str, Any]:
    """Milliseconds per pass over ``size`` tokens: of all, by kind, and of the slowest operations.

    "ms" is the time of a pass without the profiler.
    """
    cache = target.init_cache(1, slots)
    cache = cache.replace(length=jnp.full((1,), PROMPT, jnp.int32))

    def body(_, carry, params):
        tokens, cache = carry
        out, block = target.apply(params, tokens, cache)
        return sampling.argmax(out.logits), commit_none(target, cache, block)

    carry = jnp.zeros((1, size), jnp.int32), cache
    compiled = loops.program(body, iterations).lower(carry, (params,)).compile()
    program = hlo.read(compiled.as_text() or "")
    carry = jax.block_until_ready(compiled(carry, (params,)))
    began = time.perf_counter()
    carry = jax.block_until_ready(compiled(carry, (params,)))
    seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled(carry, (params,)))
        total = events(folder)
    found = {each.name: each for _, each, _ in hlo.walk(program)}
    kinds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    slowest: list[dict[str, Any]] = []
    for name, micros in total.most_common():
        each = found.get(name)
        if each is None or each.opcode in CONTAINERS:
            continue
        ms = micros / 1e3 / iterations
        kind = kind_of(program, each, target.vocab_size)
        kinds[kind] += ms
        shapes = [f"{one.dtype}{list(one.dims)}" for one in each.arrays]
        slowest.append({"name": name, "kind": kind, "result": " ".join(shapes), "ms": ms})
    own = {"tokens": size, "ms": 1e3 * seconds / iterations, "kinds": kinds}
    return own | {"slowest": slowest[:SLOWEST]}


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--target", default="", help="a directory that hf.load takes; empty: random weights")
    add("--sizes", type=int, nargs="+", default=[1, 2, 6], help="tokens of a pass")
    add("--slots", type=int, default=2048, help="of the cache")
    add("--passes", type=int, default=20, help="in the profiled loop")
    args = parser.parse_args(argv)
    stopwatch = start(args)
    if args.target:
        loaded = hf.load(args.target)
        target, params = loaded.lm, loaded.params
    else:
        target, params = lm.from_config(GPT2), lm.init_params(GPT2, jax.random.key(0))
    rows = [passes(target, params, size, args.slots, args.passes) for size in args.sizes]
    result = {"rows": rows} | record(__file__, argv, stopwatch)
    write_json(args.out, checked(result, stopwatch, TIMES))
    print(f"jax {jax.__version__}, ms per pass")
    print(f"{'':20}" + "".join(f"{row['tokens']:>6} tokens" for row in rows))
    for kind in KINDS:
        print(f"{kind:20}" + "".join(f"{row['kinds'][kind]:13.3f}" for row in rows))
    print(f"{'a pass':20}" + "".join(f"{row['ms']:13.3f}" for row in rows))
    for row in rows:
        print(f"\nslowest, {row['tokens']} tokens:")
        for each in row["slowest"]:
            print(f"{each['ms']:9.3f} {each['kind']:18} {each['name']:36} {each['result'][:60]}")


if __name__ == "__main__":
    main(sys.argv[1:])
