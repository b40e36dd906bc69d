"""Draft models with another vocabulary than the target's: tokens per round of TLI, SLEM and SLRS.

    PYTHONPATH=. python experiments/vocabularies/run.py --stories=DIR --dreams=DIR \\
        --quickstart=RUN --chat=DIR --stories-draft=RUN --chat-draft=RUN

Models: stories260K and aidreams260K (512 tokens each), the target and the draft model of the
quickstart (2048 tokens of byte-level BPE; RUN is its workdir), and SmolLM2-135M-Instruct (49,152).
The last two are draft models with the target's own vocabulary, for comparison (configs/distill.py).
A pair whose directories are not given is left out. No timings are taken, so other work may run.

For each pair: how many tokens both vocabularies have, which share of a text's tokens these are, how
many draft tokens a target token of the text becomes, and how often the longest-match cut of SLEM
gives another token than the target's tokenizer. Then tau and the acceptance rate at temperature 0
and 1, over all prompts and rounds. Writes ``results.json`` beside this file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.common import Stopwatch, options, record, without_folder
from specjax import accept, decode, drafters, rng, sampling
from specjax.drafters.draft_models._vocabularies import maps as vocabulary_maps
from specjax.drafters.draft_models._vocabularies.string_match import BYTES
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import hf
from specjax.models.hf import Loaded
from specjax.types import ModelParams

GAMMA, TREE = 4, "3x2x1x1"
STORIES = (
    "Once upon a time, there was a little girl named Lily. She loved to play",
    "One day, Tom and his dog went to the park. They saw a big",
    "The sun was warm and the birds were singing. A small rabbit came out of",
    "Mom said that it was time for bed, but Ben was not tired. He wanted",
)
CODE = (
    "def read(self, size=-1):\n    if self.closed:\n        raise ValueError(",
    "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self, name):\n        self",
    "    for key, value in items.items():\n        if value is None:\n            continue\n",
    "    def test_empty(self):\n        self.assertEqual(",
)
CHAT = (
    "The capital of France is Paris. The city is known for",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "Once upon a time, there was a little girl named Lily. She loved to play",
)


class Pair(NamedTuple):
    """Two models, and what is measured with them."""

    target: str
    draft: str
    methods: tuple[str, ...]
    prompts: tuple[str, ...]
    new: int  # tokens of each row


PAIRS = (
    Pair("stories260K", "aidreams260K", ("tli", "tli tree", "slem"), STORIES, 72),
    Pair("aidreams260K", "stories260K", ("tli", "tli tree", "slem"), STORIES, 60),
    Pair("stories260K", "stories260K draft", ("same", "same tree"), STORIES, 72),
    Pair("quickstart", "quickstart draft", ("same", "same tree"), CODE, 64),
    Pair("quickstart", "stories260K", ("tli", "slem"), CODE, 64),
    Pair("SmolLM2", "SmolLM2 draft", ("same", "same tree"), CHAT, 32),
    Pair("SmolLM2", "quickstart draft", ("tli", "slem"), CHAT, 32),
    Pair("SmolLM2", "stories260K", ("tli", "slem"), CHAT, 32),
    # One pass of the draft model reads 1475 tokens.
    Pair("stories260K", "aidreams260K", ("slrs",), STORIES, 24),
)


def prompts(model: Loaded, texts: Sequence[str]) -> list[list[int]]:
    """The ids of the texts, with the token that begins a text where the model has one."""
    begin = model.config.bos_token_id
    first = [] if begin is None else [begin]
    assert model.tokenizer is not None
    return [first + model.tokenizer.encode(t, add_special_tokens=False).ids for t in texts]


def facts(pair: Pair, target: Loaded, draft: Loaded) -> dict[str, Any]:
    """How the two vocabularies write the prompts."""
    ours, theirs = target.lm.token_bytes, draft.lm.token_bytes
    sizes = target.lm.vocab_size, draft.lm.vocab_size
    maps = vocabulary_maps.between(ours, theirs, *sizes)
    own = [ids[target.config.bos_token_id is not None :] for ids in prompts(target, pair.prompts)]
    every = np.array([token for ids in own for token in ids])
    equal = 0
    for ids in own:
        data, at = b"".join(ours.tokens[i] or b"" for i in ids), 0
        for token in ids:
            ends = range(min(len(data), at + BYTES), at, -1)
            longest = next((ours.ids[data[at:end]] for end in ends if data[at:end] in ours.ids), -1)
            equal += longest == token
            at += len(ours.tokens[token] or b"")
    return {
        "target": pair.target,
        "draft": pair.draft,
        "sizes": sizes,
        "shared": maps.shared,
        "shared_of_text": float((maps.draft_of[every] >= 0).mean()),
        "pieces_of_text": float(maps.sizes[every].mean()),
        "other_cut": 1 - equal / len(every),
    }


def keys(method: str) -> dict[str, Any]:
    """The keys of ``draft_model``."""
    name, _, tree = method.partition(" ")
    shape = {"tree": TREE, "siblings": "without_replacement"} if tree else {"gamma": GAMMA}
    return {"vocabulary": name, **shape}


def measure(
    pair: Pair, method: str, target: Loaded, draft: Loaded, temperature: float
) -> dict[str, Any]:
    """tau and the acceptance rate over all prompts, in one batch."""
    drafter = drafters.make(
        "draft_model", target.lm, model=draft.lm, params=draft.params, **keys(method)
    )
    tokens, lengths = decode.pack_prompts(prompts(target, pair.prompts))
    rows, params = len(lengths), ModelParams(target.params, draft.params)
    state = decode.prefill(
        target.lm,
        drafter,
        params,
        tokens,
        lengths,
        rng.row_keys(0, rows),
        max_len=tokens.shape[1] + pair.new,
        limit=lengths + pair.new,
        sampling=sampling.make_sampling(rows, temperature),
    )
    rule = accept.load(accept.default_rule(drafter))
    state, counts = decode.generate(target.lm, drafter, rule, params, state, max_steps=pair.new)
    decode.check(state)
    emitted, accepted, tested = (
        int(x.sum()) for x in (counts.emitted, counts.accepted, counts.tested)
    )
    return {
        "target": pair.target,
        "draft": pair.draft,
        "method": method,
        "rule": rule.name,
        "temperature": temperature,
        "tau": emitted / int((counts.emitted > 0).sum()),
        "alpha": accepted / tested if tested else 0.0,
        "tokens": emitted,
    }


def main(argv: Sequence[str]) -> None:
    """Measures the pairs whose models are given."""
    parser = options(__file__, __doc__)
    for name in ("stories", "dreams", "quickstart", "chat", "stories-draft", "chat-draft"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--new", type=int, default=0, help="tokens of each row; 0: as above")
    args, stopwatch = parser.parse_args(argv), Stopwatch()
    run = args.quickstart
    places = {
        "stories260K": args.stories,
        "aidreams260K": args.dreams,
        "quickstart": run and f"{run}/target",
        "quickstart draft": run and f"{run}/draft",
        "SmolLM2": args.chat,
        "stories260K draft": args.stories_draft,
        "SmolLM2 draft": args.chat_draft,
    }
    chosen = [pair for pair in PAIRS if places[pair.target] and places[pair.draft]]
    if not chosen:
        raise UserError("no pair of models is given; give --stories and --dreams, see --help")
    tables, rows = [], []
    for pair in chosen:
        target, draft = (hf.load(places[name]) for name in (pair.target, pair.draft))
        pair = pair._replace(new=args.new or pair.new)
        if pair[:2] not in [(each["target"], each["draft"]) for each in tables]:
            tables.append(facts(pair, target, draft))
        for method in pair.methods:
            for temperature in (0.0, 1.0):
                rows.append(measure(pair, method, target, draft, temperature))
                print(rows[-1], flush=True)
        jax.clear_caches()
        flags = [without_folder(flag) for flag in argv if not flag.startswith("--out")]
        result = record(__file__, flags, stopwatch)
        write_json(args.out, result | {"gamma": GAMMA, "tree": TREE, "pairs": tables, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
