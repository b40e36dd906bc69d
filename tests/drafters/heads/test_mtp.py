"""Heads for multi-token prediction: the trunk, their caches, what each predicts, files."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import cases
import eagle_cases
import growth_cases
import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import TARGET
from mutants.networks import with_stepper
from safetensors.numpy import load_file

from specjax import drafters, step, testing
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import lm, rope
from specjax.models.rope import Rope
from specjax.models.transformer_config import Experts
from specjax.testing.claims import widen
from specjax.types import ModelParams

pytestmark = pytest.mark.xdist_group("mtp heads")

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "mtp": ("mtp", {"heads": 2, "siblings": "iid", "control": "threshold:0.4"}, ("chain",)),
    "mtp tree": ("mtp", {"heads": 2, "tree": "best_first", "nodes": 4}, ()),
    "mtp fixed": ("mtp", {"heads": 2, "tree": "2x1", "siblings": "without_replacement"}, ()),
}
VOCAB = eagle_cases.VOCAB
SIZES = {"layers": 3, "width": 16, "vocab_size": VOCAB}
# A window of the last layer that is shorter than the texts.
WINDOWED = dataclasses.replace(testing.tiny_config(**SIZES), windows=(None, None, 5))


@functools.cache
def windowed():
    """A target whose last layer has a window."""
    return lm.from_config(WINDOWED), eagle_cases.TABLE


def of_family(family):
    target, params = windowed() if family == "window" else testing.tiny(family, **SIZES)
    start = drafters.make("mtp", target, heads=2).training.start
    return target, params, start(params, jax.random.key(0))


FAMILIES = ["window", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gpt_neox", "gemma2"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_the_last_layer_gives_the_logits_of_the_target(family):
    """So the trunk is all layers but the last; with all layers in the trunk the logits differ."""
    target, params, copies = of_family(family)
    tokens = shared.text(2, 13, VOCAB)
    logits = jax.jit(lambda params: lm.forward(target, params, tokens[:, :-1]).logits)(params)
    logits = np.repeat(np.asarray(logits)[:, :, None], 2, 2)

    def read(**changes):
        heads = shared.heads_of("mtp", target, params=copies)._replace(**changes)
        with mock.patch.object(shared, "heads_of", lambda *args, **keys: heads):
            tapped = target.with_taps(heads.taps)
            return shared.logits_along("mtp", tapped, params, copies, tokens)

    np.testing.assert_allclose(read(), logits, rtol=1e-4, atol=1e-4)
    assert np.abs(read(taps=(2,)) - logits).max() > 0.1


def made(target, params, **keys):
    drafter = cases.random_heads("mtp", target, params, scale=0.25, heads=3, **keys)
    return drafter, ModelParams(params, drafter.init_params(None))


@functools.partial(jax.jit, static_argnums=0)
def begun(drafter, params, state):
    return eagle_cases.stepper_of(drafter).begin(params, step.context_of(state), state.draft.kept)


def largest_difference(target, change=lambda drafter: drafter):
    """(of what a round begins with and a fresh prefill; of the caches; rounds and rows seen)."""
    drafter, params = made(target, eagle_cases.TABLE, tree="2x2x1", siblings="without_replacement")
    wrong, worst, caches, seen = change(drafter), 0.0, 0.0, 0
    with mock.patch.object(eagle_cases, "TARGET", target):
        for state, _, fresh in eagle_cases.rounds(wrong, "tree", params):
            ours, right = begun(wrong, params, state), begun(drafter, params, fresh)
            assert (ours.ready == right.ready).all()
            alive = ~np.asarray(state.done) & np.asarray(right.ready)
            seen += alive.sum()
            error = np.abs(np.subtract(ours.memory, right.memory)).max((1, 2, 3))
            worst = max(worst, float(error[alive].max(initial=0)))
            one, other = ours.kept.cache, right.kept.cache
            lengths = np.asarray(state.length) - 1
            assert len(one.k) == 3 and (np.asarray(one.length) == lengths)[alive].all()
            for a, b in zip((*one.k, *one.v), (*other.k, *other.v), strict=True):
                # Of a ring every slot is in use once the text is longer.
                used = np.arange(a.shape[2]) < lengths[:, None]
                difference = np.abs(np.subtract(a, b)).max((1, 3))
                caches = max(caches, float(difference[used & alive[:, None]].max(initial=0)))
    return worst, caches, seen


@pytest.mark.parametrize("kind", ["window", pytest.param("full", marks=pytest.mark.slow)])
def test_a_round_begins_as_after_a_fresh_prefill(kind):
    """Ragged rows, greedy and sampled, that end at EOS and at limits.

    Every head has keys and values of all committed tokens, whether or not it was used.
    """
    target = windowed()[0] if kind == "window" else eagle_cases.TARGET
    worst, caches, seen = largest_difference(target)
    assert worst < 1e-4 and caches < 1e-4 and seen >= 12, (worst, caches, seen)


def _newest_slots_lost(old, new):
    """Of several tokens of a round the caches get the first alone."""
    slots = jnp.arange(new.cache.k[0].shape[2])
    lost = (slots > old.cache.length[:, None]) & (slots < new.cache.length[:, None])
    zeroed = [
        tuple(jnp.where(lost[:, None, :, None], 0, x) for x in each)
        for each in (new.cache.k, new.cache.v)
    ]
    return new.replace(cache=new.cache.replace(k=zeroed[0], v=zeroed[1]))


def _stale_feature(old, new):
    """The heads predict from the hidden state of the round before."""
    return new.replace(feature=jnp.where(old.known[:, None], old.feature, new.feature))


def with_commit(change):
    """``change(old, new)`` gives what is kept after a verdict."""

    def stepper(right):
        def commit(params, kept, *rest):
            return change(kept, right.commit(params, kept, *rest))

        return right._replace(commit=commit)

    return lambda drafter: with_stepper(drafter, stepper)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [_newest_slots_lost, _stale_feature])
def test_wrong_commits_are_detected(mutant):
    worst = largest_difference(eagle_cases.TARGET, with_commit(mutant))[0]
    assert worst > 1e-2


def test_what_each_head_predicts():
    """On text that counts head k learns the token k + 1 further; from later labels it does not."""
    shared.assert_learns("mtp", heads=3)


def test_a_draft_does_not_depend_on_its_pending_token():
    """It reads the text before: another pending token changes nothing, another one before does."""
    drafter, params = made(eagle_cases.TARGET, eagle_cases.TABLE)
    texts = jnp.asarray([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 4], [1, 2, 3, 4]])
    tokens = jnp.pad(texts, ((0, 0), (0, eagle_cases.SIZE - 4)), constant_values=-1)
    state = eagle_cases.prefilled(drafter, params, tokens, jnp.full((4,), 4))
    memory = np.asarray(begun(drafter, params, state).memory)
    assert memory.shape == (4, 1, 3, VOCAB)
    np.testing.assert_allclose(memory[1], memory[0], atol=1e-5)
    assert np.abs(memory[2] - memory[0]).max((0, 2)).min() > 1e-2


LAWS = {
    "fixed": ({"heads": 2, "tree": "2x1", "siblings": "without_replacement"}, "traversal"),
    "chain": ({"heads": 2, "siblings": "iid", "control": "threshold:0.4"}, "block"),
    "best_parents": ({"heads": 2, "tree": "best_parents", "nodes": 4, "top_k": 2}, "match"),
}


@pytest.mark.slow
@pytest.mark.parametrize("label", LAWS)
def test_exact_law(label):
    """Enumerated in float64."""
    keys, rule = LAWS[label]
    with jax.enable_x64(True):
        table, target = cases.table(0), testing.tabular(3)
        drafter = cases.random_heads("mtp", target, table, **keys)
        params = jax.tree.map(widen, ModelParams(table, drafter.init_params(None)))
        for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
            error = growth_cases.law_error(drafter, rule, target, params, **settings)
            assert error < growth_cases.EXACT


@pytest.mark.slow
def test_forecast_is_decoded():
    target, table = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)
    drafter = cases.random_heads("mtp", target, table, heads=3, tree="3x2x1")
    shared.assert_forecast_is_decoded(drafter, target, table, shared.PROMPTS * 300, 24)


def test_files(tmp_path):
    shared.assert_files_round_trip("mtp", tmp_path / "llama", heads=2)
    # A layer with all parts that a layer can have, but for a norm of queries and keys.
    target, _, copies = of_family("gpt_neox")
    head_files.write(tmp_path / "neox", "mtp", copies, {"head_dim": 4})
    read = drafters.make("mtp", target, model=tmp_path / "neox")
    jax.tree.map(np.testing.assert_array_equal, read.init_params(None), copies)
    facts = dict(drafters.make("mtp", target).training.facts)
    assert set(facts) == {"head_dim", "rms_norm_eps", "rope_theta", "num_hidden_layers"}
    for key, own in facts.items():
        head_files.write(tmp_path / "other", "mtp", copies, facts | {key: 2 * own})
        with pytest.raises(UserError, match=f"have {key} {2 * own}, and this target has {own};"):
            drafters.make("mtp", target, model=tmp_path / "other")
    other = r"layers\.0\.attention\.k\.kernel of the mtp network is \[16, 16\]"
    with pytest.raises(UserError, match=other):
        drafters.make("mtp", eagle_cases.TARGET, model=tmp_path / "neox")


def interleaved(x, angle):
    """Meta's rotation of [T,heads,d]: pairs of neighbours as complex numbers."""
    pairs = np.ascontiguousarray(x).view(np.complex128) * np.exp(1j * angle)[:, None]
    return pairs.view(np.float64)


