"""Files of draft heads: what PyTorch wrote is read bit for bit and nothing is run; round trips; one clear line for bad ones."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import textwrap
import zipfile
from collections import OrderedDict
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specjax.errors import UserError
from specjax.models import head_files, torch_pickle

pytestmark = pytest.mark.fast
D, V, W, A, C, F = 4, 7, 3, 6, 2, 5


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def fill(tree, dtype=np.float32, seed=0):
    """Shapes -> random arrays."""
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
        blocks = {"blocks": linear(layers - 1, D, D)} if layers > 1 else {}
        return {"in": linear((i + 2) * D, D), "skip": linear((i + 2) * D, D), **blocks}

    return {"mlp": {str(i): head(i) for i in range(heads)}, "head": linear(heads, D, V), **more}


def speculator(stages, projections):
    ln = {"scale": (stages, W), "bias": (stages, W)}
    shapes = {"emb": (stages, V, W), "proj_in": (D, W), "head": (stages, W, V), "ln": ln}
    return shapes | ({"proj": (projections, W, W)} if projections else {})


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
}


def assert_same(got, want):
    got, want = flatten_dict(got), flatten_dict(want)
    assert got.keys() == want.keys()
    for leaf, value in want.items():
        assert got[leaf].dtype == value.dtype, leaf
        np.testing.assert_array_equal(np.asarray(got[leaf]), np.asarray(value), err_msg=str(leaf))


def written(path, name, dtype=np.float32, **extra):
    """Heads in a directory, and their parameters."""
    kind, shapes = SHAPES[name]
    params = fill(shapes, dtype)
    config = {"base_model_name_or_path": "some/model", "n_predict": 4, "medusa_num_heads": 2}
    head_files.write(path, kind, params, config, "abc", extra)
    return params


def file_of(path):
    return next(path.glob("*.safetensors"))


def rewrite(path, change):
    tensors = load_file(file_of(path))
    save_file(change(tensors), file_of(path))


# --- what torch.save writes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
def test_reads_what_torch_wrote(torch, tmp_path, protocol):
    base = torch.arange(24.0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    state = {
        "whole": base.reshape(4, 6),
        "transposed": base.reshape(4, 6).t(),
        "sliced": base.reshape(4, 6)[1:3, ::2],
        "permuted": base.reshape(2, 3, 4).permute(2, 0, 1)[1:],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 5),
        "parameter": torch.nn.Parameter(torch.randn(2, 3)),
        "nested": {"model": model.state_dict(), "deeper": {"x": base[3:5]}},
    }
    kinds = "float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64"
    state["kinds"] = {
        kind: torch.tensor([1, 0, 3]).to(getattr(torch, kind)) for kind in kinds.split()
    }
    torch.save(state, tmp_path / "x.pt", pickle_protocol=protocol)
    got = torch_pickle.load(tmp_path / "x.pt")
    want = {".".join(path): tensor for path, tensor in flatten_dict(state).items()}
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        tensor = tensor.detach()
        bf16 = tensor.dtype == torch.bfloat16
        values = (
            tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if bf16 else tensor.numpy()
        )
        assert got[name].dtype == values.dtype and got[name].shape == values.shape, name
        np.testing.assert_array_equal(got[name], values, err_msg=name)
    assert np.shares_memory(got["whole"], got["sliced"]), "a shared storage was read twice"


class Evil:
    """What a pickle can do."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def archive(path, program: bytes, entries=(), compress=zipfile.ZIP_STORED):
    """A checkpoint whose pickle is ``program``."""
    with zipfile.ZipFile(path, "w", compress) as file:
        for name, data in {"data.pkl": program, **dict(entries)}.items():
            file.writestr(f"archive/{name}", data)
    return path


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_run(tmp_path, protocol):
    mark = tmp_path / "mark"
    state = OrderedDict(weight=Evil(mark))
    path = archive(tmp_path / "x.pt", pickle.dumps(state, protocol=protocol))
    with pytest.raises(
        UserError, match="wants to run posix.system when it is read|not a plain dict of tensors"
    ):
        torch_pickle.load(path)
    inst = archive(tmp_path / "inst.pt", b"(S'touch " + str(mark).encode() + b"'\nios\nsystem\n.")
    with pytest.raises(UserError, match="convert it to safetensors"):
        torch_pickle.load(inst)
    assert not mark.exists()


