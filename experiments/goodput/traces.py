"""Acceptance traces: what a draft at every position of recorded outputs would have given.

    PYTHONPATH=. python experiments/goodput/traces.py --recording=FILE --target=DIR \\
        --out=experiments/goodput/lookup.npz
    PYTHONPATH=. python experiments/goodput/traces.py --recording=FILE --target=DIR \\
        --draft=DIR --out=experiments/goodput/draft.npz

``--recording`` is a file written with ``--config.record`` at temperature 0. One round of the
drafter runs from every position of every output: prompt lookup, or the draft model ``--draft``. The
first ``--tokens`` positions are kept; an output must have as many more tokens as the longest draft,
so that every draft is judged in full (shorter outputs are left out). Greedy decoding with a draft
of any length at any position has these outcomes exactly: a draft of k tokens is the first k tokens
of a longer one. The files in this folder were made from

- ``lookup.npz``: SmolLM2-135M-Instruct, 76 turns of 48 questions of Spec-Bench (configs/generate.py
  with chat=own, num_prompts=48, max_prompt_tokens=512, max_new_tokens=134, ignore_eos=True);
- ``draft.npz``: stories260K, 40 beginnings of TinyStories (their first 16 words), and a draft model
  of its first and last layer (configs/distill.py with pruned=0,4, 160 steps of 8 x 96 tokens,
  learning rate .01) distilled on 192 other stories that the target continued at temperature .6.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, drafters, rng, sampling
from specjax.bench import replay
from specjax.bench.replay import RECORDED, fold
from specjax.data import recordings
from specjax.data.recordings import Trace
from specjax.files import replacing
from specjax.models import hf
from specjax.theory.load import AcceptanceTraces
from specjax.types import Drafter, ModelParams


def outcomes(system, params, text: Trace, tokens: int, slots: int) -> np.ndarray:
    """i8[2,tokens]: accepted and drafted tokens of one round from each of the first positions.

    ``system`` is the result of ``fold``; ``slots`` the length of the buffers.
    """
    target, drafter, rule = system
    whole = np.full(slots + drafter.nodes + 1, -1, np.int32)
    ids = [*text.prompt, *text.output]
    whole[: len(ids)] = ids
    lengths = jnp.asarray(len(text.prompt) + np.arange(tokens), jnp.int32)
    record = jnp.broadcast_to(jnp.asarray(whole), (tokens, len(whole)))
    both = ModelParams({}, {"record": record, "drafter": params})
    state = decode.prefill(
        target,
        drafter,
        both,
        jnp.where(jnp.arange(slots) < lengths[:, None], RECORDED, -1),
        lengths,
        rng.row_keys(0, range(tokens)),
        max_len=slots,
        limit=jnp.full((tokens,), len(ids), jnp.int32),
        sampling=sampling.make_sampling(tokens, 0.0),
    )
    _, records = decode.generate(target, drafter, rule, both, state, max_steps=1)
    return np.stack([records.accepted[0], records.drafted[0]]).astype(np.int8)


def trace_all(
    drafter: Drafter, texts: Sequence[Trace], tokens: int
) -> tuple[AcceptanceTraces, int]:
    """The traces of all outputs that are long enough, and the number of those left out."""
    system = fold(drafter, accept.load(accept.default_rule(drafter)))
    params = drafter.init_params(jax.random.key(0))
    long = [text for text in texts if len(text.output) >= tokens + drafter.nodes]
    slots = max(len(text.prompt) + len(text.output) for text in long)
    both = np.stack([outcomes(system, params, text, tokens, slots) for text in long])
    prompts = np.array([len(text.prompt) for text in long])
    lengths = np.full(len(long), tokens)
    return AcceptanceTraces(both[:, 0], both[:, 1], lengths, prompts).checked(), len(texts) - len(
        long
    )


def save(path: Path, traces: AcceptanceTraces, about: dict) -> None:
    """Writes the traces, with a description."""
    with replacing(path) as fresh, fresh.open("wb") as file:
        np.savez_compressed(file, about=json.dumps(about), **traces._asdict())


def read(path: Path) -> tuple[AcceptanceTraces, dict]:
    """What ``save`` wrote."""
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        return AcceptanceTraces(*(file[name] for name in AcceptanceTraces._fields)).checked(), about


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--recording", type=Path, required=True)
    add("--target", required=True, help="its directory")
    add("--draft", default="", help="directory of a draft model; without it: prompt lookup")
    add("--longest", type=int, default=6, help="tokens of the longest draft")
    add("--tokens", type=int, default=128, help="positions of each output")
    add("--out", type=Path, required=True)
    args = parser.parse_args(argv)

    size, tokens = replay.vocabulary_of(args.target)
    recording = recordings.read(args.recording, size)
    lm = replay.recorded(size, tokens and tokens.name, tokens)
    if args.draft:
        draft = hf.load(args.draft)
        keys = {"model": draft.lm, "params": draft.params}
        drafter = drafters.make("draft_model", lm, gamma=args.longest, **keys)
    else:
        drafter = drafters.make("prompt_lookup", lm, gamma=args.longest)
    traces, short = trace_all(drafter, recording.traces, args.tokens)
    tau = 1 + traces.accepted.mean()
    about = {
        "target": Path(args.target).name,
        "drafter": drafter.name,
        "draft": Path(args.draft).name if args.draft else None,
        "recording": args.recording.name,
        "outputs": len(traces.output),
        "too_short": short,
        "tokens": args.tokens,
        "longest": args.longest,
    }
    save(args.out, traces, about)
    print(f"{about}; tokens per draft at a position {tau:.2f}, drafted {traces.drafted.mean():.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