def test_the_layout_of_the_release(tmp_path):
    """The scores of Meta's attention, computed from the file, are those of our attention."""
    drafter = cases.random_heads("mtp", TARGET, eagle_cases.TABLE, heads=2)
    params, facts = drafter.init_params(None), dict(drafter.training.facts)
    head_files.write(tmp_path / "meta", "mtp", params, facts, layout="meta")
    read = drafters.make("mtp", TARGET, model=tmp_path / "meta")
    jax.tree.map(np.testing.assert_array_equal, read.init_params(None), params)
    stored = load_file(tmp_path / "meta" / "mtp_heads.safetensors")
    assert "extra_heads.1.feed_forward.w3.weight" in stored
    x = np.random.default_rng(0).normal(size=(5, 16))
    angle = np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, 4, 2) / 4)

    def of_file(name, heads):
        weight = stored[f"extra_heads.0.attention.{name}.weight"].astype(np.float64)
        return interleaved((x @ weight.T).reshape(5, heads, 4), angle)

    def ours(name, heads):
        kernel = np.asarray(params["layers"]["0"]["attention"][name]["kernel"], np.float64)
        y = (x @ kernel).reshape(1, 5, heads, 4)
        return np.asarray(rope.rotate(jnp.asarray(y), jnp.asarray(angle)[None], Rope(10000.0, 4)))[
            0
        ]

    scores, expected = (
        np.einsum("thd,shd->hts", queries, np.repeat(keys, 2, 1))
        for queries, keys in ((ours("q", 4), ours("k", 2)), (of_file("wq", 4), of_file("wk", 2)))
    )
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    _, _, copies = of_family("gpt_neox")
    with pytest.raises(UserError, match="the layout meta has no name for input_layernorm.bias"):
        head_files.write(tmp_path / "neox", "mtp", copies, facts, layout="meta")
    (tmp_path / "meta" / "config.json").unlink()
    with pytest.raises(UserError, match="the width of an attention head is missing; give params"):
        drafters.make("mtp", TARGET, model=tmp_path / "meta")
    for text, message in (
        ("{", "is not valid JSON"),
        ("[16, 4]", "is not valid JSON"),
        ('{"dim": 16}', "params.json: n_heads is None"),
        ('{"dim": 16, "n_heads": 0}', "n_heads is 0; it must be"),
        ('{"dim": 16, "n_heads": 16}', "must be an even number"),
    ):
        (tmp_path / "meta" / "params.json").write_text(text)
        with pytest.raises(UserError, match=message):
            drafters.make("mtp", TARGET, model=tmp_path / "meta")
    (tmp_path / "meta" / "params.json").write_text('{"dim": 16, "n_heads": 4}')
    again = drafters.make("mtp", TARGET, model=tmp_path / "meta")
    jax.tree.map(np.testing.assert_array_equal, again.init_params(None), params)


