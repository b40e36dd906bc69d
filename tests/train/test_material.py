"""From ``config.data`` to batches: dialogues and generated text."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from ml_collections import ConfigDict
from train_cases import small_config

from specjax.data.text_files import TextSource
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import recipes
from specjax.train.recipes import checks, material


def test_the_source_of_an_older_configuration():
    """Older configurations have no key tfds."""
    older = ConfigDict({"objective": "features"})
    older.data = ConfigDict({"files": "a.txt, b.jsonl", "dir": ""})
    assert material.text_source(checks.complete(older).data) == TextSource(("a.txt", "b.jsonl"))


def test_dialogues(target_run, tmp_path):
    target = hf.load(target_run[0])

    def turns(i):
        return [
            {"from": "human", "value": f"what is f{i}?"},
            {"from": "gpt", "value": f"def f{i}(x): return x + {i % 7}"},
        ]

    lines = [json.dumps({"conversations": turns(i)}) for i in range(200)]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines) + "\n")
    changes = {
        "target": str(target_run[0]),
        "data__dialogues": str(tmp_path / "talk.jsonl"),
        "data__template": "plain",
    }
    config = small_config("medusa", **changes, examine__prompt_tokens=16)
    gathered = material.gather(config, tmp_path, target.tokenizer, target.directory)
    batch = gathered.batches.batch(0)
    learnt = target.tokenizer.decode([int(t) for t in batch.tokens[batch.labelled]])
    assert "def f" in learnt and "what is" not in learnt
    assert len(gathered.prompts) == 4 and all(0 < len(prompt) <= 16 for prompt in gathered.prompts)


def test_generated_text(target_run, text_file, tmp_path):
    target = hf.load(target_run[0])
    recipes.run(_text_config(target_run[0], text_file), tmp_path / "own")
    changes = {"target": str(target_run[0]), "data__generated": str(tmp_path / "own")}
    for labels, share in (("output", 8 / 14), ("all", 13 / 14)):
        config = small_config(
            "medusa", **changes, data__labels=labels, train__length=13, examine__prompts=2
        )
        gathered = material.gather(config, tmp_path, target.tokenizer, target.directory)
        assert gathered.batches.batch(0).labelled.mean() == pytest.approx(share, abs=0.05)
    config = small_config("medusa", **changes, data__temperature=0.3)
    with pytest.raises(UserError, match="no text of temperature 0.3; it has 0.5"):
        material.gather(config, tmp_path, target.tokenizer, None)


def _text_config(target: Path, text_file: str):
    config = importlib.import_module("configs.self_generate").get_config()
    config.target, config.data.files = str(target), text_file
    sizes = {
        "num_prompts": 40,
        "prompt_tokens": 6,
        "new_tokens": 8,
        "batch_size": 8,
        "shard_prompts": 20,
    }
    config.generation.update(sizes | {"temperatures": (0.5,)})
    return config


def test_default_length_of_a_row():
    """Dialogues and generated text are read whole; stored features and pairs have no long rows."""
    for name, changes, length in (
        ("eagle", {}, 128),
        ("eagle", {"generated": "runs/text"}, 512),
        ("distill", {"dialogues": "chat.jsonl"}, 512),
        ("features", {"generated": "runs/text"}, 128),
        ("eagle", {"features": "runs/features"}, 128),
        ("t5_distill", {"generated": "runs/text"}, 128),
    ):
        config = importlib.import_module(f"configs.{name}").get_config()
        config.data.update(changes)
        assert checks.complete(config).train.length == length, (name, changes)
    config.train.length = 64
    assert checks.complete(config).train.length == 64
