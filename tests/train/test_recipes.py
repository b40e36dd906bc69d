"""Recipes: from a configuration to a model or a directory of heads that decodes, and the mistakes."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax import drafters
from specjax.data import token_streams
from specjax.errors import UserError
from specjax.models import head_files, hf
from specjax.train import examine, loop, objectives, recipes, sources

ROOT = Path(__file__).parents[2]

TEXT = "".join(f"def f{i}(x):\n    return x + {i % 7}  # caf\u00e9\n\n" for i in range(400))


# --- recipes ---------------------------------------------------------------------------------------------------------


def _metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def _config(name: str, *args: str, **changes):
    """A config of the project, made small; keys of ``changes`` are dotted with two underscores."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*args)
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
    }
    if "model" in config:
        config.model.update(small | {"max_positions": 64})
    config.train.update(
        {"steps": 30, "batch_size": 4, "length": 32, "eval_every": 10, "eval_batches": 2}
    )
    config.optimiser.update({"name": "adamw", "learning_rate": 1e-2})
    config.examine.update(
        {"prompts": min(config.examine.prompts, 4), "prompt_tokens": 6, "new_tokens": 12}
    )
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 2, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def target_run(tmp_path_factory, text_file) -> tuple[Path, dict]:
    workdir = tmp_path_factory.mktemp("runs") / "target"
    return workdir, recipes.run(
        _config("pretrain", data__files=text_file, model__vocab_size=320), workdir
    )


def test_pretraining_from_text_to_a_model_directory(target_run, text_file):
    workdir, summary = target_run
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert json.loads((workdir / "config.json").read_text())["data"]["files"] == text_file
    records = _metrics(workdir)
    assert [record["step"] for record in records] == [10, 20, 30] and records[0]["lr"] > records[
        -1
    ]["lr"] > 0
    assert records[-1]["heldout_loss"] == summary["heldout_loss"] < np.log(320) - 1
    loaded = hf.load(workdir)
    config = loaded.config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (320, 0, (0,))
    assert summary["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    assert summary["steps"] == 30 and summary["seconds"] > 0
    # The exported directory gives the loss that was reported.
    texts = [text for _, text in token_streams.load_files(text_file, "valid")]
    valid = token_streams.tokenise(loaded.tokenizer, texts)
    loss = loop.evaluator(objectives.pretrain_loss(loaded.lm))
    again = loss(loaded.params, {}, token_streams.held_out_batches(valid, 4, 32, 2))["loss"]
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
    assert (
        summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] >= 1
    )  # foreseen exactly, when greedy
    assert {
        "heldout_alpha_t1_depth1",
        "heldout_decoded_tau_t1",
        "steps",
        "parameters",
        "seconds",
    } < set(summary)
    assert hf.same_vocabulary(hf.load(target), hf.load(tmp_path)) is None


def test_every_option_of_the_loop_at_once(target_run, text_file, tmp_path):
    """Half precision, averaged parameters, parts of a batch, recomputed layers, the best step, text of the draft's own."""
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
    config = _config(
        "distill", target=str(target), data__files=text_file, pruned="0", train__steps=12, **changes
    )
    summary = recipes.run(config, tmp_path)
    draft, whole = hf.load(tmp_path), hf.load(target)
    assert draft.config == whole.config  # of one layer, of which it keeps one
    assert draft.params["embed"]["embedding"].dtype == np.float32
    assert summary["heldout_tau_t0"] > 2 and summary["best_step"] in (
        10,
        12,
    )  # it began as the target itself
    best = next(record for record in _metrics(tmp_path) if record["step"] == summary["best_step"])
    assert summary["heldout_loss"] == best["heldout_loss"]  # of the parameters that were saved


def test_heads_from_text_to_a_tree(target_run, text_file, tmp_path):
    target = hf.load(target_run[0])
    changes = {
        "target": str(target_run[0]),
        "data__files": text_file,
        "drafter__heads": 3,
        "data__packing": "documents",
    }
    summary = recipes.run(_config("medusa", **changes), tmp_path / "medusa")
    assert summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"] > 1
    records = [record for record in _metrics(tmp_path / "medusa") if "heldout_loss" in record]
    assert records[-1]["heldout_loss"] < 0.8 * records[0]["heldout_loss"]
    head = head_files.read(tmp_path / "medusa", "medusa")
    table = np.array(head.config["accuracy"])
    assert table.shape == (3, 10) and (table.sum(1) <= 1 + 1e-6).all() and table[0, 0] > 0.1
    assert (
        head.config["medusa_num_heads"] == 3 and head.config["vocabulary"] == target.lm.vocabulary
    )
    drafter = drafters.make("medusa", target.lm, model=tmp_path / "medusa", nodes=5)
    assert drafter.nodes == 5 and drafter.depth <= 3
    # The files give what the run saw at its end.
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
    # And another run may begin with them.
    again = _config(
        "medusa",
        **changes,
        init=str(tmp_path / "medusa"),
        train__steps=1,
        optimiser__learning_rate=1e-9,
    )
    assert recipes.run(again, tmp_path / "more")["heldout_loss"] == pytest.approx(
        summary["heldout_loss"], abs=1e-3
    )