def tensor_program(size, stride, offset=0, count=4, storage="FloatStorage", key="0", build=b""):
    """The pickle of {"x": a tensor}, as PyTorch spells it."""

    def numbers(values):
        return b"(" + b"".join(pickle.dumps(v, 2)[2:-1] for v in values) + b"t"

    text = [pickle.dumps(x, 2)[2:-1] for x in ("x", "storage", key, "cpu")]
    name, word, key, cpu = (x[: x.index(b"q")] if b"q" in x[-2:] else x for x in text)
    pid = (
        b"("
        + word
        + b"ctorch\n"
        + storage.encode()
        + b"\n"
        + key
        + cpu
        + pickle.dumps(count, 2)[2:-1]
        + b"tQ"
    )
    arguments = (
        b"("
        + pid
        + pickle.dumps(offset, 2)[2:-1]
        + numbers(size)
        + numbers(stride)
        + b"\x89N"
        + b"t"
    )
    return b"\x80\x02}" + name + b"ctorch._utils\n_rebuild_tensor_v2\n" + build + arguments + b"Rs."


def test_tensors_stay_within_their_storage(tmp_path):
    data = {"data/0": np.arange(4, dtype=np.float32).tobytes()}
    good = archive(tmp_path / "good.pt", tensor_program((2, 2), (2, 1)), data)
    np.testing.assert_array_equal(torch_pickle.load(good)["x"], [[0, 1], [2, 3]])
    hostile = {
        "too long": tensor_program((5,), (1,)),
        "beyond the end": tensor_program((2,), (1,), offset=3),
        "a wide stride": tensor_program((2,), (2**62,)),
        "backwards": tensor_program((2,), (-1,), offset=1),
        "a negative size": tensor_program((-2,), (1,)),
        "before the beginning": tensor_program((2,), (1,), offset=-1),
        "a byte blown up": tensor_program((2**40,), (0,)),
        "a huge empty one": tensor_program((0, 2**62), (1, 1)),
        "too many axes": tensor_program((1,) * 100, (1,) * 100),
        "ragged": tensor_program((2, 2), (1,)),
        "a size that is none": tensor_program((2.0,), (1,)),
        "a storage that lies": tensor_program((2,), (1,), count=2**40),
        "another type": tensor_program((2,), (1,), storage="DoubleStorage"),
        "a missing storage": tensor_program((2,), (1,), key="1"),
        "a changed function": tensor_program((2,), (1,), build=b"}b"),
        "a great number in the memo": b"\x80\x02}r\xff\xff\xff\x7f"
        + b"\x96"
        + b"\xff" * 7
        + b"\x00.",
        "a loop": b"\x80\x02}q\x00X\x01\x00\x00\x00xh\x00s.",
        "a number": pickle.dumps({"epoch": 3}, 2),
        "a list": pickle.dumps([], 2),
        "lines in a name": b"\x80\x04\x8c\x03a\nb\x8c\x03c\nd\x93.",
        "cut short": tensor_program((2,), (1,))[:-9],
        "no pickle": b"hello",
        "nothing": b"",
    }
    for name, program in hostile.items():
        path = archive(tmp_path / "x.pt", program, data)
        with pytest.raises(UserError) as caught:
            torch_pickle.load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value), name


def test_small_files_take_no_time(tmp_path):
    """A pair of twice the same pair of twice the same pair ...: its hash and its text take 2^60 steps, and no signal ends them.
    Nor does a long key in many nested dicts become as many long names."""
    bomb = b"N" + b"q\x00h\x00\x86" * 60
    numbers = b"K\x00(K\x04t(K\x01t\x89N"
    untyped = b"(X\x07\x00\x00\x00storagectorch.storage\nUntypedStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x10tQ"
    long = b"X" + (1 << 16).to_bytes(4, "little") + b"k" * (1 << 16)
    programs = {
        "a key": b"}" + bomb + b"Ns.",
        "keys": b"}(X\x01\x00\x00\x00xN" + bomb + b"Nu.",
        "a storage": untyped.replace(b"X\x01\x00\x00\x000", bomb) + b".",
        "a size of a storage": untyped.replace(b"K\x10", bomb) + b".",
        "a type": b"ctorch._utils\n_rebuild_tensor_v3\n(" + untyped + numbers + bomb + b"tR.",
        "pairs": b"ccollections\nOrderedDict\n]" + bomb + b"N\x86a\x85R.",
        "names": b"}" + long + b"q\x01" + b"}h\x01" * 20000 + b"N" + b"s" * 20001 + b".",
    }
    paths = [
        str(archive(tmp_path / f"{name}.pt", b"\x80\x02" + program, {"data/0": bytes(16)}))
        for name, program in programs.items()
    ]
    script = """
        import sys
        from specjax.errors import UserError
        from specjax.models import torch_pickle
        for path in sys.argv[1:]:
            try:
                torch_pickle.load(path)
            except UserError as error:
                print("refused", error)
        """
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", textwrap.dedent(script), *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(programs), lines
    for line, path in zip(lines, paths, strict=True):
        assert line.startswith("refused") and path in line and len(line) < 1000


