"""Errors of the recipes: one line, and nothing is written."""

from __future__ import annotations

import pytest
from train_cases import small_config

from specjax.errors import UserError
from specjax.train import recipes


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "pretrain",
            {"objective": "other"},
            "must be one of pretrain, distill, heads, generate, features, datastore, ngram",
        ),
        ("pretrain", {"model__family": "bert"}, "must be one of llama, gpt2"),
        ("pretrain", {"model__num_heads": 3}, "hidden_size 32 is no even multiple of num_heads 3"),
        ("pretrain", {"train__steps": 0}, "train.steps is 0"),
        ("pretrain", {"train__length": 65}, "beyond config.model.max_positions 64"),
        ("pretrain", {"model__vocab_size": 100}, "at least 257"),
        ("pretrain", {"tokenizer": "nowhere"}, "nowhere is no directory"),
        ("pretrain", {"tokenizer": "TARGET", "model__vocab_size": 999}, "999.*has 320 tokens"),
        ("pretrain", {"optimiser__name": "sg"}, "must be one of adamw, muon, sgd, lion"),
        ("pretrain", {"data__files": "SHORT"}, "fewer than one crop"),
        ("distill", {}, "config.target is empty"),
        ("distill", {"target": "nowhere"}, "nowhere is no directory"),
        ("distill", {"target": "TARGET", "model__vocab_size": 999}, "the target has 320 tokens"),
        (
            "distill",
            {"target": "TARGET", "pruned": "0,7"},
            "config.pruned is '0,7'; give ascending layer numbers in 0..0",
        ),
        (
            "distill",
            {"target": "TARGET", "init": "TARGET", "model__hidden_size": 16},
            "is a model of another shape than config.model",
        ),
        (
            "distill",
            {"target": "TARGET", "data__on_policy": 1.5},
            r"on_policy is 1.5; it must be a number in \[0, 1\]",
        ),
        (
            "distill",
            {"target": "TARGET", "data__on_policy": 1.0},
            "on_policy_prompt is 32; it must be at least 1 and below",
        ),
        (
            "distill",
            {"target": "TARGET", "data__on_policy_prompt": 16},
            "on_policy_prompt is 16 and config.data.on_policy is 0.0, so it has no effect",
        ),
        ("distill", {"target": "TARGET", "loss__divergence": "kl"}, "must be one of forward_kl"),
        (
            "distill",
            {"target": "TARGET", "data__template": "chatml"},
            "template belongs to config.data.dialogues",
        ),
        (
            "distill",
            {"target": "TARGET", "data__tfds": "lm1b", "data__dialogues": "x"},
            "names files and tfds and dialogues",
        ),
        (
            "distill",
            {"target": "TARGET", "data__packing": "tight"},
            "must be one of crops, documents",
        ),
        (
            "distill",
            {"target": "TARGET", "data__labels": "all"},
            "labels belongs to dialogues and generated text",
        ),
        ("distill", {"target": "TARGET", "seed": -1}, "config.seed is -1"),
        ("distill", {"target": "TARGET", "examine__temperatures": ()}, "temperatures is empty"),
        (
            "distill",
            {"target": "TARGET", "examine__temperatures": (-1.0,)},
            "temperatures is -1.0; it must be a number >= 0",
        ),
        (
            "distill",
            {"target": "TARGET", "examine__new_tokens": 60},
            "config.examine needs 66 positions",
        ),
        ("distill", {"target": "TARGET", "train__ema": 1.0}, "config.train.ema is 1.0"),
        ("distill", {"target": "TARGET", "train__keep": "all"}, "config.train.keep is 'all'"),
        ("pretrain", {"examine__prompts": 2}, "needs a target to draft for"),
        ("pretrain", {"target": "TARGET", "tokenizer": "TARGET"}, "are both given"),
        (
            "medusa",
            {"target": "TARGET", "drafter__heads": 40},
            "a draft of 40 tokens looks beyond config.train.length 32",
        ),
        (
            "medusa",
            {"target": "TARGET", "drafter__model": "TARGET"},
            "to start training from them give config.init",
        ),
        (
            "distill",
            {"target": "TARGET", "train__precision": "int8"},
            "it must be one of float32, bfloat16",
        ),
        (
            "distill",
            {"target": "TARGET", "train__length": 33, "model__max_positions": 32},
            "beyond config.model.max_pos",
        ),
        (
            "distill",
            {"target": "TARGET", "train__accumulate": 3},
            "train.batch_size is 4; it must be a multiple of .* 3",
        ),
        (
            "medusa",
            {"target": "TARGET", "drafter__name": "prompt_lookup", "drafter__layers": None},
            "nothing to train",
        ),
        (
            "medusa",
            {"target": "TARGET", "loss__slots": "some"},
            "loss.slots is 'some'; it must be one of all, one",
        ),
        ("medusa", {"target": "TARGET", "loss__ce": 0.0}, "loss.ce and loss.teacher are both 0"),
        ("medusa", {"target": "TARGET", "loss__batch": 1}, "config.loss.batch is not a key"),
        ("falcon", {"target": "TARGET", "train__remat": True}, "no layers to recompute"),
        (
            "distill",
            {
                "target": "TARGET",
                "optimiser__schedule": "constant",
                "optimiser__final": 0.5,
            },
            "final .*constant, which has no end",
        ),
        ("hydra", {"target": "TARGET", "init": "TARGET"}, "has no hydra heads"),
        (
            "medusa",
            {"target": "TARGET", "loss__language": "kl"},
            "config.loss.language is not a key of the loss of medusa",
        ),
        (
            "medusa",
            {"target": "TARGET", "joint": True, "loss__beta": 0.5},
            "config.loss.beta is not a key of the loss of medusa",
        ),
        (
            "mlp_speculator",
            {"target": "TARGET", "data__generated": "nowhere", "data__files": ""},
            "nowhere",
        ),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(
    name, changes, message, target_run, text_file, tmp_path
):
    (tmp_path / "short.txt").write_text("a\nb\n")
    places = {"TARGET": str(target_run[0]), "SHORT": str(tmp_path / "short.txt")}
    changes = {"data__files": text_file} | {
        key: places.get(value, value) for key, value in changes.items()
    }
    if name == "pretrain":
        changes = {"model__vocab_size": 300} | changes
    with pytest.raises(UserError, match=message) as error:
        recipes.run(small_config(name, **changes), tmp_path / "work")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "work").exists()
