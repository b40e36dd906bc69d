"""Training: closed forms, the same data and the same parameters after a resume, damaged checkpoints, and the mistakes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.models.transformer import TransformerConfig
from specjax.train import data, loop, objectives, recipes

ROOT = Path(__file__).parent.parent
fast = pytest.mark.fast


def tiny(layers: int = 1, vocab_size: int = 300) -> TransformerConfig:
    return TransformerConfig("llama", vocab_size, 16, 32, layers, 2, 1, 8, 64)


# --- objectives ------------------------------------------------------------------------------------------------------

TARGET = np.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]])
DRAFT = np.array([[[0.25, 0.25, 0.5], [0.1, 0.7, 0.2]]])


@fast
@pytest.mark.parametrize("shift", [0.0, 80.0])
def test_objectives_closed_forms(shift):
    target, draft = jnp.log(TARGET) + shift, jnp.log(DRAFT) - shift
    kl = (TARGET * np.log(TARGET / DRAFT)).sum(-1)[0]
    assert objectives.forward_kl(target, draft) == pytest.approx(kl.mean(), abs=1e-5)
    assert objectives.forward_kl(target, target) == pytest.approx(0, abs=1e-5)
    assert objectives.overlap(target, draft) == pytest.approx((0.75 + 0.5) / 2, abs=1e-5)
    assert objectives.overlap(target, target) == pytest.approx(1, abs=1e-5)
    assert objectives.agreement(target, draft) == 0
    labels = jnp.array([[0, 2]])
    assert objectives.cross_entropy(target, labels) == pytest.approx(-np.log([0.5, 0.7]).mean(), abs=1e-5)
    mask = jnp.array([[False, True]])
    assert objectives.cross_entropy(target, labels, mask) == pytest.approx(-np.log(0.7), abs=1e-5)
    assert objectives.forward_kl(target, draft, mask) == pytest.approx(kl[1], abs=1e-5)
    assert objectives.overlap(target, draft, mask) == pytest.approx(0.5, abs=1e-5)


@fast
def test_forward_kl_where_the_target_rules_tokens_out():
    target = jnp.array([[[0.0, -jnp.inf, 0.0]]])
    draft = jnp.zeros((1, 1, 3))
    value, gradient = jax.value_and_grad(objectives.forward_kl, argnums=1)(target, draft)
    assert value == pytest.approx(np.log(1.5), abs=1e-6)
    assert gradient[0, 0] == pytest.approx([1 / 3 - 1 / 2, 1 / 3, 1 / 3 - 1 / 2], abs=1e-6)  # draft - target


def test_pretrain_loss_looks_only_back():
    model = lm.from_config(tiny())
    params = lm.init_params(tiny(), jax.random.key(0))
    batch = jax.random.randint(jax.random.key(1), (2, 9), 0, 300)
    logits = jax.jit(lambda tokens: lm.forward(model, params, tokens).logits)
    whole = logits(batch[:, :-1])
    changed = logits(batch[:, :-1].at[:, 5].set(7))
    assert np.array_equal(whole[:, :5], changed[:, :5]) and not np.array_equal(whole[:, 5], changed[:, 5])
    value, _ = jax.jit(objectives.pretrain_loss(model))(params, {}, batch, jax.random.key(0))
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(whole)), np.asarray(batch)[:, 1:, None], -1)
    assert float(value) == pytest.approx(-chosen.mean(), abs=1e-4)


TEXT = "".join(f"def f{i}(x):\n    return x + {i % 7}  # caf\u00e9\n\n" for i in range(400))


# --- recipes ---------------------------------------------------------------------------------------------------------


def _metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def _config(name: str, **changes):
    """A config of the project, made small; keys of ``changes`` are dotted with two underscores."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    small = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    config.model.update(small | {"max_positions": 64})
    config.train.update({"steps": 30, "batch_size": 4, "length": 32, "eval_every": 10, "eval_batches": 2})
    config.optimiser.update({"name": "adamw", "learning_rate": 1e-2})
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 2, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def target_run(tmp_path_factory, text_file) -> tuple[Path, dict]:
    workdir = tmp_path_factory.mktemp("runs") / "target"
    return workdir, recipes.run(_config("pretrain", data__files=text_file, model__vocab_size=320), workdir)


