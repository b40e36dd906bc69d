"""Training of EAGLE, HASS and EAGLE-3: from text to files that draft, resumed to the same bits."""

from __future__ import annotations

import lzma

import jax
import numpy as np
import pytest
from train_cases import equal, metrics, small_config

from specjax import drafters
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import recipes

SMALL = {"drafter__head_dim": 8, "drafter__inner": 32, "drafter__gamma": 3}


def config_of(name, target, text_file, *args, **changes):
    text = {"target": str(target), "data__files": text_file}
    return small_config(name, *args, **{**text, **SMALL, **changes})


def test_eagle3_from_text_to_a_chain(target_run, text_file, tmp_path):
    """With a draft vocabulary: what was measured at the end is what the files give."""
    target = hf.load(target_run[0])
    changes = {"loss__steps": 3, "drafter__draft_vocab": 100, "data__packing": "documents"}
    config = config_of("eagle3", target_run[0], text_file, **changes)
    summary = recipes.run(config, tmp_path)
    # At temperature 0 the forecast is exact.
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] > 1
    records = [record for record in metrics(tmp_path) if "heldout_loss" in record]
    assert records[-1]["heldout_loss"] < 0.8 * records[0]["heldout_loss"]
    assert summary["heldout_loss_per_token"] < summary["heldout_uniform_per_token"]
    assert 0 < summary["heldout_alpha_1"] <= 1
    head = head_files.read(tmp_path, "eagle3")
    ids = np.asarray(head.config["draft_ids"])
    assert len(ids) == 100 == head.params["head"]["kernel"].shape[1]
    assert set(target.config.eos_token_id) <= set(ids.tolist())
    assert head.config["draft_vocab_text"] and head.config["vocabulary"] == target.lm.vocabulary
    drafter = drafters.make("eagle3", target.lm, model=tmp_path, gamma=3)
    assert drafter.taps == tuple(head.config["taps"])
    config = config_of("eagle3", target_run[0], text_file, init=str(tmp_path), **changes)
    with pytest.raises(UserError, match="has its draft vocabulary; leave draft_vocab out"):
        recipes.run(config, tmp_path / "third")


