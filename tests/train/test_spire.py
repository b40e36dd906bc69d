"""Training of SPIRe's draft model: from layers of the target to a directory that drafts."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from train_cases import equal, metrics, small_config

from specjax import drafters
from specjax.drafters.draft_models import spire_model as spire
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import recipes

SMALL = {"drafter__sinks": 2, "drafter__window": 8, "examine__gamma": 3, "pruned": "0"}


def config_of(target, text_file, **changes):
    text = {"target": str(target), "data__files": text_file}
    return small_config("spire", **{**text, **SMALL, **changes})


def test_from_layers_of_the_target_to_a_directory(target_run, text_file, tmp_path):
    target = hf.load(target_run[0])
    short = {"examine__prompts": 0, "train__steps": 20}
    summary = recipes.run(config_of(target_run[0], text_file, **short), tmp_path)
    assert summary["heldout_loss"] < 0.5 * metrics(tmp_path)[0]["loss"]
    loaded = spire.load(tmp_path)
    assert loaded.lm.vocabulary == target.lm.vocabulary
    assert (loaded.config.sinks, loaded.config.window, loaded.config.feedback) == (2, 8, True)
    # The mixture is trained too.
    assert float(np.abs(loaded.params[spire.MEMORY]["weights"]).max()) > 0
    assert drafters.make("spire", target.lm, model=tmp_path, gamma=3).nodes == 3


@pytest.mark.slow
def test_the_forecast_is_what_is_decoded(target_run, text_file, tmp_path):
    """At temperature 0: a text in one pass is that of drafts over the ring."""
    short = {"examine__temperatures": (0.0,), "examine__prompts": 2, "train__steps": 20}
    summary = recipes.run(config_of(target_run[0], text_file, **short), tmp_path)
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] > 1


@pytest.mark.slow
def test_a_second_run_starts_from_the_directory(target_run, text_file, tmp_path):
    changes = {"train__steps": 2, "examine__prompts": 0}
    first = recipes.run(config_of(target_run[0], text_file, **changes), tmp_path)
    changes |= {"init": str(tmp_path), "pruned": "", "optimiser__learning_rate": 1e-9}
    second = recipes.run(config_of(target_run[0], text_file, **changes), tmp_path / "more")
    assert second["heldout_loss"] == pytest.approx(first["heldout_loss"], abs=1e-4)
    config = config_of(target_run[0], text_file, drafter__window=9, **changes)
    with pytest.raises(
        UserError, match=r"config.drafter.window is 9, and .* with 8; give this value"
    ):
        recipes.run(config, tmp_path / "third")


@pytest.mark.slow
@pytest.mark.parametrize("feedback", [True, False])
def test_a_resumed_run_ends_with_the_same_bits(target_run, text_file, tmp_path, feedback):
    changes = {
        "train__checkpoint_every": 2,
        "examine__prompts": 0,
        "optimiser__schedule": "constant",
        "drafter__feedback": feedback,
        "loss__divergence": "total_variation",
        "data__packing": "documents",
    }

    def run(steps, workdir):
        config = config_of(target_run[0], text_file, train__steps=steps, **changes)
        config.train.eval_every = 1
        recipes.run(config, workdir)
        return spire.load(workdir).params

    whole = run(4, tmp_path / "whole")
    run(2, tmp_path / "parts")
    assert equal(whole, run(4, tmp_path / "parts"))


@pytest.mark.slow
def test_without_feedback_and_without_sparsity_it_is_distillation(target_run, text_file, tmp_path):
    """The same losses, step by step, as those of configs/distill.py with the same layers."""
    same = {"train__steps": 3, "train__log_every": 1, "examine__prompts": 0}
    wide = {"drafter__feedback": False, "drafter__window": 99, **same}
    recipes.run(config_of(target_run[0], text_file, **wide), tmp_path / "spire")
    text = {"target": str(target_run[0]), "data__files": text_file, "pruned": "0"}
    recipes.run(small_config("distill", **text, **same), tmp_path / "distill")
    losses = [[r["loss"] for r in metrics(tmp_path / name)] for name in ("spire", "distill")]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    params = spire.load(tmp_path / "spire").params, hf.load(tmp_path / "distill").params
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-4), *params))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter__window": 0}, "config.drafter.window is 0; it must be a whole number >= 1"),
        ({"drafter__sinks": -1}, "config.drafter.sinks is -1; it must be a whole number >= 0"),
        ({"drafter__feedback": False, "drafter__own": False}, "own belongs to feedback memory"),
        ({"pruned": "0,7"}, "config.pruned is '0,7'; give ascending layer numbers in 0..0"),
        ({"pruned": "", "init": "TARGET"}, "is no SPIRe draft model; give one that"),
        ({"init": "TARGET"}, "config.init and config.pruned are both given"),
        ({"examine__gamma": 8}, "smallest sliding window of spire has 8 positions"),
        ({"objective": "pretrain"}, "config.(pruned|spire) is not a key of objective pretrain"),
    ],
)
def test_wrong_keys_are_one_line(target_run, text_file, tmp_path, changes, message):
    changes = {k: str(target_run[0]) if v == "TARGET" else v for k, v in changes.items()}
    with pytest.raises(UserError, match=message) as caught:
        recipes.run(config_of(target_run[0], text_file, **changes), tmp_path / "none")
    assert "\n" not in str(caught.value) and not (tmp_path / "none").exists()
