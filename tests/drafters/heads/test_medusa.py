"""Medusa: the formula of a head, forecasts, the output law of sampled drafts, errors."""

from __future__ import annotations

import dataclasses

import cases
import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import silu
from marks import by_default

from specjax import accept, drafters, testing
from specjax.drafters import files
from specjax.drafters.files import head_files
from specjax.drafters.heads.multi import medusa
from specjax.errors import UserError
from specjax.models import lm
from specjax.testing import conformance
from specjax.testing.models import tiny_config
from specjax.types import ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "medusa": ("medusa", {"heads": 2, "tree": "2x1"}, ("deterministic",)),
}

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)


def plain(params):
    """W2 (h + SiLU(W1 h + b)), with one h + SiLU(W1 h + b) per residual block."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def read(feature, since):
        head = len(since) - 1
        for kernel, bias in zip(
            params["block"]["kernel"][head], params["block"]["bias"][head], strict=True
        ):
            feature = feature + silu(feature @ kernel + bias)
        return feature @ params["head"]["kernel"][head] if "head" in params else feature

    return read


@pytest.mark.fast
@pytest.mark.parametrize("own_head", [True, False])
def test_forward_is_the_formula(own_head):
    params = cases.random_heads("medusa", TARGET, TABLE, heads=3, layers=2).init_params(None)
    if not own_head:
        del params["head"]  # the target's LM head is used, here the identity
    tokens = shared.text()
    result = shared.logits_along("medusa", TARGET, TABLE, params, tokens)
    features = shared.features_of(TARGET, TABLE, tokens)
    expected = shared.expected_along(plain(params), features, tokens, 3)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.fast
def test_new_heads_repeat_the_target():
    model, params = testing.tiny(layers=1, width=16)
    fresh = drafters.make("medusa", model).training.start(params, jax.random.key(0))
    tokens = shared.text(vocab=32)
    result = shared.logits_along("medusa", model, params, fresh, tokens)
    features = jnp.asarray(shared.features_of(model, params, tokens), jnp.float32)
    expected = np.repeat(np.asarray(model.unembed(params, features))[:, :, None], 4, 2)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "shape", by_default([{}, {"siblings": "iid"}, {"tree": "3x2x1"}], [{"siblings": "iid"}])
)
def test_forecast_is_decoded(shape):
    drafter = cases.random_heads("medusa", TARGET, TABLE, heads=3, **shape)
    shared.assert_forecast_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


def test_it_learns_and_not_from_wrong_labels():
    shared.assert_learns("medusa", heads=3)


@pytest.mark.slow  # the same code as in the sampled cases of conformance
@pytest.mark.parametrize("tree", ["", "2x1"])
def test_exact_law_of_sampled_drafts(tree):
    """Drawn from the heads' probabilities: a chain, and siblings without replacement.

    Other tests have the deterministic tree.
    """
    target, table = testing.tabular(3), cases.table(0)
    drafter = cases.random_heads(
        "medusa", target, table, heads=2, tree=tree, siblings="without_replacement"
    )
    rule = accept.load("recursive" if tree else "chain")
    params = ModelParams(table, drafter.init_params(None))
    result = conformance.check_law(
        target, drafter, rule, params, cases.PROMPTS[:2], temperature=0.8
    )
    assert result.passed, result


def refused(match, target=TARGET, **keys):
    with pytest.raises(UserError, match=match):
        drafters.make("medusa", target, **keys).init_params(None)


@pytest.mark.fast
def test_errors_in_keys():
    params = cases.random_heads("medusa", TARGET, TABLE, heads=3).init_params(None)
    refused("medusa has no parameters yet; give model=, a directory of trained ones")
    refused(
        "the tree is 4 levels deep and medusa drafts at most 3 tokens ahead; take a flatter one",
        params=params,
        tree="2x1x1x1",
    )
    refused("heads is 2, and the given medusa has 3; leave it out", params=params, heads=2)
    refused("layers is 2, and the given medusa has 1; leave it out", params=params, layers=2)
    refused("heads is -1; it must be a whole number >= 0", heads=-1)
    kinds = "without_replacement, iid, top_k"
    refused(f"siblings is 'beam'; it must be one of {kinds}", params=params, siblings="beam")
    refused("search is 'best'; it must be one of optimal, greedy", params=params, search="best")
    refused("has no measured accuracies to search a tree of 9 nodes with", params=params, nodes=9)
    refused("a tree and nodes=9; give one of them", params=params, tree="2x1", nodes=9)
    for tree in ({}, {"tree": "2x1"}):
        refused(
            "search is 'greedy', and no tree is searched for; give nodes",
            params=params,
            search="greedy",
            **tree,
        )
    refused(
        "medusa has a dtype, in which files are read, and no files",
        params=params,
        dtype=jnp.float32,
    )
    shared.assert_foreign_is_refused("medusa", TARGET, params)
    refused("7 siblings and the vocabulary 5 tokens", params=params, tree="7x1")
    refused(
        "reads the features of its target, and tabular has none",
        TARGET._replace(embed=None),
        params=params,
    )


@pytest.mark.fast
def test_keys_that_heads_share():
    """They are declared in one place; a direct call takes them as well."""
    assert medusa.make(TARGET, tree="2x2", heads=3).nodes == 6
    assert medusa.make(TARGET, gamma=2, heads=3).nodes == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'block'"):
        medusa.make(TARGET, block=3)
    refused("drafter medusa does not take the key 'block'; it takes .*layers.*tree.*", block=3)
    refused(
        "gamma is 4, and medusa drafts at most 3 tokens ahead; give at most 3", gamma=4, heads=3
    )
    refused("medusa was given gamma=2, a chain, and nodes=2; give one of them", gamma=2, nodes=2)


@pytest.mark.fast
def test_errors_in_files(tmp_path):
    params = cases.random_heads("medusa", TARGET, TABLE, heads=3).init_params(None)
    files = tmp_path / "heads"
    head_files.write(files, "medusa", params, {})
    refused("give one of them", params=params, model=files)
    refused(
        "made for features of width 5, and the target has 6; use heads that were trained for",
        testing.tabular(6),
        model=files,
    )
    refused(
        "made for a vocabulary of 5, and the target has 6",
        TARGET._replace(vocab_size=6),
        model=files,
    )
    target = shared.assert_files_round_trip("medusa", tmp_path / "more", heads=3, layers=2)
    other = target._replace(vocabulary="other words")
    refused("was trained for a target with other tokens", other, model=tmp_path / "more")
    refused("no medusa heads", model=tmp_path)


@pytest.mark.fast
def test_dtype_is_that_of_the_parameters(tmp_path):
    params = cases.random_heads("medusa", TARGET, TABLE, heads=2).init_params(None)
    head_files.write(tmp_path, "medusa", params, {})
    for dtype, expected in ((None, "float32"), ("bfloat16", "bfloat16"), (jnp.float32, "float32")):
        read = drafters.make("medusa", TARGET, model=tmp_path, dtype=dtype).init_params(None)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(read)} == {expected}
    # A configuration cannot give them.
    assert not {"dtype", "params"} & set(drafters.keys())


@pytest.mark.fast
@pytest.mark.parametrize("search", ["optimal", "greedy"])
def test_no_more_siblings_than_tokens(tmp_path, search):
    """Accuracies of more ranks than the vocabulary has tokens: the search uses fewer siblings."""
    params = cases.random_heads("medusa", TARGET, TABLE, heads=2).init_params(None)
    table = [[0.1] * 8] * 2  # a flat tree of eight siblings would be the best
    head_files.write(tmp_path, "medusa", params, {}, None, {"accuracy": table})
    drafter = drafters.make("medusa", TARGET, model=tmp_path, nodes=8, search=search)
    assert drafter.nodes == 8 and drafter.longest == 2
    head_files.write(tmp_path, "medusa", params, {}, None, {"accuracy": [["much"]]})
    with pytest.raises(UserError, match="acceptance is not a table of numbers"):
        drafters.make("medusa", TARGET, model=tmp_path, nodes=8, search=search)


@pytest.mark.fast
@pytest.mark.parametrize("tied", [False, True])
def test_the_copied_head_is_exact(tied):
    """By default accelerators multiply float32 in fewer bits."""
    config = dataclasses.replace(tiny_config(layers=1, width=16), tie_embeddings=tied)
    model, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    ends = files.ends("a head", model)
    program = jax.make_jaxpr(lambda params: ends.output_kernel(params))(params)
    products = [each for each in _equations(program.jaxpr) if each.primitive.name == "dot_general"]
    assert products and all(
        jax.lax.Precision.HIGHEST in each.params["precision"] for each in products
    )
    kernel = params["embed"]["embedding"].T if tied else params["head"]["kernel"]
    np.testing.assert_array_equal(ends.output_kernel(params), kernel)


def _equations(jaxpr):
    """Those of the inner programs as well."""
    inner = [
        value for each in jaxpr.eqns for value in each.params.values() if hasattr(value, "jaxpr")
    ]
    return [*jaxpr.eqns, *(each for program in inner for each in _equations(program.jaxpr))]
