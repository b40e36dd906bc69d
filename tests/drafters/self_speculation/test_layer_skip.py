"""Layer skipping: nothing skipped accepts everything, the target's own cache, sets, errors."""

from __future__ import annotations

import json

import growth_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, step, testing
from specjax.drafters.self_speculation import _skip_sets, _skip_text
from specjax.errors import UserError
from specjax.testing import cases
from specjax.types import ModelParams, Sublayers

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3, 3, 3]]
NEW = 16
SHAPES = {
    "chain": ({"gamma": 3}, "chain"),
    "tree": ({"tree": "2x2x1", "siblings": "without_replacement"}, "recursive"),
    "tree, iid": ({"tree": "2x1", "siblings": "iid"}, "recursive"),
    "tree, top_k": ({"tree": "2x2x1", "siblings": "top_k"}, "deterministic"),
}


def decoded(target, drafter, rule, params, temperature):
    """(final state, records, prompt lengths) of the ragged batch."""
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, len(PROMPTS)),
        max_len=packed.shape[1] + NEW,
        limit=lengths + NEW,
        sampling=sampling.make_sampling(len(PROMPTS), temperature),
    )
    state, records = decode.generate(
        target, drafter, accept.load(rule), params, state, max_steps=NEW
    )
    decode.check(state)
    return state, jax.tree.map(np.asarray, records), lengths


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [
        ("chain", 0.0),
        ("chain", 0.8),
        pytest.param("tree", 0.0, marks=pytest.mark.slow),
        ("tree", 0.8),
        pytest.param("tree, iid", 0.8, marks=pytest.mark.slow),
        # At temperature 1 the best tokens are not always the target's.
        pytest.param("tree, top_k", 0.0, marks=pytest.mark.slow),
    ],
)
def test_nothing_skipped_accepts_everything(shape, temperature):
    """Every draft of every row to its full depth, at every length of the text."""
    target, params = testing.tiny("llama", 0)
    keys, rule = SHAPES[shape]
    drafter = drafters.make("layer_skip", target, skip_attention="", skip_mlp=(), **keys)
    _, records, _ = decoded(target, drafter, rule, ModelParams(params), temperature)
    live = records.emitted > 0
    assert live.any(0).all() and (records.accepted[live] == drafter.longest).all()
    assert (records.emitted.sum(0) == NEW).all()


def test_something_skipped_is_drafted_differently_and_the_text_is_the_targets():
    target, params = testing.tiny("llama", 0, layers=3)
    drafter = drafters.make("layer_skip", target, skip_attention="1", skip_mlp="0,2", gamma=3)
    state, records, lengths = decoded(target, drafter, "chain", ModelParams(params), 0.0)
    live = records.emitted > 0
    assert (records.accepted[live] < 3).any()
    plain = drafters.make("none", target)
    expected, _, _ = decoded(target, plain, "chain", ModelParams(params), 0.0)
    assert decode.outputs(state, lengths) == decode.outputs(expected, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "gpt_neox"])
def test_probs_along_a_text_are_those_of_the_draft(family):
    """One pass over the text gives what each round's first step computes with the cache.

    The part alone, with its own keys and values of the text, gives something else.
    """
    target, params = testing.tiny(family, 0, layers=3)
    part = _skip_sets.Skips((0, 2), (1,)).left(3)
    text = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 9)), jnp.int32)
    along = _skip_text.outputs(target, part, params, text)[1].logits
    model = target.with_part(part)
    for length in range(1, text.shape[1] + 1):
        cache = target.init_cache(2, 12)
        block = target.apply(params, text[:, : length - 1], cache)[1] if length > 1 else None
        if block is not None:
            cache = target.commit(cache, block, jnp.full((2,), length - 1, jnp.int32))
        step = model.apply(params, text[:, length - 1 : length], cache)[0].logits[:, 0]
        np.testing.assert_allclose(along[:, length - 1], step, rtol=1e-4, atol=1e-4)
    alone = model.apply(params, text, target.init_cache(2, 0))[0].logits
    assert np.abs(np.asarray(alone - along))[:, 1:].max() > 1e-2


def test_no_copy_of_the_cache_is_carried():
    """The state of the drafter is empty; it has no parameters."""
    _, target, drafter, params = cases.real("layer_skip")
    packed, lengths = decode.pack_prompts([[0, 1, 2]])
    state = decode.prefill(target, drafter, params, packed, lengths, rng.row_keys(0, 1), max_len=9)
    assert not jax.tree.leaves(state.draft) and not jax.tree.leaves(drafter.init_params(None))


LAWS = shared.SHAPES


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(LAWS))
@pytest.mark.parametrize("controlled", [False, True], ids=["", "matchness"])
def test_exact_law(shape, controlled):
    keys, rule = LAWS[shape]
    keys = keys | ({"control": "matchness:0.5,0.9,0.2,0.5"} if controlled else {})
    target = cases.models()[0]
    with jax.enable_x64(True):
        drafter = drafters.make("layer_skip", target, skip_attention=(1,), skip_mlp=(0,), **keys)
        params = ModelParams(cases.table(0))
        assert shared.law_error(drafter, rule, target, params) < shared.EXACT


