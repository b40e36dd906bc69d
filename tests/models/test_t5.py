"""T5 compared with transformers: logits, files and greedy texts; positions in trees; errors."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hf_cases import reconfigure, rewrite

import specjax as sj
from specjax import accept, decode, drafters, prompt, testing, tree
from specjax.errors import UserError
from specjax.models import hf, lm, t5, t5_config

SIZES = {"vocab_size": 61, "d_model": 32, "d_kv": 12, "d_ff": 40, "num_heads": 4}
SIZES |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
KINDS = {
    "v1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
LENGTHS, NEW = (11, 5, 8), 9


def reference(torch, transformers, kind):
    """A random model of transformers; every parameter differs from its start value."""
    config = transformers.T5Config(
        **SIZES, **KINDS[kind], num_layers=2, num_decoder_layers=3, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    if kind == "v1.1":  # transformers 5 ties every head, unless a file has another one
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(61, 32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3)
    return model.eval()


def sources():
    rng = np.random.default_rng(0)
    return [rng.integers(2, 61, size).tolist() for size in LENGTHS]


def padded(torch, rows):
    """Ids and attention mask, as transformers takes them."""
    ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_files_and_greedy_texts_equal_those_of_transformers(
    kind, torch, transformers, tmp_path
):
    model = reference(torch, transformers, kind)
    model.save_pretrained(tmp_path / "theirs")
    loaded = hf.load(tmp_path / "theirs", dtype=jnp.float32)
    target, rows = loaded.lm, sources()
    written = np.random.default_rng(1).integers(0, 61, (3, NEW))
    given = torch.tensor(np.pad(written, ((0, 0), (1, 0))))
    with torch.no_grad():
        expected = model(**padded(torch, rows), decoder_input_ids=given).logits.numpy()
    assert np.std(expected) > 0.1
    # The whole texts at once, and a part of each as a prompt with a beginning of the output.
    texts = [[*row, 0, *more] for row, more in zip(rows, written.tolist(), strict=True)]
    packed, lengths = sj.pack_prompts(texts)
    got = jax.jit(functools.partial(lm.forward, target))(loaded.params, packed).logits
    read, cache = jax.jit(lambda *own: prompt.feed(target, *own))(
        loaded.params, packed[:, :-4], lengths - 4, target.init_cache(3, packed.shape[1])
    )
    fed = jax.jit(target.unembed)(loaded.params, read.hidden)
    last = jnp.take_along_axis(packed, cache.length[:, None] + jnp.arange(4), 1)
    block = jax.jit(target.apply)(loaded.params, last, cache)[0].logits
    for row, size in enumerate(LENGTHS):
        near = {"rtol": 0, "atol": 1e-4}
        np.testing.assert_allclose(got[row, size : size + NEW + 1], expected[row], **near)
        np.testing.assert_allclose(fed[row, size : size + NEW - 3], expected[row, :-4], **near)
        np.testing.assert_allclose(block[row], expected[row, -4:], **near)

    # Greedy texts, speculative and theirs.
    # Its cache has as many layers as the encoder; the decoder here has more.
    how = {"max_new_tokens": 12, "do_sample": False, "use_cache": False}
    theirs = model.generate(**padded(torch, rows), **how).numpy()
    drafter = drafters.make("prompt_lookup", target, gamma=3, max_ngram=2, min_ngram=1)
    packed, lengths = sj.pack_prompts([target.prompt(row) for row in rows])
    params, room = sj.ModelParams(loaded.params), {"max_len": packed.shape[1] + 12}
    state = sj.prefill(
        *(target, drafter, params, packed, lengths, sj.row_keys(0, rows=3)),
        **room,
        limit=lengths + 12,
        sampling=sj.make_sampling(3, temperature=0.0),
    )
    state, _ = sj.generate(
        target, drafter, accept.load("chain"), params, state, max_steps=12, eos_id=1
    )
    for ours, other in zip(sj.outputs(state, lengths), theirs[:, 1:].tolist(), strict=True):
        assert ours == other[: other.index(1) + 1 if 1 in other else None]

    hf.save(tmp_path / "ours", loaded.config, loaded.params)
    again, report = transformers.T5ForConditionalGeneration.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = again.eval()(**padded(torch, rows), decoder_input_ids=given).logits.numpy()
    np.testing.assert_array_equal(logits, expected)
    assert hf.load(tmp_path / "ours").config == loaded.config


def test_buckets_are_those_of_transformers(torch, transformers):
    from transformers.models.t5 import modeling_t5

    theirs = modeling_t5.T5Attention._relative_position_bucket
    for buckets, most in ((32, 128), (16, 64), (8, 20), (64, 256), (12, 50), (4, 10)):
        config = dataclasses.replace(shape(), buckets=buckets, max_distance=most)
        distance = np.arange(-most - 40, most + 41)
        for both in (True, False):
            ours = t5.buckets(config, both)[np.clip(distance, -most, most) + most]
            expected = theirs(torch.tensor(-distance), both, buckets, most).numpy()
            np.testing.assert_array_equal(ours, expected)


def shape(**fields):
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2}
    return t5_config.t5(**sizes | {"num_heads": 2, "head_dim": 8, "start_token_id": 0} | fields)


PARENTS = (-1, 0, 0, 1, 1, 2, 4)


def test_a_node_of_a_tree_has_the_logits_of_its_path():
    """Fed in two parts; then a path is committed, and the next block follows it."""
    target, params = testing.tiny_t5(vocab_size=31, num_layers=1, encoder_layers=1)
    apply, score = jax.jit(target.apply), jax.jit(functools.partial(lm.forward, target))
    rng = np.random.default_rng(0)
    texts = [[*rng.integers(1, 31, size).tolist(), 0, 5, 9] for size in (7, 3)]
    read = jax.jit(functools.partial(prompt.feed, target))
    _, cache = read(params, *sj.pack_prompts(texts), target.init_cache(2, 40))
    np.testing.assert_array_equal(cache.source, [7, 3])
    nodes = rng.integers(0, 31, (2, 7)).astype(np.int32)
    parents = jnp.asarray([PARENTS] * 2)
    first, one = apply(params, nodes[:, :3], cache, tree.layout(parents[:, :3]))
    rest, two = apply(params, nodes[:, 3:], cache, tree.layout(parents, 4), one)
    got = np.concatenate([first.logits, rest.logits], 1)
    path, near = [0, 1, 4, 6], {"rtol": 0, "atol": 1e-4}
    # Behind the path a further token, after 4 and 2 nodes of it.
    counts, next_token = (4, 2), nodes[:, 0].tolist()
    cache = jax.jit(target.commit)(
        cache, tree.join(one, two), jnp.asarray(counts), jnp.asarray([path] * 2)
    )
    after = apply(params, nodes[:, :1], cache)[0].logits[:, 0]
    for rows, place in (
        ([text + nodes[i, path].tolist() for i, text in enumerate(texts)], None),
        ([[*t, *nodes[i, path][: counts[i]], next_token[i]] for i, t in enumerate(texts)], -1),
    ):
        packed, lengths = sj.pack_prompts(rows, width=16)
        logits = np.asarray(score(params, packed).logits)
        for row, end in enumerate(lengths.tolist()):
            if place is None:
                np.testing.assert_allclose(got[row, path], logits[row, end - 4 : end], **near)
            else:
                np.testing.assert_allclose(after[row], logits[row, end - 1], **near)


CONFIG = {"model_type": "t5", "num_layers": 2, "decoder_start_token_id": 0} | SIZES
WRONG = (
    ({"feed_forward_proj": "gated-silu-2"}, "must be the name of an activation, or gated-NAME"),
    ({"feed_forward_proj": "mish"}, "feed_forward_proj 'mish' is not supported; supported"),
    ({"feed_forward_proj": "gated-gelu", "is_gated_act": False}, "they do not agree"),
    ({"relative_attention_num_buckets": 7}, "must be an even number of at least 4"),
    ({"relative_attention_max_distance": 4}, "with 8 buckets it must be above 4"),
    ({"is_encoder_decoder": False}, "a T5 model needs both of its parts"),
    ({"is_decoder": True}, "is_decoder True is not supported"),
    ({"architectures": ["T5EncoderModel"]}, "architecture T5EncoderModel is not supported"),
    ({"d_kv": None}, "d_kv is missing"),
    ({"decoder_start_token_id": "pad"}, "decoder_start_token_id is 'pad'; it must be a token id"),
)


@pytest.mark.fast
@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_wrong_config_is_refused_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as error:
        hf.config_from_hf(CONFIG | changes)
    assert "\n" not in str(error.value)


@pytest.mark.fast
def test_models_that_a_config_describes():
    for changes, tied, scaled in (
        ({}, True, True),
        ({"tie_word_embeddings": False}, False, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, False),
    ):
        config = hf.config_from_hf(CONFIG | changes)
        assert (config.tie_embeddings, config.scale_logits) == (tied, scaled)
        assert hf.config_from_hf(hf.config_to_hf(config)) == config
    with pytest.raises(UserError, match="cannot have scaled logits and a head of its own"):
        hf.config_to_hf(shape(tie_embeddings=False))
    with pytest.raises(UserError, match="decoder_start_token_id is missing; the decoder of an"):
        lm.from_config(shape(start_token_id=None))


def test_files_with_copies_of_the_embedding_and_with_a_start_token_elsewhere(tmp_path):
    config = shape(scale_logits=False, start_token_id=None, num_layers=1)
    params = lm.init_params(config, jax.random.key(0))
    hf.save(tmp_path / "t5", config, params)
    with pytest.raises(UserError, match="decoder_start_token_id is missing"):
        hf.load(tmp_path / "t5")
    (tmp_path / "t5" / "generation_config.json").write_text(
        json.dumps({"decoder_start_token_id": 3, "eos_token_id": [1, 4]})
    )
    copy = lambda tensors: {**tensors, "decoder.embed_tokens.weight": tensors["shared.weight"]}  # noqa: E731
    rewrite(tmp_path / "t5", copy)
    loaded = hf.load(tmp_path / "t5", dtype=jnp.float32)
    assert loaded.lm.encoder.start == 3
    assert loaded.config.eos_token_id == (1, 4)
    assert loaded.config.tie_embeddings
    # As transformers 5 writes a model with a head: the key says that it is tied.
    head = lambda tensors: {**tensors, "lm_head.weight": 2 * tensors["shared.weight"]}  # noqa: E731
    rewrite(tmp_path / "t5", head)
    loaded = hf.load(tmp_path / "t5", dtype=jnp.float32)
    assert not loaded.config.tie_embeddings
    assert ("head", "kernel") in flatten_dict(loaded.params)
    reconfigure(tmp_path / "t5", scale_decoder_outputs=True)
    assert hf.load(tmp_path / "t5").config.tie_embeddings
    # The tensors show the number of layers before any are built.
    reconfigure(tmp_path / "t5", num_decoder_layers=10**9)
    with pytest.raises(UserError, match="asks for 1000000000 layers, and the tensors have at m"):
        hf.load(tmp_path / "t5")


def test_prompts_and_texts_without_a_source_are_refused():
    target, params = testing.tiny_t5(vocab_size=31)
    assert target.prompt([4, 5]) == [4, 5, 0] == target.prompt([4, 5, 0])
    assert target.prompt([4, 5, 6], 3) == [4, 5, 0] == target.prompt([4, 5, 0], 3)
    assert target.continued([4, 5, 0]) == [] == target.continued([4, 5])
    assert target.continued([4, 5, 0, 7, 0]) == [7, 0]
    drafter = drafters.make("none", target)
    for prompts in ([[4, 5]], [[0, 5]], [[0]]):
        with pytest.raises(UserError, match="no source text with the start token .* LM.prompt"):
            packed = sj.pack_prompts(prompts)
            pair = (target, drafter, sj.ModelParams(params), *packed, sj.row_keys(0, rows=1))
            sj.prefill(*pair, max_len=8)
    with pytest.raises(UserError, match="reads its source before it writes"):
        target.apply(params, jnp.zeros((1, 2), jnp.int32), target.init_cache(1, 0))
    with pytest.raises(UserError, match="one document per row"):
        lm.forward(target, params, jnp.zeros((1, 2), jnp.int32), jnp.zeros((1, 2), jnp.int32))
    assert decode.pack_prompts([target.prompt([4])])[1].tolist() == [2]


@pytest.mark.fast
def test_pairs_of_different_kinds_are_refused():
    small = {"vocab_size": 31, "num_layers": 2, "encoder_layers": 1}
    encoder, decoder = testing.tiny_t5(**small)[0], testing.tiny(vocab_size=31, layers=1)[0]
    other = testing.tiny_t5(**small, start_token_id=2)[0]
    for target, model, message in (
        (encoder, decoder, "take an encoder-decoder model as the draft model"),
        (decoder, encoder, "take a decoder as the draft model"),
        (encoder, other, "begins with token 2 and that of the target with 0"),
    ):
        with pytest.raises(UserError, match=message):
            drafters.make("draft_model", target, model=model)
    for name, keys in (
        ("early_exit", {"exit_layer": 1}),
        ("layer_skip", {"skip_attention": (1,), "skip_mlp": (0,)}),
        ("pass", {}),
        ("magicdec", {"budget": 8, "sinks": 1}),
    ):
        with pytest.raises(UserError, match="take a decoder of specjax.models"):
            drafters.make(name, encoder, **keys)