@pytest.mark.slow
def test_another_run_starts_from_the_files_and_their_draft_vocabulary(
    target_run, text_file, tmp_path
):
    changes = {"loss__steps": 3, "drafter__draft_vocab": 100, "data__packing": "documents"}
    summary = recipes.run(config_of("eagle3", target_run[0], text_file, **changes), tmp_path)
    again = config_of(
        "eagle3",
        target_run[0],
        text_file,
        init=str(tmp_path),
        loss__steps=3,
        data__packing="documents",
        train__steps=1,
        examine__prompts=0,
        optimiser__learning_rate=1e-9,
    )
    del again.drafter.head_dim, again.drafter.inner
    second = recipes.run(again, tmp_path / "more")
    assert second["heldout_loss"] == pytest.approx(summary["heldout_loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["2", "1"])
def test_mtp_from_text_to_a_chain(target_run, text_file, tmp_path, modules):
    """Modules beside a frozen target: what was measured at the end is what the files give."""
    target = hf.load(target_run[0])
    changes = {"data__packing": "documents", "drafter__hidden": "raw"}
    config = config_of("mtp", target_run[0], text_file, modules, **changes)
    summary = recipes.run(config, tmp_path)
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] > 1
    records = [record for record in metrics(tmp_path) if "heldout_loss" in record]
    assert records[-1]["heldout_loss"] < 0.9 * records[0]["heldout_loss"]
    assert summary["heldout_loss_per_token"] < summary["heldout_uniform_per_token"]
    head = head_files.read(tmp_path, "mtp_module")
    assert len(head.params["modules"]) == int(modules) == head.config["num_nextn_predict_layers"]
    assert head.config["num_hidden_layers"] == target.config.num_layers
    drafter = drafters.make("mtp_module", target.lm, model=tmp_path, gamma=3)
    assert drafter.taps == (target.config.num_layers - 1,)
    with pytest.raises(UserError, match="hidden is 'normed', and the given mtp_module has 'raw'"):
        drafters.make("mtp_module", target.lm, model=tmp_path, hidden="normed")
    if modules == "2":
        config.loss.steps = 1
        with pytest.raises(UserError, match="mtp_module has 2 modules; give one step for each"):
            recipes.run(config, tmp_path / "none")
        config.update({"init": str(tmp_path), "loss": {"steps": 2}})
        config.optimiser.learning_rate, config.train.steps = 1e-9, 1
        del config.drafter.head_dim, config.drafter.inner
        second = recipes.run(config, tmp_path / "more")
        assert second["heldout_loss"] == pytest.approx(summary["heldout_loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hass", "eagle"])
def test_a_resumed_run_ends_with_the_same_bits(target_run, text_file, tmp_path, method):
    """Noise included: it is a function of the seed and the step."""
    changes = {"train__checkpoint_every": 2, "examine__prompts": 0, "train__schedule": "constant"}
    del changes["train__schedule"]
    changes["optimiser__schedule"] = "constant"

    def run(steps, workdir):
        config = config_of("eagle", target_run[0], text_file, method, train__steps=steps, **changes)
        config.train.eval_every = 1
        recipes.run(config, workdir)
        return head_files.read(workdir, "eagle").params

    whole = run(4, tmp_path / "whole")
    run(2, tmp_path / "parts")
    assert equal(whole, run(4, tmp_path / "parts"))


def test_held_out_losses_have_no_noise(target_run, text_file, tmp_path):
    """The key has no effect on them, and they are the losses with ``loss.noise`` 0."""
    config = config_of("eagle", target_run[0], text_file, "hass", loss__noise=5.0)
    task = recipes.heads.prepare(config, tmp_path).task
    config.loss.noise = 0.0
    quiet = recipes.heads.prepare(config, tmp_path).task.loss
    batch, losses = task.batches.batch(0), (task.loss, task.held_out_loss, quiet)

    @jax.jit
    def measure(key):
        return [loss(task.params, task.target_params, batch, key)[0] for loss in losses]

    (noisy, held_out, expected), again = measure(jax.random.key(1)), measure(jax.random.key(2))
    assert held_out == again[1] == pytest.approx(float(expected), rel=1e-6)
    assert abs(noisy - held_out) > 1e-3 and abs(noisy - again[0]) > 1e-4


def test_wrong_keys_are_one_line(target_run, text_file, tmp_path):
    def refused(match, name="eagle3", **changes):
        with pytest.raises(UserError, match=match) as caught:
            recipes.run(config_of(name, target_run[0], text_file, **changes), tmp_path / "none")
        assert "\n" not in str(caught.value) and not (tmp_path / "none").exists()

    refused("draft_vocab is 321; it must be at least 1 and at most", drafter__draft_vocab=321)
    refused("eagle3 does not predict the target's features; leave it 0", loss__feature=1.0)
    refused("loss.steps is 0; it must be a whole number >= 1", loss__steps=0)
    refused(
        "is 'heldout_tau_t0', a forecast, and drafts",
        train__best="heldout_tau_t0",
        drafter__gamma=None,
    )
    refused("loss.divergence is 'mse'; it must be one of", loss__divergence="mse")
    refused("a draft of 40 tokens looks beyond config.train.length 32", drafter__gamma=40)
    config = config_of("eagle", target_run[0], text_file)
    with config.unlocked():
        config.loss.slots = "one"
    with pytest.raises(UserError, match="config.loss.slots is not a key of the loss of eagle"):
        recipes.run(config, tmp_path / "none")


RUNS = {
    "start": ("eagle", {"train__steps": 1, "optimiser__learning_rate": 1e-9}),
    "eagle": ("eagle", {}),
    "no shift": ("eagle", {"drafter__shift": 0}),
    "eagle3": ("eagle3", {"loss__steps": 3}),
    "one step": ("eagle3", {"loss__steps": 1}),
}


@pytest.mark.slow
def test_training_raises_tau_and_the_parts_are_needed(data_dir, tmp_path):
    """On stories260K, with 300 short steps.

    Without the shift of the token a draft is worse. Without the training-time test a draft ends
    after its first token: the network has never read its own output.
    """
    plain = tmp_path / "text.txt"
    with lzma.open(data_dir / "text" / "tinystories" / "tinystories.txt.xz") as file:
        plain.write_bytes(file.read(2_000_000))
    settings = {
        "target": str(data_dir / "models" / "stories260K"),
        "data__files": str(plain),
        "drafter__gamma": 4,
        "optimiser__learning_rate": 3e-3,
        "train__steps": 300,
        "train__batch_size": 8,
        "train__length": 128,
        "train__eval_every": 300,
        "examine__prompts": 16,
        "examine__prompt_tokens": 32,
        "examine__new_tokens": 64,
        "examine__temperatures": (0.0,),
    }
    results = {}
    for label, (name, changes) in RUNS.items():
        config = small_config(name)
        values = {key.replace("__", "."): value for key, value in (settings | changes).items()}
        config.update_from_flattened_dict(values)
        results[label] = recipes.run(config, tmp_path / label)
    tau = {label: result["heldout_tau_t0"] for label, result in results.items()}
    assert 1.1 < tau["start"] + 0.2 < tau["no shift"] + 0.1 < tau["eagle"], tau
    second = {label: results[label]["heldout_alpha_t0_depth2"] for label in ("eagle3", "one step")}
    assert second["one step"] + 0.1 < second["eagle3"], second
