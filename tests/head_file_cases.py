"""Shared by the tests of head files: parameters of every kind, and heads in directories."""

from __future__ import annotations

import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from specjax.drafters.files import head_files

D, V, W, A, C, F = 4, 7, 3, 6, 2, 5


def fill(tree, dtype=np.float32, seed=0):
    """A nested dict of shapes as random arrays."""
    rng = np.random.default_rng(seed)
    if isinstance(tree, dict):
        return {
            key: fill(value, dtype, seed + i + 1) for i, (key, value) in enumerate(tree.items())
        }
    return rng.normal(size=tree).astype(dtype)


def linear(*shape):
    return {"kernel": shape, "bias": (*shape[:-2], shape[-1])}


def layer(bias=False, norm_bias=False, gate=True):
    def one(*shape):
        return linear(*shape) if bias else {"kernel": shape}

    norm = {"scale": (D,), "bias": (D,)} if norm_bias else {"scale": (D,)}
    mlp = {"up": one(D, F), "down": one(F, D)} | ({"gate": one(D, F)} if gate else {})
    attention = {"q": one(D, A), "k": one(D, C), "v": one(D, C), "o": one(A, D)}
    return {
        "attention_norm": norm,
        "attention": attention,
        "mlp_norm": norm,
        "mlp": mlp,
        "norm": norm,
    }


def hydra(heads, layers, **more):
    def head(i):
        blocks = {"blocks": apart(layers - 1, linear(D, D))} if layers > 1 else {}
        return {"in": linear((i + 2) * D, D), "skip": linear((i + 2) * D, D), **blocks}

    last = apart(heads, linear(D, V))
    return {"mlp": {str(i): head(i) for i in range(heads)}, "head": last, **more}


def apart(count, shape):
    return {str(i): shape for i in range(count)}


def speculator(stages, projections):
    ln = {"scale": (stages, W), "bias": (stages, W)}
    shapes = {"emb": (stages, V, W), "proj_in": (D, W), "ln": ln}
    shapes["head"] = apart(stages, (W, V))
    return shapes | ({"proj": apart(projections, (W, W))} if projections else {})


SHAPES = {
    "medusa": ("medusa", {"block": linear(3, 2, D, D), "head": {"kernel": (3, D, V)}}),
    "medusa without a head": ("medusa", {"block": linear(12, 1, D, D)}),
    "hydra": ("hydra", hydra(3, 1)),
    "hydra with layers": ("hydra", hydra(2, 3)),
    "hydra++": ("hydra", hydra(2, 4, prefix=layer())),
    "hydra with biases": ("hydra", hydra(2, 2, prefix=layer(bias=True))),
    "hydra on GPT-2": ("hydra", hydra(2, 2, prefix=layer(bias=True, norm_bias=True, gate=False))),
    "speculator": ("mlp_speculator", speculator(3, 2)),
    "speculator of one stage": ("mlp_speculator", speculator(1, 0)),
    "tied speculator": ("mlp_speculator", speculator(1, 1)),
    "bpd": ("bpd", {"up": linear(3, D, W), "down": linear(3, W, D)}),
    "bpd with a joint layer": ("bpd", {"up": linear(3, D, W), "down": linear(3, 3 * W, D)}),
}


def assert_same(got, expected):
    got, expected = flatten_dict(got), flatten_dict(expected)
    assert got.keys() == expected.keys()
    for leaf, value in expected.items():
        assert got[leaf].dtype == value.dtype, leaf
        np.testing.assert_array_equal(np.asarray(got[leaf]), np.asarray(value), err_msg=str(leaf))


def write_heads(path, name, dtype=np.float32, **extra):
    """Writes random heads into a directory and returns their parameters."""
    kind, shapes = SHAPES[name]
    params = fill(shapes, dtype)
    config = {"base_model_name_or_path": "some/model", "n_predict": 4, "medusa_num_heads": 2}
    head_files.write(path, kind, params, config, "abc", extra)
    return params


def file_of(path):
    return next(path.glob("*.safetensors"))


def rewrite(path, change):
    """Applies ``change`` to the dict of tensors of a directory."""
    tensors = load_file(file_of(path))
    save_file(change(tensors), file_of(path))
