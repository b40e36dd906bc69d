"""The methods of experiments/real_model: every training-free drafter, and a distilled model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs import training_free
from specjax.bench import methods as methods_lib
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Method
from specjax.data import datastore, generated_text, ngram_tables
from specjax.models import hf

GAMMA = 4  # draft tokens of the distilled model


def build(
    target: hf.Loaded, generated: str, draft: str, names: Sequence[str], temperatures: Sequence
) -> list[Method]:
    """The methods with these labels, or all.

    Args:
        target: the model.
        generated: a workdir of configs/self_generate.py; datastore and tables are of its text.
        draft: a workdir of configs/distill.py; "" leaves the distilled model out.
        names: labels of ``choices``; none: all of them.
        temperatures: at which they will run.
    """
    chosen = choices(target, generated, draft)
    if unknown := [name for name in names if name not in chosen]:
        raise SystemExit(f"unknown method {unknown[0]!r}; it must be one of {'; '.join(chosen)}")
    return [
        methods_lib.build(
            target.lm,
            target.params,
            MethodChoice({key: value for key, value in keys.items() if key != "accept"}, rule, {}),
            label=label,
            seed=0,
            temperatures=temperatures,
        )
        for label, keys in chosen.items()
        if not names or label in names
        for rule in [keys.get("accept", "chain")]
    ]


def choices(target: hf.Loaded, generated: str, draft: str) -> dict[str, dict[str, Any]]:
    """Label -> keys of the drafter, with the objects that it needs."""
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
    if draft:
        chosen["draft_model"] = {"name": "draft_model", "model": draft, "gamma": GAMMA}
    return chosen
