"""SpecDec beside Leviathan's method: a Spec-Drafter, and how far lossy texts are from greedy ones.

The paper's Spec-Verification is the rule ``tolerance`` with the two settings in ``LOSSY``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import statistics
from pathlib import Path
from typing import Any

from experiments.trained_drafters.training import CONFIGS, run_config
from specjax import accept, decode, drafters, rng, sampling
from specjax.models import hf
from specjax.prompt import of_text
from specjax.types import Drafter, ModelParams

NAME = "Spec-Drafter"
# Label of a method -> keys of the rule tolerance.
LOSSY = {
    f"{NAME}, top 3, gap 1": {"top": 3, "gap": 1.0},
    f"{NAME}, top 5, gap 3": {"top": 5, "gap": 3.0},
}
# Of the network: as wide as the larger draft model; the encoder is not the target's then.
SIZES = {"width": 96, "inner": 256, "heads": 3, "layers": 2, "encoder_layers": 3}
BLOCK = 7


def train(
    args: argparse.Namespace, keys: dict[str, Any], target: Path, generated: Path, workdir: Path
) -> None:
    """Trains the drafter on what the target wrote; ``keys`` are those of all training runs."""
    sizes = {"width": 16, "inner": 24, "heads": 2} if args.quick else {}
    keys = {
        **keys,
        "target": target,
        "data.pairs": "",
        "data.generated": generated,
        "drafter.block": BLOCK,
        "examine.prompts": 4 if args.quick else 16,
    }
    keys |= {f"drafter.{key}": value for key, value in (SIZES | sizes).items()}
    run_config(CONFIGS / "spec_drafter.py", workdir, keys)


def methods(path: Path) -> dict[str, dict[str, Any]]:
    """Label -> keys of a bench: lossless, and with the paper's two settings."""
    keys = {"name": "spec_drafter", "model": str(path)}
    lossy = {
        label: {**keys, "accept": "tolerance", "accept_keys": own} for label, own in LOSSY.items()
    }
    return {NAME: {**keys, "accept": "chain"}, **lossy}


def differences(
    args: argparse.Namespace, target: Path, path: Path, prompts: Path, gamma: int
) -> list[dict[str, Any]]:
    """How far the greedy texts of each method are from those of plain decoding.

    ``texts``: the share of texts that differ. ``tokens``: the mean share of tokens that are in no
    block of tokens which both texts have in this order (1 - ``difflib`` ratio).
    """
    loaded = hf.load(str(target))
    assert loaded.tokenizer is not None
    sources = [json.loads(line)["source"] for line in prompts.read_text().splitlines()]
    ids = [of_text(loaded.lm, loaded.tokenizer.encode(each).ids, "a source") for each in sources]
    drafter = drafters.make("spec_drafter", loaded.lm, model=str(path), gamma=gamma)
    plain = _texts(args, loaded, drafter, None, ids)
    rules = {NAME: accept.load("chain")}
    rules |= {label: accept.load("tolerance", **keys) for label, keys in LOSSY.items()}
    rows = []
    for label, rule in rules.items():
        pairs = list(zip(plain, _texts(args, loaded, drafter, rule, ids), strict=True))
        shares = [1 - difflib.SequenceMatcher(None, a, b, False).ratio() for a, b in pairs]
        rows.append(
            {
                "method": label,
                "gamma": gamma,
                "texts": statistics.mean(a != b for a, b in pairs),
                "tokens": statistics.mean(shares),
            }
        )
    return rows


def _texts(
    args: argparse.Namespace, loaded: hf.Loaded, drafter: Drafter, rule: Any, ids: list[list[int]]
) -> list[list[int]]:
    """The greedy texts of all prompts; without a rule those of plain decoding."""
    own = drafters.make("none", loaded.lm) if rule is None else drafter
    params = ModelParams(loaded.params, own.init_params(None))
    packed, lengths = decode.pack_prompts(ids)
    state = decode.prefill(
        loaded.lm,
        own,
        params,
        packed,
        lengths,
        rng.row_keys(0, len(ids)),
        max_len=packed.shape[1] + args.new,
        limit=lengths + args.new,
        sampling=sampling.make_sampling(len(ids), 0.0),
    )
    state, _ = decode.generate(
        loaded.lm,
        own,
        rule or accept.load("chain"),
        params,
        state,
        max_steps=args.new,
        eos_id=loaded.config.eos_token_id,
    )
    decode.check(state)
    return [list(map(int, text)) for text in decode.outputs(state, list(map(len, ids)))]
