"""Training of encoder-decoder models on pairs: the loss, resumed runs, files, drafts, errors."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5_cases
from train_cases import equal, small_config

from configs import self_generate
from specjax import testing
from specjax.data import packing, pairs
from specjax.data.pairs import OutputEnds, Pair
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import objectives, on_policy, recipes
from specjax.types import Batch

# Ragged sources and outputs, in rows of 12 positions.
PAIRS = (Pair("", "w5 w6 w7 w5", "w9 w8"), Pair("", "w4", "w5 w6 w7 w8 w9 w10"))
LENGTH = 12


def batch_of(given=PAIRS) -> Batch:
    documents, _ = pairs.documents(given, t5_cases.tokenizer(), OutputEnds(0, 1), LENGTH)
    [batch] = packing.held_out_rows(documents, len(documents), LENGTH, 1)
    return jax.tree.map(jnp.asarray, batch)


def by_hand(target, params, pair) -> list[float]:
    """-log p of each token of an output and its end, a token at a time after its source alone."""
    tokenizer = t5_cases.tokenizer()
    source = tokenizer.encode(pair.source).ids
    output = [*tokenizer.encode(pair.output, add_special_tokens=False).ids, 1]
    fed = [0, *output[:-1]]
    read = target.encoder.read(
        params, jnp.asarray([source]), jnp.asarray([len(source)]), target.init_cache(1, 24)
    )

    def one(cache, token):
        out, block = target.apply(params, token[None, None], cache)
        return target.commit(cache, block, jnp.ones(1, jnp.int32)), out.logits[0, 0]

    logits = jax.lax.scan(one, read[1], jnp.asarray(fed))[1]
    losses = -jax.nn.log_softmax(logits)[jnp.arange(len(output)), jnp.asarray(output)]
    return losses.tolist()


def test_the_loss_is_that_of_the_outputs_and_their_ends():
    """Also where rows are padded; other labels give other values."""
    target, params = testing.tiny_t5(vocab_size=40, num_layers=1)
    loss = jax.jit(lambda batch: objectives.pretrain_loss(target)(params, {}, batch, None))
    batch = batch_of()
    value, metrics = loss(batch)
    expected = [each for pair in PAIRS for each in by_hand(target, params, pair)]
    assert metrics["weight"] == len(expected) == 3 + 7
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-5)
    labelled, real = batch.labelled, jnp.cumsum(batch.labelled[:, ::-1], 1)[:, ::-1] > 0
    mutants = {
        "source tokens": real,
        "shifted by one": jnp.roll(labelled, -1, 1),
        "the end is left out": labelled & jnp.roll(labelled, -1, 1),
        "padding counted": labelled | ~real,
    }
    for name, wrong in mutants.items():
        assert abs(loss(batch.replace(labelled=wrong))[0] - value) > 1e-3, name
    # What is in the padding has no effect.
    other = batch.replace(tokens=jnp.where(real, batch.tokens, 7))
    np.testing.assert_allclose(loss(other)[0], value, rtol=1e-6)


@pytest.mark.slow
def test_a_stored_model_has_the_loss_of_transformers(tmp_path):
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    t5_cases.save(tmp_path / "t5")
    loaded = hf.load(tmp_path / "t5")
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "t5").eval()
    tokenizer = loaded.tokenizer
    for pair in PAIRS:
        loss = objectives.pretrain_loss(loaded.lm)
        ours = loss(loaded.params, {}, batch_of([pair]), None)[0]
        source = torch.tensor([tokenizer.encode(pair.source).ids])
        labels = [*tokenizer.encode(pair.output, add_special_tokens=False).ids, 1]
        with torch.no_grad():
            other = theirs(input_ids=source, labels=torch.tensor([labels])).loss
        np.testing.assert_allclose(ours, float(other), rtol=0, atol=1e-4)


def test_a_draft_on_policy_replaces_outputs_only():
    """Sources stay, an end stops the writing, and only what was written is a label."""
    draft, params = testing.tiny_t5(1, vocab_size=40, num_layers=1, scale=8.0)
    batch = batch_of(PAIRS * 8)
    rewrite = jax.jit(on_policy.rewriter(draft, 1.0, 0, 1.0, eos_id=tuple(range(1, 12))))
    new = rewrite(params, {}, batch, jax.random.key(0))
    tokens, labelled = np.asarray(new.tokens), np.asarray(new.labelled)
    lengths = []
    for row in range(len(tokens)):
        start = tokens[row].tolist().index(0)
        np.testing.assert_array_equal(tokens[row, : start + 1], batch.tokens[row, : start + 1])
        written = np.flatnonzero(labelled[row])
        assert written[0] == start + 1 and len(written) == written[-1] - start
        assert not tokens[row, written[-1] + 1 :].any()
        ends = tokens[row, written] < 12
        assert not ends[:-1].any() or not tokens[row, written][:-1][ends[:-1]].any()
        lengths.append(len(written))
    assert len(set(lengths)) > 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with pairs, and with a random target."""
    path = tmp_path_factory.mktemp("t5")
    t5_cases.write(path / "pairs.jsonl", t5_cases.lines(400))
    t5_cases.save(path / "target")
    return path