def test_pretraining_from_text_to_a_model_directory(target_run, text_file):
    workdir, summary = target_run
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert json.loads((workdir / "config.json").read_text())["data"]["files"] == text_file
    records = _metrics(workdir)
    assert [record["step"] for record in records] == [10, 20, 30] and records[0]["lr"] > records[-1]["lr"] > 0
    assert records[-1]["heldout_loss"] == summary["heldout_loss"] < np.log(320) - 1
    loaded = hf.load(workdir)
    config = loaded.config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (320, 0, (0,))
    assert summary["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    assert summary["steps"] == 30 and summary["seconds"] > 0
    # The exported directory gives the loss that was reported.
    texts = [text for _, text in data.load_files(text_file, "valid")]
    valid = data.tokenise(loaded.tokenizer, texts)
    loss = loop.evaluator(objectives.pretrain_loss(loaded.lm))
    again = loss(loaded.params, {}, data.held_out_batches(valid, 4, 32, 2))["loss"]
    assert again == pytest.approx(summary["heldout_loss"], abs=1e-4)
    bits = again / np.log(2) * len(valid) / len(texts[0].encode())
    assert summary["heldout_bits_per_byte"] == pytest.approx(bits, abs=1e-4)


def test_a_finished_run_is_left_alone(target_run, text_file):
    workdir, summary = target_run
    written = {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}
    config = _config("pretrain", data__files=text_file, model__vocab_size=320, train__log_every=7)
    assert recipes.run(config, workdir) == summary
    config.optimiser.learning_rate = 0.5
    with pytest.raises(UserError, match=r"optimiser\.learning_rate was 0\.01, is 0\.5"):
        recipes.run(config, workdir)
    assert written == {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}


def test_distilling_lowers_the_divergence(target_run, text_file, tmp_path):
    target = target_run[0]
    config = _config("distill", target=str(target), data__files=text_file, model__hidden_size=16)
    summary = recipes.run(config, tmp_path)
    records = [record for record in _metrics(tmp_path) if "heldout_loss" in record]
    assert records[-1]["heldout_loss"] < 0.7 * records[0]["heldout_loss"]
    assert records[-1]["heldout_alpha"] > records[0]["heldout_alpha"]
    assert {"heldout_loss", "heldout_alpha", "heldout_agreement", "steps", "parameters", "seconds"} == set(summary)
    assert hf.same_vocabulary(hf.load(target), hf.load(tmp_path)) is None


def test_a_given_tokenizer_is_used(target_run, text_file, tmp_path):
    changes = {"data__files": text_file, "tokenizer": str(target_run[0] / "model"), "train__steps": 1}
    recipes.run(
        _config("pretrain", **changes, model__vocab_size=0, model__family="gpt2", model__num_kv_heads=2), tmp_path
    )
    loaded = hf.load(tmp_path)
    assert loaded.config.family == "gpt2" and hf.same_vocabulary(loaded, hf.load(target_run[0])) is None


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("pretrain", {"objective": "pray"}, "pretrain, distill, datastore or ngram"),
        ("pretrain", {"model__family": "t5"}, "'llama' or 'gpt2'"),
        ("pretrain", {"model__num_heads": 3}, "hidden_size 32 is no even multiple of num_heads 3"),
        ("pretrain", {"train__steps": 0}, "train.steps is 0"),
        ("pretrain", {"train__length": 65}, "beyond config.model.max_positions 64"),
        ("pretrain", {"model__vocab_size": 100}, "at least 257"),
        ("pretrain", {"tokenizer": "nowhere"}, "nowhere is no file"),
        ("pretrain", {"tokenizer": "TARGET", "model__vocab_size": 999}, "999.*has 320 tokens"),
        ("pretrain", {"optimiser__name": "sgd"}, "'adamw' or 'muon'"),
        ("pretrain", {"data__files": "SHORT"}, "fewer than one crop"),
        ("distill", {}, "config.target is empty"),
        ("distill", {"target": "nowhere"}, "nowhere is no directory"),
        ("distill", {"target": "TARGET", "model__vocab_size": 999}, "the target has 320 tokens"),
    ],
)
def test_mistakes_end_in_one_line_and_nothing_written(name, changes, told, target_run, text_file, tmp_path):
    (tmp_path / "short.txt").write_text("a\nb\n")
    places = {"TARGET": str(target_run[0]), "SHORT": str(tmp_path / "short.txt")}
    changes = {"data__files": text_file} | {key: places.get(value, value) for key, value in changes.items()}
    if name == "pretrain":
        changes = {"model__vocab_size": 300} | changes
    with pytest.raises(UserError, match=told) as error:
        recipes.run(_config(name, **changes), tmp_path / "work")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "work").exists()


def test_other_text_is_no_resumption(text_file, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    config = _config("pretrain", data__files=str(tmp_path / "text.txt"), model__vocab_size=300, train__steps=2)
    recipes.run(config, tmp_path / "work")
    (tmp_path / "work" / "model").rename(tmp_path / "elsewhere")  # as if killed just before the end
    assert recipes.run(config, tmp_path / "work")["steps"] == 2
    (tmp_path / "work" / "model").rename(tmp_path / "elsewhere2")
    (tmp_path / "text.txt").write_text(TEXT[:-1000])
    with pytest.raises(UserError, match="corpus was"):
        recipes.run(config, tmp_path / "work")