def test_files_that_are_no_checkpoints(tmp_path):
    path, program = tmp_path / "x.pt", tensor_program((4,), (1,))
    data = {"data/0": bytes(16)}

    def refused(match):
        with pytest.raises(UserError, match=match):
            torch_pickle.load(path)

    refused("cannot be read")
    path.write_bytes(pickle.dumps({"x": 1}))
    refused("before PyTorch 1.6; convert it to safetensors")
    path.write_bytes(b"")
    refused("no PyTorch checkpoint")
    whole = archive(path, program, data).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("damaged or cut short")
    path.write_bytes(whole.replace(bytes(16), b"\1" + bytes(15)))
    refused("does not match its checksum")
    archive(path, program, data, zipfile.ZIP_DEFLATED)
    refused("compressed")
    archive(path, program, {**data, "byteorder": b"big"})
    refused("big-endian")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello", "world")
    refused("no PyTorch checkpoint")


# --- heads of PyTorch ---------------------------------------------------------------------------------------------------


def medusa_module(torch, heads, layers):
    """The official heads; the list multiplied is theirs: all blocks of a head are one module."""

    class Block(torch.nn.Module):
        def __init__(self, conditions=0):
            super().__init__()
            self.linear = torch.nn.Linear(D * (conditions + 1), D)
            if conditions:
                self.res_connection = torch.nn.Linear(D * (conditions + 1), D)

        def forward(self, x):
            skip = self.res_connection(x) if hasattr(self, "res_connection") else x
            return skip + torch.nn.functional.silu(self.linear(x))

    def head(_):
        return torch.nn.Sequential(*([Block()] * layers), torch.nn.Linear(D, V, bias=False))

    return Block, torch.nn.ModuleList(map(head, range(heads)))


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_of_pytorch(torch, tmp_path, shared):
    """Released .pt heads: numbers of blocks and heads from the tensors, kernels transposed, repeated blocks noticed."""
    Block, heads = medusa_module(torch, 5, 3)
    if not shared:
        heads[4][1] = Block()
    torch.save(heads.state_dict(), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "config.json").write_text(
        json.dumps({"medusa_num_heads": 2, "base_model_name_or_path": "lmsys/x"})
    )
    head = head_files.read(tmp_path, "medusa")
    assert (head.config["medusa_num_heads"], head.config["medusa_num_layers"]) == (5, 3)
    assert (head.config["hidden_size"], head.config["vocab_size"]) == (D, V)
    assert head.config["tied"] is shared and head.config["base_model_name_or_path"] == "lmsys/x"
    x = np.random.default_rng(0).normal(size=(2, D)).astype(np.float32)
    for i, module in enumerate(heads):
        want, hidden = module(torch.from_numpy(x)).detach().numpy(), x
        for j in range(3):
            block = {key: np.asarray(value[i, j]) for key, value in head.params["block"].items()}
            hidden = hidden + silu(hidden @ block["kernel"] + block["bias"])
        np.testing.assert_allclose(
            hidden @ np.asarray(head.params["head"]["kernel"][i]), want, atol=1e-5
        )


