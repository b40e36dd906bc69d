"""The shape of a decoder after layers were taken out."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from hf_cases import hf_keys

from specjax import testing
from specjax.models import hf, lm
from specjax.models.hf_config import config_to_hf
from specjax.train import initial

pytestmark = pytest.mark.fast


def shape(family, **keys):
    return hf.config_from_hf(hf_keys(family, **keys))


def test_what_names_layers_has_their_new_numbers():
    own = shape("smollm3", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], layer_types=None)
    assert own.unrotated == (3,)
    assert initial._renumbered(own, [0, 3]).unrotated == (1,)
    assert initial._renumbered(own, [0, 1]).unrotated == ()
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    own = shape("gemma3_text", num_hidden_layers=3, layer_types=kinds, sliding_window=8)
    assert own.windows == (8, 8, None)
    kept = initial._renumbered(own, [1, 2])
    assert kept.windows == (8, None) and kept.num_layers == 2
    assert hf.config_from_hf(config_to_hf(kept)) == kept
    assert initial._renumbered(own, [2]).windows == ()
    own = shape("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], decoder_sparse_step=1)
    assert own.experts is not None and own.experts.layers == (0, 2)
    kept = initial._renumbered(own, [1, 2])
    assert kept.experts is not None and kept.experts.layers == (1,)
    assert initial._renumbered(own, [1]).experts is None


def test_what_shapes_do_not_show_is_that_of_the_files(tmp_path):
    """A model to start from is computed as before, and keeps its configuration."""
    config = testing.tiny_config()
    stored = dataclasses.replace(config, rope_theta=1e6, norm_eps=1e-3)
    params = lm.init_params(stored, jax.random.key(0))
    hf.save(tmp_path, stored, params)
    found, same = initial.load(str(tmp_path), config, "")
    assert (found.rope_theta, found.norm_eps) == (1e6, 1e-3)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, config.vocab_size)
    one = lm.forward(lm.from_config(stored), params, tokens).logits
    assert (lm.forward(lm.from_config(found), same, tokens).logits == one).all()
    longer = dataclasses.replace(config, max_positions=2 * config.max_positions)
    assert initial.load(str(tmp_path), longer, "")[0].max_positions == longer.max_positions
