"""The methods of experiments/real_model: every training-free drafter, and a distilled model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs import training_free
from specjax import control
from specjax.bench import methods as methods_lib
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Method
from specjax.data import datastore, generated_text, ngram_tables
from specjax.models import hf

GAMMA = 4  # draft tokens of the distilled model


def build(
    target: hf.Loaded,
    generated: str,
    draft: str,
    names: Sequence[str],
    temperatures: Sequence,
    profile: Path | None = None,
) -> list[Method]:
    """The methods with these labels, or all.

    Args:
        target: the model.
        generated: a workdir of configs/self_generate.py; datastore and tables are of its text. ""
            leaves the methods that need it out.
        draft: a workdir of configs/distill.py; "" leaves the distilled model out.
        names: labels of ``choices``, or drafters with keys (``spelled``); none: all of ``choices``.
        temperatures: at which they will run.
        profile: the measured costs that controllers without a profile of their own read.
    """
    chosen = choices(target, generated, draft)
    own = {label_of(name): spelled(name) for name in names if "=" in name}
    labels = [label_of(name) for name in names]
    if unknown := [label for label in labels if label not in chosen | own]:
        raise SystemExit(f"unknown method {unknown[0]!r}; it must be one of {'; '.join(chosen)}")
    wanted = {label: (chosen | own)[label] for label in labels or chosen}
    if len(wanted) < len(labels):
        raise SystemExit(f"two of the methods {'; '.join(labels)} have one name")
    return [make(target, label, keys, temperatures, profile) for label, keys in wanted.items()]


def make(
    target: hf.Loaded,
    label: str,
    keys: dict[str, Any],
    temperatures: Sequence,
    profile: Path | None = None,
) -> Method:
    """One method; ``keys`` are those of the drafter, its name, and its rule if it has another."""
    own = {key: value for key, value in keys.items() if key != "accept"}
    if profile is not None and control.wants_profile(own.get("control")):
        own["control"] += f"{',' if ':' in own['control'] else ':'}profile={profile}"
    choice = MethodChoice(own, keys.get("accept", ""), {})
    return methods_lib.build(
        target.lm, target.params, choice, label=label, seed=0, temperatures=temperatures
    )


def label_of(text: str) -> str:
    """The label of a method in words, without the directory of its model."""
    return " ".join(word for word in text.split() if not word.startswith("model="))


def spelled(text: str) -> dict[str, Any]:
    """The keys of a drafter in words: "prompt_lookup gamma=8 control=fixed:4"."""
    name, *words = text.split()
    pairs = [word.split("=", 1) for word in words]
    if any(len(pair) != 2 for pair in pairs):
        raise SystemExit(f"{text!r} is no method; give a drafter and words key=value")
    return {"name": name} | {key: int(v) if v.isdigit() else v for key, v in pairs}


def choices(target: hf.Loaded, generated: str, draft: str) -> dict[str, dict[str, Any]]:
    """Label -> keys of the drafter, with the objects that it needs."""
    chosen = _training_free(target, generated) if generated else {}
    if draft:
        chosen["draft_model"] = {"name": "draft_model", "model": draft, "gamma": GAMMA}
    return chosen


def _training_free(target: hf.Loaded, generated: str) -> dict[str, dict[str, Any]]:
    assert target.tokenizer is not None
    documents = generated_text.load(generated, hf.fingerprint(target.tokenizer), "train")
    texts = [document.ids.tolist() for document in documents]
    tables = ngram_tables.count(texts, target.lm.vocab_size)
    objects = {"tables": tables, "datastore": datastore.build(texts)}
    chosen = {}
    for label, keys in training_free.METHODS.items():
        given = {key: objects.get(key, value) for key, value in keys.items()}
        chosen[label] = {"name": label.split()[0]} | given
    chosen["escalate"]["drafters"] = {
        "first": chosen["prompt_lookup"] | {"min_ngram": 2},
        "second": chosen["ngram_lm"],
    }
    return chosen
