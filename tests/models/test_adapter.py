"""Models of other libraries as an ``LM``: a forward pass with a cache of its own, other trees."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.bound import Bound
from specjax.errors import UserError
from specjax.models import adapter
from specjax.types import ModelParams

VOCAB, WIDTH, HEADS, LAYERS, NEW = 13, 16, 2, 2, 20
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 7, 8, 5, 6, 7, 8, 5]]


def foreign_params(seed=0):
    draw = np.random.default_rng(seed)
    shapes = {"embed": (VOCAB, WIDTH), "out": (WIDTH, VOCAB)}
    for layer in range(LAYERS):
        shapes |= {f"qkv{layer}": (WIDTH, 3 * WIDTH), f"o{layer}": (WIDTH, WIDTH)}
    return {name: jnp.asarray(draw.normal(size=shape) * 0.6) for name, shape in shapes.items()}


def rotated(x, positions):
    size = x.shape[-1] // 2
    angle = positions[..., None, None] / 100.0 ** (jnp.arange(size) / size)
    a, b = x[..., :size], x[..., size:]
    both = (a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle))
    return jnp.concatenate(both, -1).astype(x.dtype)


def init_cache(batch, slots, rows=False, dtype=None):
    """One array of all layers, with slots before rows, and one index."""
    shape = (LAYERS, slots, batch, HEADS, WIDTH // HEADS)
    index = jnp.zeros((batch,) if rows else (), jnp.int32)
    return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype), "end": index}


def call(params, tokens, positions, cache, mask):
    """Two layers of attention; the mask decides what is seen, or (None) the index of each row."""
    x, (batch, size) = params["embed"][tokens], tokens.shape
    k, v, end = cache["k"], cache["v"], cache["end"]
    slots = k.shape[1]
    if mask is None:
        mask = jnp.arange(slots) <= (end[:, None] + jnp.arange(size))[..., None]
    for layer in range(LAYERS):
        parts = jnp.split(x @ params[f"qkv{layer}"], 3, -1)
        q, key, value = (part.reshape(batch, size, HEADS, -1) for part in parts)
        q, key = rotated(q, positions), rotated(key, positions)
        if end.ndim:
            place = (end[:, None] + jnp.arange(size)).T
            k = k.at[layer, place, jnp.arange(batch)].set(key.swapaxes(0, 1))
            v = v.at[layer, place, jnp.arange(batch)].set(value.swapaxes(0, 1))
        else:
            put = jax.lax.dynamic_update_slice
            at = [jnp.asarray(i, jnp.int32) for i in (layer, end, 0, 0, 0)]
            k = put(k, key.swapaxes(0, 1)[None], at)
            v = put(v, value.swapaxes(0, 1)[None], at)
        scores = jnp.where(mask[:, None], jnp.einsum("bthd,sbhd->bhts", q, k[layer]), -1e30)
        read = jnp.einsum("bhts,sbhd->bthd", jax.nn.softmax(scores), v[layer])
        x = x + read.reshape(batch, size, -1) @ params[f"o{layer}"]
    return x @ params["out"], {"k": k, "v": v, "end": end + size}


def by_index(params, tokens, positions, cache, mask):
    return call(params, tokens, positions, cache, None)


@jax.jit
def whole_pass(params, ids):
    size = len(ids)
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    return call(params, ids[None], jnp.arange(size)[None], init_cache(1, size), mask)[0][0]


def plain(params, ids, new=NEW):
    """Greedy decoding by whole passes."""
    ids, size = list(ids), len(ids) + new
    for last in range(len(ids) - 1, size - 1):
        padded = np.zeros(max(map(len, PROMPTS)) + NEW, np.int32)
        padded[: last + 1] = ids
        ids.append(int(whole_pass(params, padded)[last].argmax()))
    return ids


@functools.cache
def answers():
    return [plain(foreign_params(), ids)[len(ids) :] for ids in PROMPTS]


def decoded(lm, drafter, params, prompts=PROMPTS, rule="deterministic"):
    tokens, lengths = decode.pack_prompts(prompts)
    keys, room = rng.row_keys(0, len(prompts)), tokens.shape[1] + NEW
    greedy = sampling.make_sampling(len(prompts), temperature=0.0)
    state = decode.prefill(
        *(lm, drafter, params, tokens, lengths, keys),
        max_len=room,
        limit=lengths + NEW,
        sampling=greedy,
        chunk=4,
    )
    state, records = decode.generate(lm, drafter, accept.load(rule), params, state, max_steps=NEW)
    return decode.outputs(state, list(map(len, prompts))), records


def masked():
    return adapter.from_call(call, init_cache, vocab_size=VOCAB)


def of_chains():
    own = Bound(init_cache, rows=True)
    return adapter.from_call(by_index, own, vocab_size=VOCAB, chains_only=True)


@pytest.mark.parametrize("name", ["prompt_lookup", "token_recycling"])
def test_greedy_text_is_that_of_whole_passes(name):
    """Ragged rows, a chain and a tree; some drafts are accepted."""
    lm = masked()
    drafter = drafters.make(name, lm)
    params = ModelParams(foreign_params(), drafter.init_params(None))
    texts, records = decoded(lm, drafter, params)
    assert texts == answers() and np.asarray(records.accepted).sum() > 0


def test_the_contract_of_a_model():
    report = testing.check_lm(masked(), foreign_params(), progress=False)
    assert report.passed, report


def test_a_model_without_a_mask_takes_chains():
    lm, params = of_chains(), ModelParams(foreign_params())
    assert decoded(lm, drafters.make("prompt_lookup", lm), params)[0] == answers()
    with pytest.raises(UserError, match="cannot verify a tree or grow a draft; take a drafter of"):
        trees = drafters.make("token_recycling", lm)
        decoded(lm, trees, ModelParams(foreign_params(), trees.init_params(None)))


def test_new_parameters_compile_nothing():
    lm, again = masked(), masked()
    assert lm == again and hash(lm.apply) == hash(again.apply)
    drafter = drafters.make("prompt_lookup", lm)
    decoded(lm, drafter, ModelParams(foreign_params()))
    before = decode._generate._cache_size()
    other = foreign_params(1)
    texts, _ = decoded(again, drafters.make("prompt_lookup", again), ModelParams(other))
    assert decode._generate._cache_size() == before
    assert texts == [plain(other, ids)[len(ids) :] for ids in PROMPTS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_dtypes_are_kept(dtype):
    with jax.enable_x64(dtype == "float64"):
        params = {name: jnp.asarray(x, dtype) for name, x in foreign_params().items()}
        lm = adapter.from_call(call, Bound(init_cache, dtype=dtype), vocab_size=VOCAB)
        out = jax.eval_shape(lm.apply, params, jnp.zeros((1, 2), int), lm.init_cache(1, 4))[0]
    assert out.logits.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)


def test_a_window_counts_positions():
    """Of tokens in a block the depth counts, not the slot behind all committed ones."""
    lm = adapter.from_call(call, init_cache, vocab_size=VOCAB, window=3)
    assert testing.check_lm(lm, foreign_params(), progress=False).passed


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (
            lambda batch, slots: {"k": jnp.zeros((batch, 128))},
            r"gives float32\[2, 128\] at \['k'\]",
        ),
        (
            lambda batch, slots: jnp.zeros((slots, 4)),
            "at its root; an array of a cache has an axis",
        ),
        (lambda batch, slots: {"end": jnp.zeros((), int)}, "gives no array with slots"),
        (lambda batch, slots: [jnp.zeros((batch, slots))] * batch, "other trees for other sizes"),
    ],
)
def test_caches_of_another_form(made, problem):
    with pytest.raises(UserError, match=problem) as caught:
        adapter.from_call(call, made, vocab_size=VOCAB)
    assert "\n" not in str(caught.value)


def test_one_index_for_rows_of_several_lengths():
    lm = adapter.from_call(by_index, init_cache, vocab_size=VOCAB, chains_only=True)
    with pytest.raises(UserError, match="has one index for all rows, and the batch 3 rows"):
        decoded(lm, drafters.make("none", lm), ModelParams(foreign_params()))


def test_heads_say_what_the_model_lacks():
    with pytest.raises(UserError) as caught:
        drafters.make("eagle", masked())
    assert "\n" not in str(caught.value)


def rename(tree):
    """The parameters of ``testing.tiny`` from a tree in which kernels have axes of heads."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x, tree["weights"])


def test_mapped_parameters():
    """Logits, heads and parts are those of the model with its own tree."""
    lm, params = testing.tiny(layers=3, width=16, vocab_size=VOCAB)
    split = lambda x: x.reshape(-1, 1, x.shape[-1]) if x.ndim == 2 else x  # noqa: E731
    theirs = {"weights": jax.tree.map(split, params)}
    other = adapter.mapped(lm, rename)
    assert other.apply == adapter.mapped(lm, rename).apply
    for name, keys in {
        "eagle3": {"gamma": 2},
        "early_exit": {"exit_layer": 1, "adapter": "layer"},
    }.items():
        results = []
        for model, own in ((lm, params), (other, theirs)):
            drafter = cases.random_heads(name, model, own, **keys)
            draft = drafter.init_params(None)
            texts, records = decoded(model, drafter, ModelParams(own, draft), rule="chain")
            results.append((texts, np.asarray(records.emitted).tolist()))
        assert results[0] == results[1]
