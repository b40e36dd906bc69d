"""Recipes: from a configuration to a model directory or heads that decode."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from hf_cases import same_vocabulary
from train_cases import TEXT, metrics, small_config

from specjax import drafters
from specjax.data import text_files, token_streams
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import evaluate, examine, objectives, recipes


def test_pretraining_from_text_to_a_model_directory(target_run, text_file):
    workdir, summary = target_run
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert json.loads((workdir / "config.json").read_text())["data"]["files"] == text_file
    records = metrics(workdir)
    assert [record["step"] for record in records] == [10, 20, 30]
    assert records[0]["lr"] > records[-1]["lr"] > 0
    assert records[-1]["heldout_loss"] == summary["heldout_loss"] < np.log(320) - 1
    loaded = hf.load(workdir)
    config = loaded.config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (320, 0, (0,))
    assert summary["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    assert summary["steps"] == 30 and summary["seconds"] > 0
    # The exported directory gives the loss that was reported.
    texts = [text for _, text in text_files.load_files(text_file, "valid")]
    valid = token_streams.tokenise(loaded.tokenizer, texts)
    loss = evaluate.evaluator(objectives.pretrain_loss(loaded.lm))
    again = loss(loaded.params, {}, token_streams.held_out_batches(valid, 4, 32, 2))["loss"]
    assert again == pytest.approx(summary["heldout_loss"], abs=1e-4)
    bits = again / np.log(2) * len(valid) / len(texts[0].encode())
    assert summary["heldout_bits_per_byte"] == pytest.approx(bits, abs=1e-4)


def test_a_finished_run_is_not_changed(target_run, text_file):
    workdir, summary = target_run
    written = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    config = small_config(
        "pretrain", data__files=text_file, model__vocab_size=320, train__log_every=7
    )
    assert recipes.run(config, workdir) == summary
    config.optimiser.learning_rate = 0.5
    with pytest.raises(UserError, match=r"optimiser\.learning_rate was 0\.01, is 0\.5"):
        recipes.run(config, workdir)
    assert written == {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}


def test_distilling_lowers_the_divergence(target_run, text_file, tmp_path):
    target = target_run[0]
    config = small_config(
        "distill", target=str(target), data__files=text_file, model__hidden_size=16
    )
    summary = recipes.run(config, tmp_path)
    records = [record for record in metrics(tmp_path) if "heldout_loss" in record]
    assert records[-1]["heldout_loss"] < 0.7 * records[0]["heldout_loss"]
    assert records[-1]["heldout_alpha"] > records[0]["heldout_alpha"]
    # At temperature 0 the forecast is exact.
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] >= 1
    assert {
        "heldout_alpha_t1_depth1",
        "heldout_decoded_tau_t1",
        "steps",
        "parameters",
        "seconds",
    } < set(summary)
    assert same_vocabulary(hf.load(target), hf.load(tmp_path)) is None


def test_every_option_of_the_loop_at_once(target_run, text_file, tmp_path):
    """bfloat16, averaged parameters, parts of a batch, remat, the best step, on-policy text."""
    target = target_run[0]
    train = {
        "precision": "bfloat16",
        "accumulate": 2,
        "ema": 0.9,
        "remat": True,
        "keep": "best",
        "best": "heldout_tau_t0",
    }
    changes = {f"train__{key}": value for key, value in train.items()} | {
        "data__on_policy": 0.5,
        "data__on_policy_prompt": 8,
    }
    config = small_config(
        "distill", target=str(target), data__files=text_file, pruned="0", train__steps=12, **changes
    )
    summary = recipes.run(config, tmp_path)
    draft, whole = hf.load(tmp_path), hf.load(target)
    assert draft.config == whole.config  # it keeps the only layer
    assert draft.params["embed"]["embedding"].dtype == np.float32
    # It started as the target itself.
    assert summary["heldout_tau_t0"] > 2 and summary["best_step"] in (10, 12)
    best = next(record for record in metrics(tmp_path) if record["step"] == summary["best_step"])
    assert summary["heldout_loss"] == best["heldout_loss"]  # of the parameters that were saved


def test_heads_from_text_to_a_tree(target_run, text_file, tmp_path):
    target = hf.load(target_run[0])
    changes = {
        "target": str(target_run[0]),
        "data__files": text_file,
        "drafter__heads": 3,
        "data__packing": "documents",
    }
    summary = recipes.run(small_config("medusa", **changes), tmp_path / "medusa")
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] > 1
    records = [record for record in metrics(tmp_path / "medusa") if "heldout_loss" in record]
    assert records[-1]["heldout_loss"] < 0.8 * records[0]["heldout_loss"]
    head = head_files.read(tmp_path / "medusa", "medusa")
    table = np.array(head.config["accuracy"])
    assert table.shape == (3, 10) and (table.sum(1) <= 1 + 1e-6).all() and table[0, 0] > 0.1
    assert head.config["medusa_num_heads"] == 3
    assert head.config["vocabulary"] == target.lm.vocabulary
    drafter = drafters.make("medusa", target.lm, model=tmp_path / "medusa", nodes=5)
    assert drafter.nodes == 5 and drafter.depth <= 3
    # The files give the values that the run measured at its end.
    chain = drafters.make("medusa", target.lm, model=tmp_path / "medusa")
    prompts = [
        target.tokenizer.encode(text, add_special_tokens=False).ids[:6]
        for text in ("def f3(x):\n    return", TEXT)
    ]
    settings = {"new_tokens": 12, "temperatures": (0.0,), "eos_id": target.config.eos_token_id}
    seen = examine.examiner(target.lm, chain, target.params, prompts, **settings)(
        chain.init_params(jax.random.key(0))
    )
    assert seen["tau_t0"] == seen["decoded_tau_t0"] > 1
    # Another run may start from them.
    again = small_config(
        "medusa",
        **changes,
        init=str(tmp_path / "medusa"),
        examine__prompts=0,
        train__steps=1,
        optimiser__learning_rate=1e-9,
    )
    assert recipes.run(again, tmp_path / "more")["heldout_loss"] == pytest.approx(
        summary["heldout_loss"], abs=1e-3
    )


@pytest.mark.slow
def test_a_second_phase_starts_with_the_shape_in_the_files(target_run, text_file, tmp_path):
    """A tied, scaled speculator of two stages: the second configuration names none of this."""
    changes = {
        "target": str(target_run[0]),
        "data__files": text_file,
        "train__eval_every": 1,
        "examine__prompts": 0,
    }
    shape = {
        "drafter__heads": 2,
        "drafter__inner": 8,
        "drafter__tie": True,
        "drafter__scale_input": True,
    }
    first = recipes.run(
        small_config("mlp_speculator", **changes, **shape, train__steps=2), tmp_path / "one"
    )
    still = {"init": str(tmp_path / "one"), "train__steps": 1, "optimiser__learning_rate": 1e-9}
    second = recipes.run(small_config("mlp_speculator", **changes, **still), tmp_path / "two")
    assert second["heldout_loss"] == pytest.approx(first["heldout_loss"], abs=1e-4)
    heads = head_files.read(tmp_path / "two", "mlp_speculator")
    facts = {
        key: heads.config[key] for key in ("n_predict", "inner_dim", "tie_weights", "scale_input")
    }
    assert facts == {"n_predict": 2, "inner_dim": 8, "tie_weights": True, "scale_input": True}
    with pytest.raises(UserError, match="heads is 3, and the given .* has 2"):
        recipes.run(
            small_config("mlp_speculator", **changes, **still, drafter__heads=3), tmp_path / "three"
        )


def test_other_files_are_not_overwritten(target_run, text_file, tmp_path):
    config = small_config("pretrain", data__files=text_file, model__vocab_size=320)
    with pytest.raises(
        UserError, match=r"model holds model\.safetensors, which is not of this run"
    ):
        recipes.run(config, target_run[0] / "model")
    (tmp_path / "generated").mkdir()
    with pytest.raises(UserError, match="holds generated"):
        recipes.run(config, tmp_path)
    heads = small_config("medusa", target=str(target_run[0]), data__files=text_file)
    with pytest.raises(UserError, match=r"a config\.json of another kind of run"):
        recipes.run(heads, target_run[0])
    config.train.steps, config.train.resume_changed = 20, True
    # It is finished and cannot be resumed.
    with pytest.raises(UserError, match="train.steps was 30, is 20"):
        recipes.run(config, target_run[0])


def test_a_run_with_another_target_cannot_be_resumed(target_run, text_file, tmp_path):
    target = hf.load(target_run[0])
    hf.save(tmp_path / "target", target.config, target.params, target.tokenizer)
    small = {
        "data__files": text_file,
        "train__steps": 1,
        "examine__prompts": 0,
        "model__hidden_size": 16,
    }
    config = small_config("distill", target=str(tmp_path / "target"), **small)
    recipes.run(config, tmp_path / "work")
    (tmp_path / "work" / "model").rename(tmp_path / "elsewhere")  # as if killed just before the end
    hf.save(
        tmp_path / "target",
        target.config,
        jax.tree.map(lambda x: 2 * x, target.params),
        target.tokenizer,
    )
    with pytest.raises(UserError, match="target_sha256 was"):
        recipes.run(config, tmp_path / "work")


@pytest.mark.slow
def test_the_target_is_trained_with_its_heads(target_run, text_file, tmp_path):
    changes = {
        "target": str(target_run[0]),
        "data__files": text_file,
        "train__steps": 6,
        "train__eval_every": 6,
        "train__accumulate": 2,
    }
    config = small_config(
        "bpd", "joint", **changes, drafter__heads=2, optimiser__target_from=3, loss__language="kl"
    )
    summary = recipes.run(config, tmp_path)
    before, after = hf.load(target_run[0]), hf.load(tmp_path / "target")
    assert not np.array_equal(
        before.params["embed"]["embedding"], after.params["embed"]["embedding"]
    )
    drafter = drafters.make("bpd", after.lm, model=tmp_path)
    assert drafter.nodes == 2 and summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"]


def test_a_given_tokenizer_is_used(target_run, text_file, tmp_path):
    changes = {
        "data__files": text_file,
        "tokenizer": str(target_run[0] / "model"),
        "train__steps": 1,
    }
    recipes.run(
        small_config(
            "pretrain", **changes, model__vocab_size=0, model__family="gpt2", model__num_kv_heads=2
        ),
        tmp_path,
    )
    loaded = hf.load(tmp_path)
    assert loaded.config.family == "gpt2"
    assert same_vocabulary(loaded, hf.load(target_run[0])) is None


def test_a_run_with_other_text_cannot_be_resumed(text_file, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    config = small_config(
        "pretrain", data__files=str(tmp_path / "text.txt"), model__vocab_size=300, train__steps=2
    )
    recipes.run(config, tmp_path / "work")
    (tmp_path / "work" / "model").rename(tmp_path / "elsewhere")  # as if killed just before the end
    assert recipes.run(config, tmp_path / "work")["steps"] == 2
    (tmp_path / "work" / "model").rename(tmp_path / "elsewhere2")
    (tmp_path / "text.txt").write_text(TEXT[:-1000])
    with pytest.raises(UserError, match="corpus was"):
        recipes.run(config, tmp_path / "work")
