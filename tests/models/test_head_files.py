"""Directories of draft heads: round trips, released names, one clear line for every mistake."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from head_file_cases import SHAPES, D, V, W, assert_same, file_of, fill, rewrite, write_heads
from safetensors.numpy import load_file, save_file

from specjax.drafters.files import codec, head_files
from specjax.errors import UserError

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_round_trip(tmp_path, name, dtype):
    kind = SHAPES[name][0]
    params = write_heads(tmp_path / "a", name, dtype, accuracy=[[0.5, 0.1]])
    head = head_files.read(tmp_path / "a", kind, dtype=dtype)
    assert_same(head.params, params)
    assert head.config["model_type"] == kind and head.config["hidden_size"] == D
    vocabulary = not name.startswith("bpd") and name != "medusa without a head"
    assert head.config["vocab_size"] == (V if vocabulary else None)
    assert head.config["vocabulary"] == "abc" and head.config["accuracy"] == [[0.5, 0.1]]
    head_files.write(tmp_path / "b", kind, head.params, head.config)
    again = head_files.read(tmp_path / "b", kind, dtype=dtype)
    assert_same(again.params, params)
    assert again.config == head.config
    assert file_of(tmp_path / "a").read_bytes() == file_of(tmp_path / "b").read_bytes()
    assert all(
        leaf.dtype == jnp.float32
        for leaf in flatten_dict(head_files.read(tmp_path / "a", kind).params).values()
    )


def test_released_names_and_numbers(tmp_path):
    write_heads(tmp_path / "m", "medusa")
    tensors = load_file(tmp_path / "m" / "medusa_lm_head.safetensors")
    assert {"0.0.linear.weight", "2.1.linear.bias", "2.2.weight"} <= tensors.keys() and len(
        tensors
    ) == 15
    assert tensors["2.2.weight"].shape == (V, D)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2), (
        "the numbers must follow the parameters"
    )
    assert config["base_model_name_or_path"] == "some/model"

    write_heads(tmp_path / "h", "hydra++")
    tensors = load_file(tmp_path / "h" / "hydra_lm_head.safetensors")
    assert tensors["hydra_mlp.1.1.linear.weight"].shape == (D, 3 * D)
    assert {
        "hydra_mlp.0.1.res_connection.bias",
        "hydra_mlp.0.7.linear.weight",
        "hydra_lm_head.1.1.bias",
    } <= tensors.keys()
    assert "prefix_embeding_layer.layers.0.self_attn.q_proj.weight" in tensors
    write_heads(tmp_path / "p", "hydra")
    tensors = load_file(tmp_path / "p" / "hydra_lm_head.safetensors")
    assert {"hydra_mlp.0.0.res_connection.weight", "hydra_lm_head.0.weight"} <= tensors.keys()

    write_heads(tmp_path / "s", "tied speculator")
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert tensors["speculator.proj.0.weight"].shape == (W, D) and len(tensors) == 6
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert (
        config["tie_weights"] is True
        and config["n_predict"] == 4
        and config["scale_input"] is False
    )
    assert (config["emb_dim"], config["inner_dim"], config["vocab_size"]) == (D, W, V)


def test_a_trained_workdir(tmp_path):
    params = write_heads(tmp_path / "run" / "model", "bpd")
    head = head_files.read(tmp_path / "run", "bpd")
    assert head.directory == str(tmp_path / "run" / "model")
    assert_same(head.params, params)
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="training in .* is not finished"):
        head_files.read(tmp_path / "unfinished", "bpd")


def test_bad_directories(tmp_path):
    def refused(match, kind="medusa", path=tmp_path / "m"):
        with pytest.raises(UserError, match=match) as caught:
            head_files.read(path, kind)
        assert "\n" not in str(caught.value)

    refused("is no directory")
    (tmp_path / "m").mkdir()
    refused("has no parameters of the drafter clover; give a directory that its", "clover")
    refused(
        "has no medusa heads; such a directory has medusa_lm_head.safetensors "
        "or medusa_lm_head.pt or model"
    )
    write_heads(tmp_path / "m", "medusa")
    refused("has medusa heads; give a directory of hydra heads", "hydra")
    good = load_file(file_of(tmp_path / "m"))

    def stored(match, **changes):
        tensors = {name: changes.get(name, x) for name, x in (good | changes).items()}
        save_file(
            {name: x for name, x in tensors.items() if x is not None},
            tmp_path / "m" / "medusa_lm_head.safetensors",
        )
        refused(match)

    stored("lacks 1 of 15 tensors, first 1.2.weight", **{"1.2.weight": None})
    stored("lacks 1 of 15 tensors, first 2.1.linear.bias", **{"2.1.linear.bias": None})
    stored(
        "1 tensors that are not of medusa heads, first 0.linear",
        **{"0.linear": np.zeros(3, np.float32)},
    )
    stored(
        r"1.0.linear.weight is \[5, 5\], expected \[4, 4\]; heads of one file",
        **{"1.0.linear.weight": np.eye(5)},
    )
    stored(r"2.2.weight is \[8, 4\], expected \[7, 4\]", **{"2.2.weight": np.zeros((8, D))})
    stored(
        r"0.0.linear.weight is empty \(\[4, 0\]\)",
        **{"0.0.linear.weight": np.zeros((D, 0), np.float32)},
    )
    empty = {name: np.zeros((0, 0), np.float32) for name in good}
    stored(r"0.0.linear.weight is empty \(\[0, 0\]\)", **empty)
    stored("0.2.weight is stored as int32", **{"0.2.weight": np.zeros((V, D), np.int32)})
    write_heads(tmp_path / "h", "hydra")
    rewrite(
        tmp_path / "h",
        lambda tensors: {name: x for name, x in tensors.items() if "res_connection" not in name},
    )
    refused("heads that read no tokens", "hydra", tmp_path / "h")
    ordinary = {"model.norm.weight": np.zeros(3, np.float32)}
    save_file(ordinary, tmp_path / "m" / "medusa_lm_head.safetensors")
    refused("has no medusa heads; its first tensor is model.norm.weight")
    file_of(tmp_path / "m").write_bytes(b"hello")
    refused("damaged or incomplete")
    (tmp_path / "m" / "config.json").write_text("{")
    refused("not valid JSON")
    (tmp_path / "m" / "config.json").unlink()
    (tmp_path / "m" / "config.json").mkdir()
    refused("config.json cannot be read")


@pytest.mark.parametrize("value", ["false", "true", 1, 0, [True]])
def test_switches_are_true_or_false(tmp_path, value):
    def refused(name, kind):
        raw = json.loads((tmp_path / kind / "config.json").read_text())
        (tmp_path / kind / "config.json").write_text(json.dumps(raw | {name: value}))
        with pytest.raises(UserError, match=f"{kind}: {name} is .*; it must be true or false"):
            head_files.read(tmp_path / kind, kind)

    params = write_heads(tmp_path / "mlp_speculator", "speculator")
    refused("scale_input", "mlp_speculator")
    head_files.write(tmp_path / "mlp_speculator", "mlp_speculator", params, {})
    refused("tie_weights", "mlp_speculator")
    write_heads(tmp_path / "medusa", "medusa")
    refused("original_lm_head", "medusa")
    with pytest.raises(
        UserError, match="the parameters: scale_input is .*; it must be true or false"
    ):
        head_files.write(tmp_path / "new", "mlp_speculator", params, {"scale_input": value})
    assert not (tmp_path / "new").exists()


def test_a_switch_that_is_null_is_not_given(tmp_path):
    write_heads(tmp_path / "mlp_speculator", "speculator")
    path = tmp_path / "mlp_speculator" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scale_input": None}))
    assert head_files.read(path.parent, "mlp_speculator").config["scale_input"] is False


def test_errors_of_the_operating_system(tmp_path, monkeypatch):
    params = write_heads(tmp_path / "heads", "bpd")
    new = {key: {k: x + 1 for k, x in part.items()} for key, part in params.items()}
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(
        UserError, match="file/heads cannot be written .(File exists|Not a directory)"
    ):
        head_files.write(tmp_path / "file" / "heads", "bpd", new, {})
    replace = Path.replace

    def fail(path, target):
        if target == tmp_path / "heads":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match="heads cannot be written .Permission denied"):
        head_files.write(tmp_path / "heads", "bpd", new, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "heads"]
    # The old heads are unchanged.
    assert_same(head_files.read(tmp_path / "heads", "bpd").params, params)
    monkeypatch.undo()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(head_files.tensor_files, "write", full)
    with pytest.raises(UserError, match="heads cannot be written .*No space left on device"):
        head_files.write(tmp_path / "heads", "bpd", new, {})
    monkeypatch.setattr(head_files.hf, "read_json", lambda path: fail(path, tmp_path / "heads"))
    with pytest.raises(UserError, match="heads cannot be read .Permission denied"):
        head_files.read(tmp_path / "heads", "bpd")


def test_bad_writes_leave_nothing(tmp_path):
    params = fill(SHAPES["medusa"][1])

    def refused(match, params=params, kind="medusa", path=tmp_path / "new"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match=match):
            head_files.write(path, kind, params, {})
        assert sorted(tmp_path.rglob("*")) == before

    refused("not those of hydra heads", kind="hydra")
    refused(r"not those of medusa heads \(extra", {**params, "extra": np.zeros(3)})
    refused(
        r"not those of medusa heads \(block.bias", {"block": {"kernel": params["block"]["kernel"]}}
    )
    refused(
        r"not those of medusa heads \(head.kernel",
        {**params, "head": {"kernel": np.zeros((2, D, V))}},
    )
    refused(
        r"0.2.weight is \[7, 5\], expected \[7, 4\]",
        {**params, "head": {"kernel": np.zeros((3, 5, V))}},
    )
    refused("stored as int64", {**params, "head": {"kernel": np.zeros((3, D, V), int)}})
    refused("n_predict is None", fill(SHAPES["tied speculator"][1]), "mlp_speculator")
    home = tmp_path / "home"
    home.mkdir()
    (home / "model.safetensors").write_text("a model")
    (home / "config.json").write_text('{"model_type": "llama"}')
    refused("exists and is no directory of heads", path=home)
    refused("exists and is no directory of heads", path=home / "config.json")
    # Heads may replace heads of another kind.
    write_heads(tmp_path / "new", "bpd")
    head_files.write(tmp_path / "new", "medusa", params, {})
    assert_same(head_files.read(tmp_path / "new", "medusa").params, params)
    assert sorted(x.name for x in (tmp_path / "new").iterdir()) == [
        "config.json",
        "medusa_lm_head.safetensors",
    ]


class _Own(codec.Codec):
    tables = {  # noqa: RUF012
        "": (
            *codec.linear("{i}.{2j+1}.map", "block.{i}[{j}]", "D {i+1}D", "biases"),
            *codec.linear("{i}.{J}", "head[{i}]", "D V", parts="head"),
        )
    }


def test_a_table_reads_and_writes():
    """Indices, numbers that follow from them, counts, optional parts; names and leaves agree."""
    own = _Own("own")
    names = [f"{i}.{2 * j + 1}.map.weight" for i in range(2) for j in range(3)]
    names += ["0.3.weight", "1.3.weight"]
    layout = own.layout_of_names(names)
    assert set(layout) == set(names)
    assert layout["1.5.map.weight"] == codec.Place(("block", "1", "kernel"), (2,), "D 2D", True)
    assert layout["1.3.weight"] == codec.Place(("head", "kernel"), (1,), "D V", True)
    # A part that one tensor shows is complete, and a wrong number stands for one more.
    assert len(own.layout_of_names([*names, "0.1.map.bias"])) == len(names) + 6
    assert "0.7.map.weight" in own.layout_of_names([*names, "0.999.map.weight"])
    leaves = {
        ("block", "0", "kernel"): np.zeros((3, 4, 4)),
        ("block", "1", "kernel"): np.zeros((3, 4, 8)),
        ("head", "kernel"): np.zeros((2, 4, 7)),
    }
    assert own.layout_of_leaves(leaves) == layout
    with pytest.raises(UserError, match="of own heads .block.1.kernel is missing, unexpected or"):
        own.layout_of_leaves(leaves | {("block", "1", "kernel"): np.zeros((2, 4, 8))})
    with pytest.raises(UserError, match="head.kernel .* on this target it must be .2, 4, 9."):
        own.check(unflatten_dict(leaves), {"V": 9})