def test_a_second_phase_begins_with_all_that_the_files_say(target_run, text_file, tmp_path):
    """A tied, scaled speculator of two stages: what comes after it is asked for none of that again."""
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
        _config("mlp_speculator", **changes, **shape, train__steps=2), tmp_path / "one"
    )
    still = {"init": str(tmp_path / "one"), "train__steps": 1, "optimiser__learning_rate": 1e-9}
    second = recipes.run(_config("mlp_speculator", **changes, **still), tmp_path / "two")
    assert second["heldout_loss"] == pytest.approx(first["heldout_loss"], abs=1e-4)
    heads = head_files.read(tmp_path / "two", "mlp_speculator")
    facts = {
        key: heads.config[key] for key in ("n_predict", "inner_dim", "tie_weights", "scale_input")
    }
    assert facts == {"n_predict": 2, "inner_dim": 8, "tie_weights": True, "scale_input": True}
    with pytest.raises(UserError, match="heads is 3, and the heads in the files have 2"):
        recipes.run(
            _config("mlp_speculator", **changes, **still, drafter__heads=3), tmp_path / "three"
        )


def test_what_is_there_is_not_overwritten(target_run, text_file, tmp_path):
    config = _config("pretrain", data__files=text_file, model__vocab_size=320)
    with pytest.raises(
        UserError, match=r"model holds model\.safetensors, which is none of this run's"
    ):
        recipes.run(config, target_run[0] / "model")
    (tmp_path / "generated").mkdir()
    with pytest.raises(UserError, match="holds generated"):
        recipes.run(config, tmp_path)
    heads = _config("medusa", target=str(target_run[0]), data__files=text_file)
    with pytest.raises(UserError, match=r"a config\.json of another kind"):
        recipes.run(heads, target_run[0])
    config.train.steps, config.train.resume_changed = 40, True
    with pytest.raises(
        UserError, match="train.steps was 30, is 40"
    ):  # it is finished: nothing would go on
        recipes.run(config, target_run[0])


def test_another_target_is_no_resumption(target_run, text_file, tmp_path):
    target = hf.load(target_run[0])
    hf.save(tmp_path / "target", target.config, target.params, target.tokenizer)
    small = {
        "data__files": text_file,
        "train__steps": 1,
        "examine__prompts": 0,
        "model__hidden_size": 16,
    }
    config = _config("distill", target=str(tmp_path / "target"), **small)
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


def test_the_target_learns_beside_its_heads(target_run, text_file, tmp_path):
    changes = {
        "target": str(target_run[0]),
        "data__files": text_file,
        "train__steps": 6,
        "train__eval_every": 6,
    }
    config = _config(
        "bpd", "joint", **changes, drafter__heads=2, optimiser__target_from=3, loss__language="kl"
    )
    summary = recipes.run(config, tmp_path)
    before, after = hf.load(target_run[0]), hf.load(tmp_path / "target")
    assert not np.array_equal(
        before.params["embed"]["embedding"], after.params["embed"]["embedding"]
    )
    drafter = drafters.make("bpd", after.lm, model=tmp_path)
    assert drafter.nodes == 2 and summary["heldout_tau_t0"] == summary["heldout_decoded_tau_t0"]


