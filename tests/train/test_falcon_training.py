"""Training of Falcon: from text to files that draft; answers are given less and less."""

from __future__ import annotations

import pytest
from train_cases import metrics, small_config

from specjax import drafters
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import recipes


@pytest.mark.slow
def test_falcon_from_text_to_a_chain(target_run, text_file, tmp_path):
    """What was measured at the end is what the files give; the run's length sets the glancing."""
    target = hf.load(target_run[0])
    keys = {"drafter__head_dim": 8, "drafter__inner": 32, "drafter__gamma": 4}
    keys |= {"target": str(target_run[0]), "data__files": text_file, "train__log_every": 1}
    config = small_config("falcon", **keys, data__packing="documents")
    summary = recipes.run(config, tmp_path)
    # At temperature 0 the forecast is exact.
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"]
    records = metrics(tmp_path)
    given = [record["glanced"] for record in records if "glanced" in record]
    # At most 0.4 of the labels at first, and almost none in the last step.
    assert 0.1 < given[0] <= 0.4 and given[-1] < 0.4 / config.train.steps < given[0] / 2
    held_out = [record for record in records if "heldout_loss" in record]
    assert held_out[-1]["heldout_glanced"] == 0
    assert held_out[-1]["heldout_loss"] < held_out[0]["heldout_loss"]
    head = head_files.read(tmp_path, "falcon")
    assert (head.config["block_size"], head.config["vocabulary"]) == (2, target.lm.vocabulary)
    assert drafters.make("falcon", target.lm, model=tmp_path, gamma=2).longest == 2
    config.loss.run_steps = 3
    with pytest.raises(UserError, match="run_steps is not a key of the loss of falcon"):
        recipes.run(config, tmp_path / "none")
