"""The MLP speculator: its formula (tied, scaled, fewer stages run), forecasts, errors."""

from __future__ import annotations

import math

import cases
import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import rms_normal

from specjax import drafters, testing
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.types import ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "mlp_speculator": ("mlp_speculator", {"heads": 2, "inner": 4, "siblings": "iid"}, ("chain",)),
}

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)
ERF = np.vectorize(math.erf)


def plain(params, stages, scale_input):
    """s_i = GELU(LN_i(W_i s + (w_e / w_s) E_i[x])), logits H_i s_i; LN has a bias, not a mean."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    inner, tied = p["emb"].shape[-1], p["emb"].shape[0] == 1
    w_s = 0.5 ** (0.5 / stages)
    w_e = math.sqrt((1 - w_s**2) * inner / 2)

    def read(feature, since):
        s = rms_normal(feature) / math.sqrt(2) if scale_input else feature
        for i, token in enumerate(since):
            at = 0 if tied else i
            w = p["proj_in"] if i == 0 else p["proj"][str(0 if tied else i - 1)]
            y = rms_normal(s @ w + w_e / w_s * p["emb"][at, token])
            y = y * p["ln"]["scale"][at] + p["ln"]["bias"][at]
            s = y * (1 + ERF(y / math.sqrt(2))) / 2
        return s @ p["head"][str(0 if tied else len(since) - 1)]

    return read


@pytest.mark.fast
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
def test_forward_is_the_formula(tie, scale_input):
    keys = {"heads": 3, "tie": tie, "scale_input": scale_input}
    params = cases.random_heads("mlp_speculator", TARGET, TABLE, inner=4, **keys).init_params(None)
    assert params["emb"].shape == ((1 if tie else 3), shared.VOCAB, 4)
    proj = {str(i): (4, 4) for i in range(1 if tie else 2)}
    assert jax.tree.map(jnp.shape, params["proj"]) == proj
    tokens = shared.text()
    result = shared.logits_along("mlp_speculator", TARGET, TABLE, params, tokens, **keys)
    read = plain(params, 3, scale_input)
    features = shared.features_of(TARGET, TABLE, tokens)
    expected = shared.expected_along(read, features, tokens, 3)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_half_of_the_state_is_left_after_all_stages(n, monkeypatch):
    """The purpose of the weights: half of the power of s_0 is left after n stages.

    Here every W is the identity, s_0 and the embeddings are orthogonal, and GELU only halves the
    power. Each stage keeps w_s^2 of the state's power and gives 1 - w_s^2 to its token.
    """
    monkeypatch.setattr(jax.nn, "gelu", lambda x, approximate: x / math.sqrt(2))
    width = shared.VOCAB
    axes, eye = jnp.eye(width), jnp.tile(jnp.eye(width), (n, 1, 1))
    ln = {"scale": jnp.ones((n, width)), "bias": jnp.zeros((n, width))}
    apart = {str(i): axes for i in range(n)}
    params = {"emb": eye, "proj_in": axes, "head": apart, "ln": ln} | (
        {"proj": {key: apart[key] for key in list(apart)[:-1]}} if n > 1 else {}
    )
    heads = shared.heads_of("mlp_speculator", TARGET, params=params, scale_input=True)
    pair = ModelParams(TABLE, params)
    state, kept = heads.begin(pair, 3 * axes[0]), 0.5 ** (1 / n)
    for stage in range(n):
        state = heads.step(pair, state, stage, jnp.asarray(stage + 1))[1]
        power = np.asarray(state**2 / (state**2).sum())
        tokens = [(1 - kept) * kept ** (stage - i) for i in range(stage + 1)]
        np.testing.assert_allclose(power[: stage + 2], [kept ** (stage + 1), *tokens], rtol=1e-5)
    assert power[0] == pytest.approx(0.5)


@pytest.mark.fast
def test_new_embeddings_have_the_length_that_the_weights_assume():
    drafter = drafters.make("mlp_speculator", TARGET, heads=1, inner=256)
    fresh = drafter.training.start(TABLE, jax.random.key(0))
    assert "proj" not in fresh and float(fresh["emb"].std()) == pytest.approx(1 / 16, rel=0.1)


CHAIN, TREE = {"siblings": "iid"}, {"tree": "3x2", "tie": True, "scale_input": True}


@pytest.mark.slow  # as of the heads of medusa and eagle, of which a case runs by default
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_forecast_is_decoded(shape):
    """The tree of two levels runs two of three stages, with the weights of three."""
    drafter = cases.random_heads("mlp_speculator", TARGET, TABLE, heads=3, inner=4, **shape)
    shared.assert_forecast_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


def test_it_learns_and_not_from_wrong_labels():
    shared.assert_learns("mlp_speculator", heads=3, inner=12)


@pytest.mark.fast
@pytest.mark.parametrize("tie", [False, True])
def test_files_hold_what_shapes_do_not_show(tmp_path, tie):
    keys = {"heads": 4, "inner": 6, "tie": tie, "scale_input": True}
    target = shared.assert_files_round_trip("mlp_speculator", tmp_path / "scaled", **keys)
    scaled = drafters.make("mlp_speculator", target, model=tmp_path / "scaled")
    assert dict(scaled.training.facts) == {"n_predict": 4, "scale_input": True}
    assert scaled.longest == 4
    params = scaled.init_params(None)
    head_files.write(tmp_path / "plain", "mlp_speculator", params, {"n_predict": 4})
    plain = drafters.make("mlp_speculator", target, model=tmp_path / "plain")
    assert not dict(plain.training.facts)["scale_input"]
    with pytest.raises(UserError, match="scale_input is True, and the given .* has False"):
        drafters.make("mlp_speculator", target, model=tmp_path / "plain", scale_input=True)


@pytest.mark.fast
def test_errors():
    params = cases.random_heads("mlp_speculator", TARGET, TABLE, heads=3, inner=4).init_params(None)

    def refused(match, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("mlp_speculator", TARGET, **keys).init_params(None)

    refused("mlp_speculator has no parameters yet; give model=, a directory of trained ones")
    refused(
        "the tree is 4 levels deep and mlp_speculator drafts at most 3 tokens ahead",
        params=params,
        tree="2x1x1x1",
    )
    refused("heads is 2, and the given mlp_speculator has 3; leave it out", params=params, heads=2)
    refused("inner is 5, and the given mlp_speculator has 4; leave it out", params=params, inner=5)
    refused(
        "tie is True, and the given mlp_speculator has False; leave it out",
        params=params,
        tie=True,
    )
    refused("tie needs at least 2 stages, and heads is 1; raise heads or", tie=True, heads=1)
    refused("tie is 'yes'; it must be True or False", tie="yes")
    refused("inner is -2; it must be a whole number >= 0", inner=-2)
    keys = {"heads": 3, "inner": 4, "tie": True}
    tied = cases.random_heads("mlp_speculator", TARGET, TABLE, **keys).init_params(None)
    refused("tied, so their shapes do not show how many there are; give heads", params=tied)
    assert drafters.make("mlp_speculator", TARGET, params=tied, heads=5).longest == 5
    shared.assert_foreign_is_refused("mlp_speculator", TARGET, params)
    assert jnp.isfinite(params["emb"]).all()