def test_hydra_of_pytorch(torch, tmp_path):
    """Hydra++ as released: dropout between the blocks, one module repeated, a whole Llama before them."""
    Block, _ = medusa_module(torch, 0, 0)
    prefix = {
        "embed_tokens.weight": torch.zeros(V, D),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3),
        "layers.0.self_attn.q_proj.weight": torch.randn(A, D),
        "layers.0.self_attn.k_proj.weight": torch.randn(C, D),
        "layers.0.self_attn.v_proj.weight": torch.randn(C, D),
        "layers.0.self_attn.o_proj.weight": torch.randn(D, A),
        "layers.0.mlp.gate_proj.weight": torch.randn(F, D),
        "layers.0.mlp.up_proj.weight": torch.randn(F, D),
        "layers.0.mlp.down_proj.weight": torch.randn(D, F),
        "layers.0.input_layernorm.weight": torch.randn(D),
        "layers.0.post_attention_layernorm.weight": torch.randn(D),
        "norm.weight": torch.randn(D),
    }
    state = {f"prefix_embeding_layer.{name}": tensor for name, tensor in prefix.items()}
    modules = []
    for i in range(3):
        drop, repeated = torch.nn.Dropout(0.2), Block()
        modules.append(torch.nn.Sequential(drop, Block(i + 1), *([drop, repeated] * 3)))
        last = torch.nn.Sequential(drop, torch.nn.Linear(D, V))
        state |= {
            f"hydra_mlp.{i}.{name}": tensor for name, tensor in modules[-1].state_dict().items()
        }
        state |= {f"hydra_lm_head.{i}.{name}": tensor for name, tensor in last.state_dict().items()}
        modules[-1] = torch.nn.Sequential(modules[-1], last).eval()
    torch.save(state, tmp_path / "hydra_lm_head.pt")
    head = head_files.read(tmp_path, "hydra")
    assert (head.config["hydra_num_heads"], head.config["hydra_num_layers"]) == (3, 4)
    assert head.config["tied"] is True and head.config["hydra_head_arch"] == "prefix-mlp"
    for i, module in enumerate(modules):
        x = np.random.default_rng(i).normal(size=(2, (i + 2) * D)).astype(np.float32)
        want, mine = module(torch.from_numpy(x)).detach().numpy(), head.params["mlp"][str(i)]

        def apply(x, mine):
            return x @ np.asarray(mine["kernel"]) + np.asarray(mine["bias"])

        hidden = apply(x, mine["skip"]) + silu(apply(x, mine["in"]))
        for j in range(3):
            hidden = hidden + silu(
                apply(hidden, {key: value[j] for key, value in mine["blocks"].items()})
            )
        np.testing.assert_allclose(
            apply(hidden, {k: v[i] for k, v in head.params["head"].items()}), want, atol=1e-5
        )
    got = head.params["prefix"]["attention"]["o"]["kernel"]
    np.testing.assert_array_equal(got, prefix["layers.0.self_attn.o_proj.weight"].numpy().T)
    np.testing.assert_array_equal(
        head.params["prefix"]["norm"]["scale"], prefix["norm.weight"].numpy()
    )


# --- round trips and other spellings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_round_trip(tmp_path, name, dtype):
    kind = SHAPES[name][0]
    params = written(tmp_path / "a", name, dtype, accuracy=[[0.5, 0.1]])
    head = head_files.read(tmp_path / "a", kind, dtype=dtype)
    assert_same(head.params, params)
    assert head.config["model_type"] == kind and head.config["hidden_size"] == D
    assert head.config["vocab_size"] == (None if name in ("bpd", "medusa without a head") else V)
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
    written(tmp_path / "m", "medusa")
    tensors = load_file(tmp_path / "m" / "medusa_lm_head.safetensors")
    assert {"0.0.linear.weight", "2.1.linear.bias", "2.2.weight"} <= tensors.keys() and len(
        tensors
    ) == 15
    assert tensors["2.2.weight"].shape == (V, D)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 2), (
        "the parameters know better"
    )
    assert config["base_model_name_or_path"] == "some/model"

    written(tmp_path / "h", "hydra++")
    tensors = load_file(tmp_path / "h" / "hydra_lm_head.safetensors")
    assert tensors["hydra_mlp.1.1.linear.weight"].shape == (D, 3 * D)
    assert {
        "hydra_mlp.0.1.res_connection.bias",
        "hydra_mlp.0.7.linear.weight",
        "hydra_lm_head.1.1.bias",
    } <= tensors.keys()
    assert "prefix_embeding_layer.layers.0.self_attn.q_proj.weight" in tensors
    written(tmp_path / "p", "hydra")
    tensors = load_file(tmp_path / "p" / "hydra_lm_head.safetensors")
    assert {"hydra_mlp.0.0.res_connection.weight", "hydra_lm_head.0.weight"} <= tensors.keys()

    written(tmp_path / "s", "tied speculator")
    tensors = load_file(tmp_path / "s" / "model.safetensors")
    assert tensors["speculator.proj.0.weight"].shape == (W, D) and len(tensors) == 6
    config = json.loads((tmp_path / "s" / "config.json").read_text())
    assert (
        config["tie_weights"] is True
        and config["n_predict"] == 4
        and config["scale_input"] is False
    )
    assert (config["emb_dim"], config["inner_dim"], config["vocab_size"]) == (D, W, V)


