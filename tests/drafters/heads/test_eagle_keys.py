"""The keys of EAGLE: defaults, files, nested drafters, and errors of one line."""

from __future__ import annotations

import dataclasses
import functools
import json

import cases
import eagle_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import TABLE, TARGET
from flax.traverse_util import flatten_dict
from internals import heads_eagle_shape as _eagle_shape
from internals import nested_stages as _stages

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import lm
from specjax.models.transformer_config import Experts
from specjax.types import Draft, Drafter, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "eagle3": (
        "eagle3",
        {"nodes": 4, "depth": 2, "top_k": 2, "draft_ids": (0, 2)},
        ("deterministic",),
    ),
    "eagle3 chain": (
        "eagle3",
        {"gamma": 2, "siblings": "iid", "control": "threshold:0.4", "norm_output": True},
        (),
    ),
    "eagle3 tree": (
        "eagle3",
        {"tree": "2x1", "siblings": "iid", "draft_ids": (0, 2), "fc_norm": True, "layers": 2},
        (),
    ),
}


def random(name, **keys):
    return cases.random_heads(name, TARGET, TABLE, scale=0.25, **keys)


@pytest.mark.fast
def test_defaults():
    for name in ("eagle", "eagle3"):
        drafter = drafters.make(name, TARGET)
        assert (drafter.nodes, drafter.longest, drafter.siblings) == (32, 5, "deterministic")
        assert drafter.features and not drafter.gaps and drafter.whole
        chain = drafters.make(name, TARGET, gamma=4)
        assert (chain.nodes, chain.siblings) == (4, "chain")
        with pytest.raises(UserError, match=f"{name} has no parameters yet; give model="):
            drafter.init_params(None)
    assert drafters.make("eagle", TARGET).taps == ()
    taps = {1: (0,), 2: (0, 1), 3: (0, 1, 2), 5: (0, 2, 4), 8: (1, 3, 4), 32: (1, 15, 28)}
    for layers, expected in taps.items():
        assert _eagle_shape.default_taps(layers) == expected
        assert expected == tuple(sorted(set(expected)))
    assert drafters.make("eagle3", TARGET).taps == (0, 1, 2)
    for taps in ("2,0", [2, 0], np.array([2, 0])):
        assert drafters.make("eagle3", TARGET, taps=taps).taps == (2, 0)
    # All tokens as a draft vocabulary are no draft vocabulary.
    every = drafters.make("eagle3", TARGET, draft_ids=range(shared.VOCAB))
    assert shared.network_of(every).ids is None


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp_module", "falcon", "block_head"])
def test_new_networks_have_the_shape_of_the_targets_layers(name):
    """Four heads of width 8, two key heads; at another head width as many as fit."""

    def shape(experts=None, **keys):
        config = testing.tiny_config(layers=5)
        config = dataclasses.replace(config, intermediate_size=20, experts=experts)
        start = drafters.make(name, lm.from_config(config), **keys).training.start
        key = jax.eval_shape(lambda: jax.random.key(0))
        params = jax.eval_shape(functools.partial(lm.init_params, config), key)
        leaves = flatten_dict(jax.eval_shape(start, params, key))
        found = {path[-4:]: leaf.shape for path, leaf in leaves.items() if "0" in path[-4:]}
        found |= {("0", *path[-3:]): leaf.shape for path, leaf in leaves.items()}
        widths = [found["0", "attention", kind, "kernel"][1] for kind in "qk"]
        return *widths, found["0", "mlp", "up", "kernel"][1]

    assert shape() == (32, 16, 20)
    assert shape(heads=2) == (16, 8, 20)
    assert shape(head_dim=16, inner=8) == (32, 16, 8)
    assert shape(kv_heads=4) == (32, 32, 20)
    # The experts' inner width is not that of a network without experts.
    assert shape(Experts(4, 2, 20, layers=(0,)))[2] == 8 * 11


