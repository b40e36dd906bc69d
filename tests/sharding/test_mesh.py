"""The text of a mesh, and the table of rules."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import quantised_cases
from jax.sharding import PartitionSpec as P

from specjax import decode, drafters, rng, sharding
from specjax.cache import KVCache
from specjax.errors import UserError
from specjax.sharding import processes, rules, states
from specjax.testing.models import tabular, tiny
from specjax.types import ModelParams

pytestmark = pytest.mark.fast


def test_a_text_names_axes_and_sizes():
    assert sharding.parse("data:4, tensor:2") == {"data": 4, "fsdp": 1, "tensor": 2}
    mesh = sharding.make_mesh("data:-1")
    assert mesh.shape["data"] == len(jax.devices()) and mesh.axis_names == sharding.AXES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be axes with their sizes"),
        ("rows:2", "with the axes data, fsdp, tensor"),
        ("data", "must be axes with their sizes"),
        ("data:2,data:2", "the axis data twice"),
        ("data:two", "a whole number >= 1"),
        ("tensor:0", "a whole number >= 1"),
        ("data:-1,tensor:-1", "only one size can be -1"),
        ("data:4096", "needs 4096 devices, and there are"),
        ("tensor:4096,data:-1", "cannot be divided by 4096"),
    ],
)
def test_wrong_meshes(text, message):
    with pytest.raises(UserError, match=message):
        sharding.make_mesh(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host", 2, 0), "it must be host:port"),
        (("host:99999", 2, 0), "it must be host:port"),
        (("host:80", 2, 2), "process 2 of 2 was given"),
        (("", 2, 1), "without a coordinator"),
    ],
)
def test_wrong_processes(arguments, message):
    with pytest.raises(UserError, match=message):
        processes.start(*arguments)


def specs(params, **sizes) -> dict[str, P]:
    found = sharding.param_specs(params, {"data": 1, "fsdp": 1, "tensor": 1} | sizes, fsdp=True)
    leaves = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): spec for path, spec in leaves}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_decoder_is_divided_by_columns_then_rows(family):
    found = specs(tiny(family)[1], tensor=2)
    layer = "layers/1/"
    for name in ("attention/q", "attention/k", "attention/v", "mlp/up"):
        assert found[f"{layer}{name}/kernel"] == P(None, "tensor")
    for name in ("attention/o", "mlp/down"):
        assert found[f"{layer}{name}/kernel"] == P("tensor", None)
    assert found["embed/embedding"] == P("tensor", None)
    if family == "gpt2":  # biases that are added after the sum over devices stay whole
        assert {found[f"{layer}attention/{part}/bias"] for part in "qkv"} == {P("tensor")}
        assert found[f"{layer}mlp/up/bias"] == P("tensor")
        assert found[f"{layer}mlp/down/bias"] == found[f"{layer}attention/o/bias"] == P(None)


def test_scales_are_divided_as_the_columns_of_their_kernel():
    found = specs(quantised_cases.in_int8(tiny("llama")[1]), tensor=2)
    layer = "layers/1/"
    for name in ("attention/q", "attention/k", "attention/v", "mlp/gate", "mlp/up"):
        assert found[f"{layer}{name}/kernel/values"] == P(None, "tensor")
        assert found[f"{layer}{name}/kernel/scale"] == P("tensor")
    for name in ("attention/o", "mlp/down"):
        assert found[f"{layer}{name}/kernel/values"] == P("tensor", None)
        assert found[f"{layer}{name}/kernel/scale"] == P(None)


HEADS = {"medusa": 1, "hydra": 2, "mlp_speculator": 2, "bpd": 2, "redrafter": 1, "eagle3": 8}


@pytest.mark.parametrize(("name", "least"), HEADS.items())
def test_the_table_has_the_large_parameters_of_heads(name, least):
    model, params = tiny()
    keys = {} if name in ("redrafter", "eagle3") else {"heads": 2}
    training = drafters.make(name, model, **keys).training
    assert training is not None and training.start is not None
    made = jax.eval_shape(training.start, params, jax.random.key(0))
    found = specs(made, tensor=2)
    assert sum("tensor" in spec for spec in found.values()) >= least
    vocab = {path: spec for path, spec in found.items() if "head" in path.split("/")[0]}
    assert all(spec[-1] == "tensor" for path, spec in vocab.items() if "bias" not in path)


def test_fsdp_divides_another_dimension():
    found = specs(tiny(width=32)[1], tensor=2, fsdp=4)
    assert found["layers/0/mlp/up/kernel"] == P("fsdp", "tensor")
    assert found["layers/0/mlp/down/kernel"] == P("tensor", "fsdp")
    assert found["norm/scale"] == P("fsdp")
    assert specs({"odd": np.zeros((3, 5))}, fsdp=4)["odd"] == P(None, None)
    # The largest one; and none where there is one part.
    assert specs({"wide": np.zeros((4, 8))}, fsdp=4)["wide"] == P(None, "fsdp")
    assert specs({"wide": np.zeros((4, 8))}, fsdp=1)["wide"] == P(None, None)


def test_parameters_of_heads_by_their_names():
    head = {"kernel": np.zeros((4, 8)), "bias": np.zeros(8)}
    found = specs({"emb": np.zeros((8, 4)), "head": {"0": head}}, tensor=2)
    assert found["emb"] == P("tensor", None) and found["head/0/kernel"] == P(None, "tensor")
    assert found["head/0/bias"] == P("tensor")
    # A name of a matrix, and no matrix.
    assert specs({"head": np.zeros(8)}, tensor=2)["head"] == P(None)


def test_parameters_of_another_mesh_are_refused():
    model, params = tabular(4), np.zeros((5, 4, 4), np.float32)
    placed = sharding.place(jax.make_mesh((1,), ("data",)), model, ModelParams(params))
    with pytest.raises(UserError, match="on the devices of another mesh; place them"):
        rules.check_placed(jax.make_mesh((1,), ("tensor",)), placed)


def test_the_axes_of_rows_and_heads():
    """An array with the rows twice has none to divide; caches need every layer's heads."""
    drafter = drafters.make("none", tabular(4))
    arrays = (jax.ShapeDtypeStruct((1, 3), np.float32),)
    axes, _ = states.row_axes(drafter, lambda _, x: {"a": x.T, "b": x}, None, arrays, "")
    assert axes == (1, 0)
    for make in (lambda _, x: {"a": x @ x.T}, lambda _, x: {"a": x[0]}):
        with pytest.raises(UserError, match="none keeps a of shape .* which belongs to no row"):
            states.row_axes(drafter, make, None, arrays, "")
    for heads, divided in (((2, 2), True), ((2, 3), False), ((3, 2), False)):
        parts = tuple(np.zeros((1, count, 5, 4)) for count in heads)
        cache = KVCache(parts, parts, np.zeros(1, np.int32))
        spec = cache.replace(k=(P("data"),) * 2, v=(P("data"),) * 2, length=P("data"))
        found = states._divide_caches(spec, cache, 2)
        assert {*found.k, *found.v} == {P("data", "tensor") if divided else P("data")}