def small(folder, name, **changes):
    changes = {
        key: str(folder / "target") if value == "TARGET" else value
        for key, value in changes.items()
    }
    return t5_cases.small(name, str(folder / "pairs.jsonl"), **changes)


@pytest.mark.slow
def test_a_run_learns_and_a_resumed_one_ends_with_the_same_bits(folder, tmp_path):
    def run(steps, workdir):
        config = small(
            folder,
            "t5",
            optimiser__warmup=0.0,
            train__steps=steps,
            model__vocab_size=320,
            train__length=48,
        )
        return recipes.run(config, workdir)

    whole = run(40, tmp_path / "whole")
    records = [json.loads(x) for x in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if "heldout_loss" in record)
    assert whole["heldout_loss"] < first["heldout_loss"] - 0.3
    run(4, tmp_path / "parts")
    again = run(40, tmp_path / "parts")
    assert again["heldout_loss"] == whole["heldout_loss"]
    one, two = (hf.load(tmp_path / name) for name in ("whole", "parts"))
    assert equal(one.params, two.params)
    assert one.lm.encoder.start == 0 and one.config.eos_token_id == (1,)
    assert one.tokenizer.encode("w3").ids[-1] == 1


@pytest.mark.slow
def test_a_draft_learns_from_pairs_and_from_what_the_target_wrote(folder, tmp_path):
    written = tmp_path / "written"
    config = self_generate.get_config()
    config.target, config.data.pairs = str(folder / "target"), str(folder / "pairs.jsonl")
    config.generation.update({"num_prompts": 60, "prompt_tokens": 7, "new_tokens": 8})
    recipes.run(config, written)
    given = {
        "pairs": {},
        "on policy": {"data__on_policy": 0.5},
        "on its text": {"data__pairs": "", "data__generated": str(written), "examine__prompts": 2},
        "pruned": {"pruned": "0"},
    }
    for name, changes in given.items():
        config = small(folder, "t5_distill", target="TARGET", train__length=20, **changes)
        if name == "pruned":
            config.optimiser.learning_rate = config.optimiser.adam_learning_rate = 1e-9
        summary = recipes.run(config, tmp_path / name)
        assert 0 < summary["heldout_alpha"] <= 1 and summary["heldout_decoded_tau_t0"] >= 1
    assert summary["heldout_alpha"] == pytest.approx(1, abs=1e-3)  # the target itself


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "bpd"])
def test_heads_learn_on_the_features_of_a_decoder(folder, tmp_path, name):
    config = small_config(name, train__steps=20, examine__prompts=4, examine__prompt_tokens=12)
    config.target, config.data.pairs = str(folder / "target"), str(folder / "pairs.jsonl")
    summary = recipes.run(config, tmp_path / "heads")
    records = [json.loads(x) for x in (tmp_path / "heads/metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if "heldout_loss" in record)
    assert summary["heldout_loss"] < first["heldout_loss"]
    assert summary["heldout_decoded_tau_t0"] >= 1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"data__pairs": ""}, "an encoder-decoder model learns pairs of a source and its"),
        ("t5", {"data__pairs": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
        ("t5", {"train__length": 4, "tokenizer": "TARGET", "model__vocab_size": 0}, "length 4"),
        ("t5", {"data__labels": "all"}, "labels belongs to dialogues and generated text"),
        ("t5", {"model__buckets": 7}, "config.model: relative_attention_num_buckets is 7"),
        ("t5", {"model__num_heads": 0}, "config.model.num_heads is 0"),
        ("t5", {"loss": {"exit_scale": 1.0}}, "config.loss.exit_scale is for decoders that exit"),
        ("pretrain", {}, "config.data.pairs are learnt by encoder-decoder models"),
        ("pretrain", {"model__family": "t5"}, "is not a key of family t5; start from configs/t5"),
        ("distill", {"target": "TARGET"}, "is an encoder-decoder model, and config.model.family"),
        (
            "t5_distill",
            {"target": "TARGET", "data__pairs": "", "data__files": "a.txt"},
            "learns pairs",
        ),
        (
            "t5_distill",
            {"target": "TARGET", "examine__prompt_tokens": 2},
            "has 0 different sources",
        ),
        (
            "t5",
            {
                "init": "TARGET",
                "tokenizer": "TARGET",
                "model": {"vocab_size": 0, "gated": False, "tie_embeddings": True},
                "model__max_distance": 16,
            },
            "has max_distance 12, and the model to be trained 16",
        ),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(folder, tmp_path, name, changes, message):
    if name in ("pretrain", "distill"):
        pairs_file = str(folder / "pairs.jsonl")
        known = {"target": str(folder / "target")} if "target" in changes else {}
        config = small_config(name, data__pairs=pairs_file, **changes | known)
    else:
        config = small(folder, name, **changes)
    with pytest.raises(UserError, match=message) as error:
        recipes.run(config, tmp_path / "work")
    assert "\n" not in str(error.value) and not (tmp_path / "work" / "config.json").exists()
