"""Training of encoder-decoder models on pairs: the loss, resumed runs, files, drafts, errors."""

from __future__ import annotations

import functools
import json

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import t5_cases
from internals import heads_along_text as _along_text
from marks import by_default
from train_cases import equal, small_config

from configs import self_generate
from specjax import testing
from specjax.data import packing, pairs
from specjax.data.pairs import OutputEnds, Pair
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.train import objectives, recipes, writer
from specjax.train.recipes import distill, generated, pair_material, shapes
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
    rewrite = jax.jit(writer.rewriter(draft, 1.0, 0, 1.0, eos_id=tuple(range(1, 12))))
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


# Two rows of three tokens: the start token 0 is at places 4 and 1, the outputs have 5 and 6 tokens.
ROWS = Batch(
    jnp.asarray([[2, 1, 1, 2, 0, 2, 1, 2, 1, 1, 0, 0], [2, 0, 2, 1, 1, 2, 1, 1, 0, 0, 0, 0]]),
    jnp.asarray([[0] * 5 + [1] * 5 + [0] * 2, [0] * 2 + [1] * 6 + [0] * 4], bool),
)


@pytest.mark.parametrize("name", by_default(["medusa", "bpd", "hydra", "block_head"], ["medusa"]))
def test_no_draft_begins_inside_a_source(name, monkeypatch):
    """The first one has the start token pending: at depth d there are d labels less in each row."""
    case = cases.with_encoder(name)

    def labels():
        own = case.params.draft, case.params.target, ROWS, jax.random.key(0)
        # Nothing else is computed.
        loss = case.drafter.training.loss
        weights = jax.jit(lambda *own: loss(*own)[1]["weight"])(*own)
        return [int(weights[f"agreement_{d}"]) for d in (1, 2)]

    assert labels() == [5 + 6, 4 + 5]
    if name == "bpd":
        monkeypatch.setattr(_along_text, "of_output", lambda target, batch: batch)
        assert labels() == [11, 10]  # one more, of a feature inside the first source


def test_the_share_and_the_temperature_of_outputs_on_policy():
    draft, params = testing.tiny_t5(1, vocab_size=40, num_layers=1)
    batch = batch_of(PAIRS * 32)

    @functools.partial(jax.jit, static_argnums=1)
    def written(share, temperature, seed):
        rewrite = writer.rewriter(draft, share, 0, temperature, eos_id=(1,))
        new = rewrite(params, {}, batch, jax.random.key(seed))
        return new.tokens, (new.tokens != batch.tokens).any(1)

    changed = np.asarray(written(0.25, 1.0, 0)[1])
    assert 4 <= changed.sum() <= 32 and not changed.all()
    assert not written(0.0, 1.0, 0)[1].any()
    greedy, sampled = ([written(1.0, t, seed)[0] for seed in range(2)] for t in (0.0, 1.0))
    np.testing.assert_array_equal(*greedy)
    assert (sampled[0] != sampled[1]).any()


def test_checkpoints_of_layers_are_those_of_both_parts():
    """``train.remat`` in the encoder too; the logits stay."""
    target, params = testing.tiny_t5(vocab_size=40, num_layers=2, encoder_layers=3)
    config = t5_cases.t5_config.t5(
        **t5_cases.SIZES | {"num_layers": 2}, encoder_layers=3, vocab_size=40, start_token_id=0
    )
    again = lm.from_config(config, name="t5", remat=True)
    tokens = batch_of().tokens[:, :-1]
    plain, checkpointed = (
        str(jax.make_jaxpr(lambda p, m=model: lm.forward(m, p, tokens).logits)(params))
        for model in (target, again)
    )
    count = lambda text: text.count("= checkpoint[") + text.count("= remat2[")  # noqa: E731
    assert (count(plain), count(checkpointed)) == (0, 3 + 2)


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


def documents_of(config, workdir, target):
    own = target.tokenizer, shapes.ends_of(target)
    return pair_material.documents(config, workdir, *own)


def sources_of(documents):
    return {tuple(each.ids[: np.argmax(each.labelled)].tolist()) for each in documents}


def test_the_recipes_keep_held_out_sources_and_learn_the_end(folder, tmp_path, monkeypatch):
    """Half of the lines are there twice, so that splits by place share sources."""
    target, lines = hf.load(folder / "target"), t5_cases.lines(200)
    file = t5_cases.write(tmp_path / "p.jsonl", lines + lines[:100][::-1])
    config = t5_cases.small("t5_distill", file, target=str(folder / "target"), train__length=20)
    config.generation = self_generate.get_config().generation
    config.generation.prompt_tokens = 12
    found = documents_of(config, tmp_path, target)
    held_out = sources_of(found["valid"])
    assert len(held_out) > 5 and not held_out & sources_of(found["train"])
    prompts = generated.starts_of(config, tmp_path, target, "train", 60)
    assert not held_out & set(map(tuple, prompts))
    for each in (*found["train"], *found["valid"]):
        assert each.ids[-1] == 1 and each.labelled[-1]
    monkeypatch.setattr(pairs, "split_of", lambda every, split: every(split))
    assert held_out & sources_of(documents_of(config, tmp_path, target)["train"])


def test_a_distillation_on_policy_has_the_keys_of_its_configuration(folder, tmp_path, monkeypatch):
    """Of the model in use: ``config.model`` may be a decoder if layers of the target are taken."""

    class Stop(Exception):
        pass

    def rewriter(model, *keys):
        assert model.encoder is not None
        raise Stop(keys)

    monkeypatch.setattr(distill.writer, "rewriter", rewriter)
    given = {"data__on_policy": 0.25, "data__on_policy_prompt": 999}
    own = {"data__pairs": str(folder / "pairs.jsonl"), "pruned": "0", **given}
    config = small_config("distill", target=str(folder / "target"), **own)
    config.examine.prompts = 0
    config.loss.temperature = 0.7
    with pytest.raises(Stop) as stopped:
        recipes.run(config, tmp_path / "work")
    assert stopped.value.args[0] == (0.25, 999, 0.7, (1,))


@pytest.mark.slow
def test_a_model_with_more_tokens_than_its_tokenizer_goes_on(folder, tmp_path):
    """Its embeddings are padded, as those of released models; no text has the further ids."""
    sizes = {"vocab_size": 48, "gated": False, "tie_embeddings": True, "max_distance": 12}
    own = t5_cases.t5_config.t5(**t5_cases.SIZES, vocab_size=48, start_token_id=0)
    _, params = testing.tiny_t5(0, vocab_size=48, num_layers=1)
    hf.save(tmp_path / "first", own, params, t5_cases.tokenizer())
    config = small(
        folder,
        "t5",
        init=str(tmp_path / "first"),
        tokenizer=str(tmp_path / "first"),
        model=sizes,
        train__length=20,
    )
    recipes.run(config, tmp_path / "more")
    loaded = hf.load(tmp_path / "more")
    assert loaded.config.vocab_size == 48 and loaded.tokenizer.get_vocab_size() == 40
    assert not equal(loaded.params, params)


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
        (
            "t5",
            {"data__pairs": "FEW", "train__length": 64, "model__vocab_size": 300},
            "the valid split has no pair that can be learnt",
        ),
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
    if config.data.pairs == "FEW":
        config.data.pairs = t5_cases.write(tmp_path / "few.jsonl", t5_cases.lines(3))
    with pytest.raises(UserError, match=message) as error:
        recipes.run(config, tmp_path / "work")
    assert "\n" not in str(error.value) and not (tmp_path / "work" / "config.json").exists()