def test_a_vocabulary_that_cannot_be_divided_stays_whole():
    _, params = tiny("gpt2", vocab_size=31)
    assert specs(params, tensor=2)["embed/embedding"] == P(None, None)


def test_layers_that_cannot_be_divided_are_an_error_in_a_target():
    _, params = tiny()
    sizes = {"data": 1, "fsdp": 1, "tensor": 3}
    with pytest.raises(UserError, match=r"attention/k/kernel has shape \(32, 16\), and 16 cannot"):
        sharding.param_specs(params, sizes, strict=True)
    assert sharding.param_specs(params, sizes)["norm"]["scale"] == P(None)


def test_a_state_of_another_place_is_refused():
    model = tabular(4)
    drafter, params = drafters.make("none", model), ModelParams(np.zeros((5, 4, 4), np.float32))
    tokens, lengths = decode.pack_prompts([[1, 2]])
    keys = rng.row_keys(0, [0])
    state = decode.prefill(model, drafter, params, tokens, lengths, keys, max_len=4)
    with pytest.raises(UserError, match="not on the devices of this mesh"):
        sharding.autoregressive(sharding.make_mesh("data:1"), model, params, state, max_steps=2)


def test_any_mesh_with_axes_of_these_names():
    model = tabular(4)
    drafter, params = drafters.make("none", model), ModelParams(np.zeros((5, 4, 4), np.float32))
    tokens, lengths = decode.pack_prompts([[1, 2]])
    mesh, keys = jax.make_mesh((1,), ("data",)), rng.row_keys(0, [0])
    placed = sharding.place(mesh, model, params)
    state = sharding.prefill(mesh, model, drafter, placed, tokens, lengths, keys, max_len=4)
    state = sharding.autoregressive(mesh, model, placed, state, max_steps=2)
    own = decode.prefill(model, drafter, params, tokens, lengths, keys, max_len=4)
    own = decode.autoregressive(model, params, own, max_steps=2)
    assert decode.outputs(sharding.on_host(state), [2]) == decode.outputs(own, [2])
    with pytest.raises(UserError, match="the mesh has the axis 'rows'; the axes are data, fsdp"):
        sharding.place(jax.make_mesh((1,), ("rows",)), model, params)
