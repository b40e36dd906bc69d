"""Layer skipping: nothing skipped accepts everything, the target's own cache, sets, errors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import cases
import exit_cases
import growth_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import self_speculation_skip_choice as _skip_choice
from internals import self_speculation_skip_sets as _skip_sets
from internals import self_speculation_skip_text as _skip_text

from specjax import accept, decode, drafters, rng, sampling, step, testing
from specjax.drafters.self_speculation import skip_search
from specjax.errors import UserError
from specjax.testing.laws import mapped_logits
from specjax.types import Context, ModelParams, Sublayers, Verdict

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "layer_skip": ("layer_skip", {"gamma": 2, "skip_attention": (1,), "skip_mlp": (0,)}, ()),
    "layer_skip matchness": (
        "layer_skip",
        {
            "gamma": 2,
            "control": "matchness:0.4,0.4,0.3,0.3",
            "skip_attention": (1,),
            "skip_mlp": (0,),
        },
        ("chain",),
    ),
    "layer_skip tree": (
        "layer_skip",
        {
            "control": "matchness:0.4,0.4,0.3,0.3",
            "tree": "2x1",
            "siblings": "without_replacement",
            "skip_attention": (1,),
            "skip_mlp": (0,),
        },
        (),
    ),
}

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
        pytest.param("chain", 0.0, marks=pytest.mark.slow),
        pytest.param("chain", 0.8, marks=pytest.mark.slow),
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


@pytest.mark.slow
def test_something_skipped_is_drafted_differently_and_the_text_is_the_targets():
    target, params = testing.tiny("llama", 0, layers=3)
    drafter = drafters.make("layer_skip", target, skip_attention="1", skip_mlp="0,2", gamma=3)
    state, records, lengths = decoded(target, drafter, "chain", ModelParams(params), 0.0)
    live = records.emitted > 0
    assert (records.accepted[live] < 3).any()
    plain = drafters.make("none", target)
    expected, _, _ = decoded(target, plain, "chain", ModelParams(params), 0.0)
    assert decode.outputs(state, lengths) == decode.outputs(expected, lengths)


@functools.partial(jax.jit, static_argnums=0)
def left_out(target, params, keep, text, length):
    """f[3,V]: the logits after the pending token at ``length`` - 1 and two draft tokens behind it.

    Before them, the target's own keys and values of the text i32[1,S]. A sublayer whose entry of
    ``keep`` f[2,L] is 0 has zeros in its last map: no part of the model is asked for.
    """
    block = target.apply(params, text, target.init_cache(1, 0))[1]
    cache = target.init_cache(1, 2 * text.shape[1])
    cache = target.commit(cache, block, length[None] - 1)
    tokens = jax.lax.dynamic_slice_in_dim(text, length - 1, 3, 1)
    return target.apply(skip_search.without(params, *keep), tokens, cache)[0].logits[0]


def drafted_probs(keep, params, state, row, drafted):
    """f[3,V]: the probs of the three draft tokens of a row, from ``left_out`` and its settings."""
    target, _ = exit_cases.tiny()
    text = [*exit_cases.texts_of(state)[row], *drafted]
    padded = np.zeros((1, exit_cases.LONGEST), np.int32)
    padded[0, : len(text)] = text
    length = len(text) - len(drafted)
    logits = left_out(target, params, jnp.asarray(keep), jnp.asarray(padded), jnp.asarray(length))
    prompt, probs = exit_cases.PROMPTS[row], []
    for depth, own in enumerate(np.asarray(logits)):
        new = text[len(prompt) : length + depth]
        own = mapped_logits(state.sampling.maps, row, own, prompt, new)
        weights = np.exp((own - own.max()) / float(state.sampling.temperature[row]))
        probs.append(weights / weights.sum())
    return np.array(probs)


@pytest.mark.parametrize("several", [False, True], ids=["one set", "two sets"])
def test_every_step_leaves_out_the_sublayers_of_its_row(tmp_path, several):
    """All draft tokens of several rounds of a ragged batch, with penalties and temperatures."""
    target, params = exit_cases.tiny()
    sets = [((1,), (0,)), ((0,), (1, 2))]
    for number, (attention, mlp) in enumerate(sets):
        content = {"skip_attention": attention, "skip_mlp": mlp}
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    keep = np.ones((2, 2, 3), np.float32)
    for number, layers in enumerate(sets):
        for kind in (0, 1):
            keep[number, kind, list(layers[kind])] = 0
    first, more = tmp_path / "0.json", str(tmp_path / "1.json") if several else ""
    keys = {"skip_attention": first, "skip_mlp": first, "choices": more, "gamma": 3}
    drafter, pair = drafters.make("layer_skip", target, **keys), ModelParams(params)
    settings = {"temperature": [1.0, 0.6, 1.5, 0.8], "repetition_penalty": 1.6, "vocab_size": 32}
    along = jax.jit(drafter.probs) if drafter.probs else None
    worst, taken = 0.0, []
    for state, info in exit_cases.played(drafter, pair, rounds=6 if several else 3, **settings):
        choice = np.asarray(state.draft.kept.choice) if several else np.zeros(4, int)
        taken.append(choice)
        tokens, probs = np.asarray(info.draft.tokens), np.asarray(info.draft.probs)
        for row in range(4):
            right = drafted_probs(keep[choice[row]], params, state, row, tokens[row].tolist())
            worst = max(worst, np.abs(probs[row] - right).max())
        if along is not None:
            context = Context(jnp.maximum(state.tokens, 0), state.length, state.sampling)
            first = np.asarray(along(pair, context))[np.arange(4), state.length - 1]
            worst = max(worst, np.abs(probs[:, 0] - first).max())
    assert worst < 1e-4 and several == (along is None)
    if several:
        assert any(len(set(each.tolist())) == 2 for each in taken), "the rows took the same sets"


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
    searched = {"skip_attention": [1], "skip_mlp": [5, 0], "layers": 8}
    file.write_text(json.dumps(searched))
    assert _skip_sets.layers("skip_mlp", file, 8) == read(file) == (0, 5)
    with pytest.raises(UserError, match="8 layers, and the target has 6"):
        _skip_sets.layers("skip_mlp", file, 6)
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
    assert drafter.history and not drafter.gaps and not drafter.constant_cost


@pytest.mark.fast
def test_the_next_set_has_the_highest_bound():
    """UCB1 written out for each row; a finished row, from round 15 on the last one, is frozen."""
    costs, depth, rows, draw = (0.2, 0.5, 1.0), 4, 4, np.random.default_rng(0)
    setup = _skip_choice.Setup((None,) * 3, costs, depth)
    lengths = SimpleNamespace(length=jnp.ones(rows, jnp.int32))
    state = _skip_choice._init(setup, None, lengths, None, 0)
    # How often a draft token of each set is accepted.
    chances = np.array([[0.1, 0.5, 0.9], [0.8, 0.5, 0.9], [0.3, 0.9, 0.9], [0.5, 0.5, 0.5]])
    seen = [[[] for _ in costs] for _ in range(rows)]
    for number in range(40):
        choice = np.asarray(state.choice)
        accepted = (draw.random((rows, depth)) < chances[np.arange(rows), choice][:, None]).sum(1)
        count = accepted + 1
        count[-1] *= number < 15
        path = np.where(np.arange(depth) < accepted[:, None], np.arange(depth), -1)
        verdict = Verdict(jnp.zeros((rows, depth + 1), jnp.int32), jnp.asarray(count), path)
        before, state = state, _skip_choice._commit(setup, None, state, None, verdict, None)
        for row in range(rows):
            if not count[row]:
                own = jax.tree.map(lambda x: np.asarray(x)[row], (before, state))  # noqa: B023
                jax.tree.map(np.testing.assert_array_equal, *own)
                continue
            cost = 1 + depth * costs[choice[row]]
            seen[row][choice[row]].append((1 + accepted[row]) / cost)
            total = sum(map(len, seen[row]))
            bounds = [
                np.mean(own) + 0.3 * np.sqrt(2 * np.log(total) / len(own)) if own else np.inf
                for own in seen[row]
            ]
            assert bounds[int(state.choice[row])] > max(bounds) - 1e-5 or max(bounds) == np.inf
            assert max(bounds) < np.inf or not seen[row][int(state.choice[row])]
    assert len({int(np.argmax([len(own) for own in row])) for row in seen}) > 1


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
    for wrong in (5, [1], {"a": 1}):
        refused("choices is .*; give files of searches, separated by commas", choices=wrong)
    for name in ("nowhere.json", Path("nowhere.json"), ["nowhere.json"]):
        refused("skip_attention is .nowhere.json., and there is no such file", choices=name)
    refused(
        "layer_skip was given gamma=3, a chain, and tree='2x1'; give one of them",
        gamma=3,
        tree="2x1",
    )
    refused("gamma is 0; it must be a whole number >= 1", gamma=0)
    with pytest.raises(UserError, match="layer_skip needs the key 'skip_attention'"):
        drafters.make("layer_skip", target)
    with pytest.raises(UserError, match="does not give its layers; take a decoder"):
        none = target._replace(layers=None)
        drafters.make("layer_skip", none, skip_attention="0", skip_mlp="")