@pytest.mark.fast
def test_foreign_parameters_are_refused():
    target = testing.tabular(shared.VOCAB)
    drafter = cases.random_heads("mtp", target, cases.table(0, shared.VOCAB), heads=2)
    shared.assert_foreign_is_refused("mtp", target, drafter.init_params(None))


@pytest.mark.fast
def test_keys():
    target = eagle_cases.TARGET
    drafter = drafters.make("mtp", target)
    assert (drafter.nodes, drafter.siblings, drafter.taps) == (3, "chain", (1,))
    assert drafters.make("mtp", target, heads=5).nodes == 5
    assert drafters.make("mtp", target, tree="best_first", nodes=9).siblings == "deterministic"

    def refused(match, target=target, **keys):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make("mtp", target, **keys)
        assert "\n" not in str(caught.value), caught.value

    with pytest.raises(UserError, match="mtp has no parameters yet; give model="):
        drafter.init_params(None)
    refused("the tree is 4 levels deep and mtp drafts at most 3 tokens ahead", tree="chain:4")
    refused("heads is -1", heads=-1)
    one = testing.tiny(layers=1, width=16, vocab_size=VOCAB)[0]
    refused("reads the output of the target's last layer but one, and lm has 1 layer", one)
    refused(
        "reads hidden states of layers of its target, and lm gives none",
        target._replace(tapping=None),
    )
    refused("reads the features of its target, and lm has none", target._replace(embed=None))
    routed = Experts(4, 2, 8, layers=(2,))
    experts = lm.from_config(dataclasses.replace(WINDOWED, experts=routed))
    refused("which has experts; such layers are not supported", experts)
    params = made(target, eagle_cases.TABLE)[0].init_params(None)
    refused("heads is 2, and the given mtp has 3; leave it out", params=params, heads=2)