def test_dialogues_and_generated_text_feed_training(target_run, text_file, tmp_path):
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
    config = _config("medusa", **changes, examine__prompt_tokens=16)
    material = sources.gather(config, tmp_path, target.tokenizer, target.directory)
    batch = material.batches.batch(0)
    said = target.tokenizer.decode([int(t) for t in batch.tokens[batch.labelled]])
    assert "def f" in said and "what is" not in said
    assert len(material.prompts) == 4 and all(0 < len(prompt) <= 16 for prompt in material.prompts)

    text = _config_of_text(target_run[0], text_file)
    recipes.run(text, tmp_path / "own")
    changes = {"target": str(target_run[0]), "data__generated": str(tmp_path / "own")}
    for labels, share in (("output", 8 / 14), ("all", 13 / 14)):
        config = _config(
            "medusa", **changes, data__labels=labels, train__length=13, examine__prompts=2
        )
        material = sources.gather(config, tmp_path, target.tokenizer, target.directory)
        assert material.batches.batch(0).labelled.mean() == pytest.approx(share, abs=0.05)
    with pytest.raises(UserError, match="temperature"):
        sources.gather(
            _config("medusa", **changes, data__temperature=0.3), tmp_path, target.tokenizer, None
        )


def _config_of_text(target: Path, text_file: str):
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


def test_a_given_tokenizer_is_used(target_run, text_file, tmp_path):
    changes = {
        "data__files": text_file,
        "tokenizer": str(target_run[0] / "model"),
        "train__steps": 1,
    }
    recipes.run(
        _config(
            "pretrain", **changes, model__vocab_size=0, model__family="gpt2", model__num_kv_heads=2
        ),
        tmp_path,
    )
    loaded = hf.load(tmp_path)
    assert (
        loaded.config.family == "gpt2"
        and hf.same_vocabulary(loaded, hf.load(target_run[0])) is None
    )


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "pretrain",
            {"objective": "pray"},
            "must be one of pretrain, distill, heads, generate, datastore, ngram",
        ),
        ("pretrain", {"model__family": "t5"}, "'llama' or 'gpt2'"),
        ("pretrain", {"model__num_heads": 3}, "hidden_size 32 is no even multiple of num_heads 3"),
        ("pretrain", {"train__steps": 0}, "train.steps is 0"),
        ("pretrain", {"train__length": 65}, "beyond config.model.max_positions 64"),
        ("pretrain", {"model__vocab_size": 100}, "at least 257"),
        ("pretrain", {"tokenizer": "nowhere"}, "nowhere is no file"),
        ("pretrain", {"tokenizer": "TARGET", "model__vocab_size": 999}, "999.*has 320 tokens"),
        ("pretrain", {"optimiser__name": "sg"}, "'sgd' or 'lion'"),
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
        ("distill", {"target": "TARGET", "data__on_policy": 1.5}, "must be a share of the rows"),
        (
            "distill",
            {"target": "TARGET", "data__on_policy": 1.0},
            "on_policy_prompt is 32; it must be at least 1 and below",
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
        ("distill", {"target": "TARGET", "data__packing": "tight"}, "'crops' or 'documents'"),
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
            "temperature is -1; it must be in",
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
            "40 heads look beyond config.train.length 32",
        ),
        (
            "medusa",
            {"target": "TARGET", "drafter__model": "TARGET"},
            "to begin with them give config.init",
        ),
        (
            "distill",
            {"target": "TARGET", "train__precision": "int8"},
            "it must be float32 or bfloat16",
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
        ("hydra", {"target": "TARGET", "init": "TARGET"}, "has no hydra heads"),
        (
            "mlp_speculator",
            {"target": "TARGET", "data__generated": "nowhere", "data__files": ""},
            "nowhere",
        ),
    ],
)
def test_mistakes_end_in_one_line_and_nothing_written(
    name, changes, told, target_run, text_file, tmp_path
):
    (tmp_path / "short.txt").write_text("a\nb\n")
    places = {"TARGET": str(target_run[0]), "SHORT": str(tmp_path / "short.txt")}
    changes = {"data__files": text_file} | {
        key: places.get(value, value) for key, value in changes.items()
    }
    if name == "pretrain":
        changes = {"model__vocab_size": 300} | changes
    with pytest.raises(UserError, match=told) as error:
        recipes.run(_config(name, **changes), tmp_path / "work")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "work").exists()


def test_other_text_is_no_resumption(text_file, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    config = _config(
        "pretrain", data__files=str(tmp_path / "text.txt"), model__vocab_size=300, train__steps=2
    )
    recipes.run(config, tmp_path / "work")
    (tmp_path / "work" / "model").rename(tmp_path / "elsewhere")  # as if killed just before the end
    assert recipes.run(config, tmp_path / "work")["steps"] == 2
    (tmp_path / "work" / "model").rename(tmp_path / "elsewhere2")
    (tmp_path / "text.txt").write_text(TEXT[:-1000])
    with pytest.raises(UserError, match="corpus was"):
        recipes.run(config, tmp_path / "work")