def test_medusa_in_a_merged_model(tmp_path):
    """Sharded, the heads in the second file only; of the backbone, only what is its own is passed over."""
    params = written(tmp_path / "heads", "medusa")
    tensors = {
        f"medusa_head.{name}": x for name, x in load_file(file_of(tmp_path / "heads")).items()
    }
    backbone = {
        name: np.zeros((2, 2), np.float32) for name in ("model.norm.weight", "lm_head.weight")
    }
    path = tmp_path / "merged"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000}))
    shards = {
        "model-00001-of-00002.safetensors": backbone,
        "model-00002-of-00002.safetensors": tensors,
    }
    for file, part in shards.items():
        save_file(part, path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    head = head_files.read(path, "medusa")
    assert_same(head.params, params)
    assert head.config["vocab_size"] == V and head.config["model_type"] == "medusa"
    save_file(
        {**tensors, "other.weight": backbone["lm_head.weight"]},
        path / "model-00002-of-00002.safetensors",
    )
    with pytest.raises(
        UserError, match="1 tensors that are not of medusa heads, first other.weight"
    ):
        head_files.read(path, "medusa")
    (path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="lacks model-00001-of-00002.safetensors"):
        head_files.read(path, "medusa")


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_medusa_of_vllm(tmp_path, prefix, bias):
    params = fill({"block": linear(2, 3, D, D), "head": {"kernel": (2, D, V)}})
    tensors = {}
    for i in range(2):
        for j in range(3):
            tensors[f"{prefix}blocks.{i}.layers.{j}.weight"] = np.ascontiguousarray(
                params["block"]["kernel"][i, j].T
            )
            if bias:
                tensors[f"{prefix}blocks.{i}.layers.{j}.bias"] = params["block"]["bias"][i, j]
        tensors[f"{prefix}lm_heads.{i}.weight"] = np.ascontiguousarray(
            params["head"]["kernel"][i].T
        )
    if not bias:
        params["block"]["bias"] = np.zeros_like(params["block"]["bias"])

    def store(**more):
        save_file(tensors | more, tmp_path / "model.safetensors")

    store()
    assert_same(head_files.read(tmp_path, "medusa").params, params)
    store(**{f"{prefix}token_map": np.arange(3)})
    assert_same(head_files.read(tmp_path, "medusa").params, params)
    store(**{f"{prefix}token_map": np.arange(V)})
    with pytest.raises(UserError, match=f"heads for the {V} tokens of its token_map"):
        head_files.read(tmp_path, "medusa")
    del tensors[f"{prefix}lm_heads.1.weight"]
    store()
    with pytest.raises(UserError, match="lacks 1 of .* first lm_heads.1.weight"):
        head_files.read(tmp_path, "medusa")
    (tmp_path / "config.json").write_text(json.dumps({"original_lm_head": True}))
    assert "head" not in head_files.read(tmp_path, "medusa").params


def test_speculators_that_share(tmp_path):
    """Duplicates of a tied speculator may be left out, or written; what differs is not tied, whatever config.json says."""
    once = written(tmp_path / "tied", "tied speculator")
    path = tmp_path / "full"
    params = {key: np.repeat(x, 4, 0) for key, x in once.items() if key in ("emb", "head")}
    params |= {"ln": {key: np.repeat(x, 4, 0) for key, x in once["ln"].items()}}
    params |= {"proj": np.repeat(once["proj"], 3, 0), "proj_in": once["proj_in"]}
    head_files.write(path, "mlp_speculator", params, {"scale_input": True})
    assert_same(head_files.read(path, "mlp_speculator").params, params)

    def claim(**changes):
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(raw | changes))

    claim(tie_weights=True, n_predict=9)
    head = head_files.read(path, "mlp_speculator")
    assert_same(head.params, once)
    assert (
        head.config["n_predict"] == 4
        and head.config["tie_weights"] is True
        and head.config["scale_input"] is True
    )
    rewrite(
        path, lambda tensors: {name.removeprefix("speculator."): x for name, x in tensors.items()}
    )
    assert_same(head_files.read(path, "mlp_speculator").params, once)
    rewrite(path, lambda tensors: tensors | {"ln.3.bias": tensors["ln.3.bias"] + 1})
    head = head_files.read(path, "mlp_speculator")
    assert head.config["tie_weights"] is False and head.params["emb"].shape[0] == 4
    (tmp_path / "tied" / "config.json").unlink()
    with pytest.raises(
        UserError, match="n_predict is None; of tied stages config.json must say how many there are"
    ):
        head_files.read(tmp_path / "tied", "mlp_speculator")