@pytest.mark.fast
def test_errors_in_keys():
    def refused(match, name, target=TARGET, **keys):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make(name, target, **keys)
        assert "\n" not in str(caught.value), caught.value

    refused("reads the layers \\[0, 3\\], and the target's are 0..2", "eagle3", taps="0,3")
    refused("taps is 'low'; give the numbers of layers", "eagle3", taps="low")
    refused("taps is 3; give the numbers of layers", "eagle3", taps=np.array(3))
    refused("taps is 0.5; it must be a whole number", "eagle3", taps=np.array([0.5]))
    refused("taps is \\[0\\]; it must be a whole number", "eagle3", taps=np.array([[0]]))
    refused("each layer may be named once", "eagle3", taps=(1, 1))
    refused("shift is 2; it must be a number from 0 to 1", "eagle", shift=2)
    refused("heads is 4 and kv_heads 3; heads must be a multiple", "eagle", heads=4, kv_heads=3)
    refused("head_dim is 3; rotary positions need an even number", "eagle", head_dim=3)
    refused("layers is -1", "eagle", layers=-1)
    refused("qk_norm is 1; it must be True or False", "eagle", qk_norm=1)
    refused("norm_output is 'no'; it must be True or False", "eagle3", norm_output="no")
    refused("nodes is 3 and depth is 4", "eagle", nodes=3, depth=4)
    refused("top_k is 9 and the vocabulary has 8", "eagle", top_k=9)
    refused("top_k is 3 and the vocabulary has 2", "eagle3", top_k=3, draft_ids=(1, 4))
    refused("has the token 8, outside the vocabulary of 8", "eagle3", draft_ids=(1, 8))
    refused("has the token -1, outside the vocabulary", "eagle3", draft_ids=(-1, 2))
    refused("the draft vocabulary must ascend", "eagle3", draft_ids=(3, 1))
    refused("the draft vocabulary must ascend", "eagle3", draft_ids=(1, 1))
    refused("draft_ids must be a list of token ids", "eagle3", draft_ids=(0.5, 1.0))
    refused(
        "draft_ids has 2 tokens and the network's head 3", "eagle3", draft_ids=(1, 2), draft_vocab=3
    )
    refused("draft_vocab is 4, and there are no draft_ids", "eagle3", draft_vocab=4)
    recorded = TARGET._replace(tapping=None, layers=None)
    refused("reads hidden states of layers of its target, and lm gives none", "eagle3", recorded)
    without = TARGET._replace(embed=None)
    for name in ("eagle", "eagle3"):
        refused(f"{name} reads the features of its target, and lm has none", name, without)
        refused("was given gamma=2, a chain, and nodes=4", name, gamma=2, nodes=4)
        refused("gamma is 0; it must be a whole number >= 1", name, gamma=0)
        assert drafters.make(name, TARGET, gamma=None).nodes == 32


@pytest.mark.fast
@pytest.mark.parametrize("bias", [False, True])
def test_a_new_network_of_eagle_may_have_no_bias(bias):
    training = drafters.make("eagle", TARGET, fc_bias=bias).training
    leaves = jax.eval_shape(training.start, TABLE, jax.random.key(0))
    assert ("bias" in leaves["fc"]) == bias
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), leaves)
    assert drafters.make("eagle", TARGET, params=params).training is not None


@pytest.mark.fast
def test_errors_in_parameters():
    """Those of another network, of another target, and any leaf that is wrong."""
    for name in ("eagle", "eagle3"):
        params = random(name).init_params(None)

        def refused(match, params, target=TARGET, name=name, **keys):
            with pytest.raises(UserError, match=match) as caught:
                drafters.make(name, target, params=params, **keys)
            assert "\n" not in str(caught.value), caught.value

        foreign = f"not those of {name}"
        other_target = "made for this target|give the parameters of one"
        for wrong in ({}, [], 3.0, {0: np.zeros(3)}):
            refused(foreign, wrong)
        refused(foreign, params | {"more": np.zeros(3)})
        leaves, tree = jax.tree.flatten(params)
        for at, leaf in enumerate(leaves):
            for shape in ((*leaf.shape[:-1], leaf.shape[-1] + 2), ()):
                changed = [
                    np.zeros(shape, np.float32) if i == at else x for i, x in enumerate(leaves)
                ]
                with pytest.raises(UserError):
                    drafters.make(name, TARGET, params=jax.tree.unflatten(tree, changed))
        wider = testing.tiny(layers=3, width=32, vocab_size=shared.VOCAB)[0]
        refused(other_target, params, wider)
        refused("layers is 2, and the given .* has 1", params, layers=2)
        refused("qk_norm is True, and the given .* has False", params, qk_norm=True)
        if name == "eagle":
            refused("fc_bias is False, and the given .* has True", params, fc_bias=False)
        refused("has a dtype, in which files are read", params, dtype=jnp.float32)
    more = testing.tiny(layers=3, width=16, vocab_size=shared.VOCAB + 1)[0]
    refused("head has 8 tokens and the vocabulary 9; give draft_ids", params, more)
    refused("fc_norm is True, and the given .* has False", params, fc_norm=True)
    refused("reads features of width 48 in total, and 2 layers", params, taps="0,1")


def test_files_hold_what_shapes_do_not_show(tmp_path):
    target = TARGET._replace(vocabulary="words")
    for number, (name, keys) in enumerate(shared.NETWORKS.values()):
        written = random(name, **keys)
        params, path = written.init_params(None), tmp_path / str(number)
        head_files.write(path, name, params, dict(written.training.facts), "words")
        read = drafters.make(name, target, model=path)
        assert read.taps == written.taps
        assert dict(read.training.facts) == dict(written.training.facts)
        jax.tree.map(np.testing.assert_array_equal, read.init_params(None), params)
        ids = (shared.network_of(each).ids for each in (read, written))
        np.testing.assert_array_equal(*ids)
        with pytest.raises(UserError, match="layers is 3, and the given .* has"):
            drafters.make(name, target, model=path, layers=3)
        if name == "eagle3":
            with pytest.raises(UserError, match="width is 32, and the given .* has 16"):
                drafters.make(name, target, model=path, width=32)
    wider = testing.tiny(layers=3, width=32, vocab_size=shared.VOCAB)[0]
    for number, name in ((0, "eagle"), (3, "eagle3")):
        with pytest.raises(UserError, match="features of width 16, and the target has 32"):
            drafters.make(name, wider, model=tmp_path / str(number))
    with pytest.raises(UserError, match="taps is .0, 1., and the given eagle3 has"):
        drafters.make("eagle3", target, model=tmp_path / "3", taps="0,1")
    flat = testing.tiny(layers=2, width=16, vocab_size=shared.VOCAB)[0]
    with pytest.raises(UserError, match="the target's are 0..1; give other taps"):
        drafters.make("eagle3", flat, model=tmp_path / "3")


