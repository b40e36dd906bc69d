"""The pairs of models that experiments/peers compares the two sides on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from experiments.common import GPT2
from experiments.peers import pair
from specjax.errors import UserError
from specjax.models import hf

DRAFT = dataclasses.replace(
    GPT2, num_layers=2, hidden_size=256, intermediate_size=1024, num_heads=4, num_kv_heads=4
)
TINY = dataclasses.replace(
    GPT2,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
)
TINY_SIGNALS = (0.15, 0.15)
PROMPTS = 4
OPENINGS = (
    "Once upon a time, there was a little girl named Lily. "
    "She liked to play with her red ball in the park.",
    "Tom had a dog. The dog was big and brown. One day,",
    "The sun was warm and the birds sang. A small cat sat by the door and looked at the birds.",
    'Mom said, "It is time for bed." But Ben was not tired.',
)


class Pair(NamedTuple):
    """Two directories, and what to decode with them."""

    name: str
    target: Path
    draft: Path
    prompts: list[list[int]]
    new: int
    description: str


def constructed(folder: Path, new: int, small: bool) -> Pair:
    """The GPT-2 shapes with the weights of pair.py."""
    if small:
        target, draft, prompts = pair.make(TINY, TINY, PROMPTS, TINY_SIGNALS)
        description = "tiny shapes"
    else:
        target, draft, prompts = pair.make(GPT2, DRAFT, PROMPTS)
        description = (
            "12 layers, 768 wide, 12 heads, and a draft of 2 layers, 256 wide; vocabulary 50257, "
            "constructed weights"
        )
    for name, made in (("target", target), ("draft", draft)):
        hf.save(folder / name, made.config, made.params)
    return Pair("gpt2", folder / "target", folder / "draft", prompts, new, description)


def stories(directory: str, draft: str, folder: Path, new: int) -> Pair:
    """A small trained model, with a given draft model or its first two layers. Raises UserError."""
    target, origin = hf.load(directory), "a draft model that was given"
    if target.tokenizer is None:
        raise UserError(f"{directory} has no tokenizer.json; the prompts of this study need one")
    if not draft:
        from specjax.train import initial  # only here: it imports the training packages

        hf.save(folder / "pruned", *initial.pruned(target, "0,1"), target.tokenizer)
        draft, origin = str(folder / "pruned"), "its own first 2 layers as draft"
    prompts = [target.tokenizer.encode(text).ids for text in OPENINGS]
    shape = f"{target.config.num_layers} layers, {target.config.hidden_size} wide"
    shape = f"{shape}, vocabulary {target.config.vocab_size}"
    description = f"{Path(directory).name} ({shape}), {origin}"
    return Pair("stories", Path(directory), Path(draft), prompts, new, description)