def test_a_trained_workdir(tmp_path):
    params = written(tmp_path / "run" / "model", "bpd")
    head = head_files.read(tmp_path / "run", "bpd")
    assert head.directory == str(tmp_path / "run" / "model")
    assert_same(head.params, params)
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="training in .* is not finished"):
        head_files.read(tmp_path / "unfinished", "bpd")


# --- mistakes -----------------------------------------------------------------------------------------------------------


def test_bad_directories(tmp_path):
    def refused(match, kind="medusa", path=tmp_path / "m"):
        with pytest.raises(UserError, match=match) as caught:
            head_files.read(path, kind)
        assert "\n" not in str(caught.value)

    refused("is no directory")
    refused("there are no heads of kind 'eagle'; there are medusa, hydra", "eagle")
    (tmp_path / "m").mkdir()
    refused(
        "has no medusa heads; such a directory has medusa_lm_head.safetensors or medusa_lm_head.pt or model"
    )
    written(tmp_path / "m", "medusa")
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
    written(tmp_path / "h", "hydra")
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


@pytest.mark.parametrize("value", ["false", "true", 1, 0, None, [True]])
def test_switches_are_true_or_false(tmp_path, value):
    def refused(name, kind):
        raw = json.loads((tmp_path / kind / "config.json").read_text())
        (tmp_path / kind / "config.json").write_text(json.dumps(raw | {name: value}))
        with pytest.raises(UserError, match=f"{kind}: {name} is .*; it must be true or false"):
            head_files.read(tmp_path / kind, kind)

    params = written(tmp_path / "mlp_speculator", "speculator")
    refused("scale_input", "mlp_speculator")
    head_files.write(tmp_path / "mlp_speculator", "mlp_speculator", params, {})
    refused("tie_weights", "mlp_speculator")
    written(tmp_path / "medusa", "medusa")
    refused("original_lm_head", "medusa")
    with pytest.raises(
        UserError, match="the parameters: scale_input is .*; it must be true or false"
    ):
        head_files.write(tmp_path / "new", "mlp_speculator", params, {"scale_input": value})
    assert not (tmp_path / "new").exists()


def test_what_the_system_refuses(tmp_path, monkeypatch):
    params = written(tmp_path / "heads", "bpd")
    new = {key: {k: x + 1 for k, x in part.items()} for key, part in params.items()}
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError, match="file/heads cannot be written .(File exists|Not a directory)"
    ):
        head_files.write(tmp_path / "file" / "heads", "bpd", new, {})
    rename = Path.rename

    def fail(path, target):
        if path.name == "new":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UserError, match="heads cannot be written .Permission denied"):
        head_files.write(tmp_path / "heads", "bpd", new, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "heads"]
    assert_same(
        head_files.read(tmp_path / "heads", "bpd").params, params
    )  # the old ones are where they were
    monkeypatch.undo()

    def full(*args, **kwargs):
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(head_files, "save_file", full)
    with pytest.raises(UserError, match="heads cannot be written .*No space left on device"):
        head_files.write(tmp_path / "heads", "bpd", new, {})
    monkeypatch.setattr(head_files.hf, "_read_json", lambda path: fail(Path("new"), path))
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
    refused("no heads of kind 'eagle'", kind="eagle")
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
    (home / "model.safetensors").write_text("somebody's")
    (home / "config.json").write_text('{"model_type": "llama"}')
    refused("exists and is no directory of heads", path=home)
    refused("exists and is no directory of heads", path=home / "config.json")
    written(tmp_path / "new", "bpd")
    head_files.write(tmp_path / "new", "medusa", params, {})  # other heads in the place of heads
    assert_same(head_files.read(tmp_path / "new", "medusa").params, params)
    assert sorted(x.name for x in (tmp_path / "new").iterdir()) == [
        "config.json",
        "medusa_lm_head.safetensors",
    ]