def test_files_with_two_meanings_are_named(tmp_path, recwarn):
    """A file of SpecForge with norm_output, which older versions wrote for plain EAGLE-3."""
    written = random("eagle3")
    facts = dict(written.training.facts)
    head_files.write(tmp_path, "eagle3", written.init_params(None), facts, layout="specforge")
    drafters.make("eagle3", TARGET, model=tmp_path)
    assert not recwarn.list
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["specjax"]["norm_output"]
    path.write_text(json.dumps(config | {"norm_output": True}))
    with pytest.warns(UserWarning, match="norm_output: true is plain EAGLE-3 \\(SpecForge before"):
        read = drafters.make("eagle3", TARGET, model=tmp_path)
    assert dict(read.training.facts)["norm_output"] is False


def reads_taps(layer: int) -> Drafter:
    """Drafts a token that depends on one tap, in texts of even or odd length; may wait."""

    def token(tap):
        return jnp.argmax(tap, -1).astype(jnp.int32)

    def propose(params, keys, context, state):
        valid = (context.length % 2 == layer % 2) & (context.length > 1)
        return Draft(token(context.taps[0])[:, None], valid[:, None]), state

    def update(params, state, draft, verdict, out):
        newest = jnp.maximum(verdict.path[:, 0] + 1, 0)[:, None, None]
        last = jnp.take_along_axis(out.taps[0], newest, 1)[:, 0]
        return jnp.where(verdict.count > 0, token(last), state)

    return Drafter(
        init_params=lambda key: {},
        init=lambda params, context, out, slots: token(context.taps[0]),
        propose=propose,
        update=update,
        nodes=1,
        name=f"reads tap {layer}",
        features=True,
        taps=(layer,),
    )


def test_inner_drafters_see_their_own_taps():
    """Each of two drafters that read other layers, and one that reads none."""
    target, table = testing.tabular(3), cases.table(0)
    stages = [reads_taps(2), reads_taps(1), drafters.make("prompt_lookup", target, gamma=2)]
    outer = drafters.make("escalate", target, drafters=stages)
    assert outer.taps == (1, 2) and outer.features
    params = ModelParams(table, outer.init_params(None))
    packed, lengths = decode.pack_prompts([[2, 1, 0], [0], [1, 2]])
    keys = {"max_len": 12, "sampling": sampling.make_sampling(3, 0.0)}
    state = decode.prefill(target, outer, params, packed, lengths, rng.row_keys(0, 3), **keys)
    state, _ = decode.generate(target, outer, accept.load("match"), params, state, max_steps=12)
    decode.check(state)
    out, _ = decode.feed(
        target.with_taps((1, 2)),
        table,
        state.tokens[:, :12],
        state.length,
        target.init_cache(3, 12),
    )
    for row in range(3):
        newest = int(state.length[row]) - 2
        for tap, expected in zip(state.taps, out.taps, strict=True):
            np.testing.assert_array_equal(tap[row], expected[row, newest])
    assert _stages.taps(stages) == (1, 2)


@pytest.mark.slow
def test_eagle_inside_other_drafters():
    inner = random("eagle3", gamma=2)
    with pytest.raises(UserError, match="eagle3 must take part in every round"):
        drafters.make("escalate", TARGET, drafters=[inner])
    outer = drafters.make("controlled", TARGET, drafters=[inner], rate=0.7)
    assert outer.taps == inner.taps
    params = ModelParams(TABLE, outer.init_params(None))
    packed, lengths = decode.pack_prompts(shared.PROMPTS)
    state = decode.prefill(
        TARGET,
        outer,
        params,
        packed,
        lengths,
        rng.row_keys(0, 4),
        max_len=20,
        sampling=sampling.make_sampling(4, 0.0),
    )
    state, records = decode.generate(
        TARGET, outer, accept.load("chain"), params, state, max_steps=20
    )
    decode.check(state)
    assert bool(state.done.all()) and int(records.accepted.sum()) > 10


def test_a_mask_token_without_masks_is_not_read(tmp_path):
    """Some files name one although the network drafts one token in a pass."""
    target, params = testing.tiny("llama", 0, vocab_size=7, layers=3)
    drafter = drafters.make("eagle3", target)
    own = drafter.training.start(params, jax.random.key(0))
    head_files.write(tmp_path, "eagle3", own, dict(drafter.training.facts))
    config = json.loads((tmp_path / "config.json").read_text()) | {"mask_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert drafters.make("eagle3", target, model=tmp_path).nodes == drafter.nodes
    with pytest.raises(UserError, match="mask_id is 5 and has no effect"):
        drafters.make("eagle3", target, model=tmp_path, mask_id=5)