@pytest.mark.fast
def test_sets(tmp_path):
    def read(value):
        return _skip_sets.layers("skip_mlp", value)

    assert read("3-6, 9") == (3, 4, 5, 6, 9) and read("") == () and read([4, 2, 2]) == (2, 4)
    assert read("7") == (7,) and read(()) == ()
    file = tmp_path / "skips.json"
    file.write_text(json.dumps({"skip_attention": [1], "skip_mlp": [5, 0]}))
    assert read(file) == read(str(tmp_path)) == (0, 5)
    assert _skip_sets.Skips((1,), (0, 2)).left(3) == Sublayers((0, 2), (1,))


def two_sets(tmp_path, target, **keys):
    """A drafter that chooses between skipping nothing and skipping almost everything."""
    for name, attention, mlp in (("few", [], []), ("many", [0], [0, 1])):
        content = {"skip_attention": attention, "skip_mlp": mlp}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    few, many = (str(tmp_path / f"{name}.json") for name in ("few", "many"))
    return drafters.make(
        "layer_skip", target, skip_attention=many, skip_mlp=many, choices=few, **keys
    )


def test_a_row_takes_the_set_that_pays(tmp_path):
    """Each set once; then the one whose tokens are accepted. The rows decide for themselves."""
    target, params = testing.tiny("llama", 0)
    drafter = two_sets(tmp_path, target, gamma=3)
    pair, rule = ModelParams(params), accept.load("chain")
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(
        target,
        drafter,
        pair,
        packed,
        lengths,
        rng.row_keys(0, 4),
        max_len=packed.shape[1] + 40,
        sampling=sampling.make_sampling(4, [0.0, 0.0, 0.8, 0.8]),
    )
    one = jax.jit(lambda state: step.speculative_step(target, drafter, rule, pair, state))
    taken, accepted = [], []
    for _ in range(10):
        taken.append(np.asarray(state.draft.kept.choice))
        state, info = one(state)
        accepted.append(np.asarray(info.accepted))
    taken, accepted = np.array(taken), np.array(accepted)
    assert (taken[0] == 0).all() and (taken[1] == 1).all()
    # Everything is accepted of a draft of the whole model.
    assert (accepted[taken == 1] == 3).all() and (accepted[taken == 0] < 3).any()
    poor = accepted[0] == 0
    assert poor.any() and (taken[2:, poor] == 1).mean() > 0.7
    assert drafter.history and not drafter.gaps


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"gamma": 2}, {"tree": "2x1"}], ids=str)
def test_exact_law_of_a_choice(tmp_path, keys):
    """Three rounds together, in which the set changes."""
    target, rule = cases.models()[0], accept.load("recursive")
    with jax.enable_x64(True):
        drafter, params = two_sets(tmp_path, target, **keys), ModelParams(cases.table(0))
        law = testing.exact_law(target, drafter, rule, params, [2, 1], 3, rounds=3)
        truth = testing.sequence_law(target, params.target, [2, 1], 3)
        assert testing.total_variation(law, truth) < 1e-12


@pytest.mark.fast
def test_errors(tmp_path):
    target = testing.tiny("llama", 0)[0]

    def refused(match, attention="", mlp="", **keys):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make("layer_skip", target, skip_attention=attention, skip_mlp=mlp, **keys)
        assert "\n" not in str(caught.value)

    refused("skip_attention has layer 2, and .* has the layers 0 to 1", attention="0-2")
    refused("skip_mlp has layer -1, and .* has the layers 0 to 1", mlp=[-1])
    refused("every attention and every feed-forward part is skipped", "0-1", "0-1")
    for wrong in ("2-1", "1,,2", "1-2-3", "-1", [1.5], [True], 5.0):
        refused("skip_mlp is .*; give layers, as in '3-6,9', or the file of a search", mlp=wrong)
    refused("skip_mlp is 'nowhere.json', and there is no such file", mlp="nowhere.json")
    (tmp_path / "skips.json").write_text('{"skip_attention": []}')
    refused("has no list skip_mlp; give the skips.json of a search", mlp=str(tmp_path))
    (tmp_path / "skips.json").write_text('{"skip_mlp": ["1"]}')
    refused("skip_mlp is \\['1'\\]", mlp=tmp_path)
    refused("choices has '1-2'; give files of searches", choices="1-2")
    refused("skip_attention is 'nowhere.json', and there is no such file", choices="nowhere.json")
    refused("gamma is 3 and a tree is given too; give one of them", gamma=3, tree="2x1")
    refused("gamma is 0; it must be a whole number >= 1", gamma=0)
    with pytest.raises(UserError, match="layer_skip needs the key 'skip_attention'"):
        drafters.make("layer_skip", target)
    with pytest.raises(UserError, match="does not give its layers; take a decoder"):
        none = target._replace(layers=None)
        drafters.make("layer_skip", none, skip_attention="0", skip_mlp="")
