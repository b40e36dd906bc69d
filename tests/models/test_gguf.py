""".gguf files: the parameters, the configuration and the text of the directory they came from."""

from __future__ import annotations

import os
from pathlib import Path

import gguf_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_cases import assert_same
from marks import by_default

import specjax
from specjax import accept, drafters
from specjax.bench import provenance
from specjax.data import chat
from specjax.errors import UserError
from specjax.models import hf, hf_config, lm
from specjax.models.sources import gguf_config, gguf_file, tensors

gguf = pytest.importorskip("gguf")
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"]
EVERY = [(name, kind) for name in gguf_cases.CONFIGS for kind in KINDS]
CHOSEN = [(name, "Q8_0") for name in gguf_cases.CONFIGS] + [("llama", kind) for kind in KINDS]
DIRECTORY, FILE = "SPECJAX_TEST_CHAT_MODEL", "SPECJAX_TEST_CHAT_GGUF"  # of a real model
NEW = 48  # tokens


def supported(name: str) -> bool:
    """Whether the decoder computes this family."""
    try:
        hf_config.config_from_hf(gguf_cases.config_of(name))
    except UserError:
        return False
    return True


def both(tmp_path, name, kind="F32", **keys):
    """(directory, .gguf file) of one random model."""
    if not supported(name):
        pytest.skip(f"the decoder does not compute {name}")
    config = gguf_cases.config_of(name)
    tensors = gguf_cases.tensors_of(config)
    stored = gguf_cases.write_gguf(tmp_path / "m.gguf", config, tensors, kind, **keys)
    return gguf_cases.write_directory(tmp_path / "m", config, stored), tmp_path / "m.gguf"


@pytest.mark.parametrize(("name", "kind"), by_default(EVERY, CHOSEN))
def test_a_file_gives_the_parameters_of_its_directory(name, kind, tmp_path):
    """To the last bit: with the same parameters and configuration the text is the same."""
    directory, file = both(tmp_path, name, kind)
    a, b = hf.load(directory), hf.load(file)
    assert a.config == b.config
    assert_same(a.params, b.params)
    assert b.tokenizer is None and b.directory == str(file)
    hf.save(tmp_path / "saved", b.config, b.params)
    assert_same(hf.load(tmp_path / "saved").params, a.params)


@pytest.mark.parametrize("size", [300, 5000])
def test_rows_are_read_in_parts(size, tmp_path, monkeypatch):
    directory, file = both(tmp_path, "llama-biases", "Q4_0")
    expected = hf.load(directory).params
    monkeypatch.setattr(tensors, "CHUNK", size)
    assert_same(hf.load(file).params, expected)
    assert_same(hf.load(directory).params, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype, tmp_path):
    directory, file = both(tmp_path, "llama", "Q4_1")
    a, b = hf.load(directory, dtype=dtype), hf.load(file, dtype=dtype)
    assert {x.dtype for x in jax.tree.leaves(b.params)} == {jnp.dtype(dtype)}
    assert_same(a.params, b.params)
    assert_same(hf.load(file, dtype=dtype, on_host=True).params, b.params)


def test_q_and_k_of_llama_are_put_back_in_order(tmp_path):
    """Without it the logits differ: the test above would also pass if nothing was reordered."""
    directory, file = both(tmp_path, "llama")
    ids = jnp.arange(1, 9)[None]
    model = hf.load(file)
    logits = lm.forward(model.lm, model.params, ids).logits
    expected = hf.load(directory)
    np.testing.assert_array_equal(logits, lm.forward(expected.lm, expected.params, ids).logits)
    raw = {t.name: np.array(t.data) for t in gguf.GGUFReader(file).tensors}
    kernel = np.asarray(model.params["layers"][0]["attention"]["q"]["kernel"]).T
    assert not np.array_equal(raw["blk.0.attn_q.weight"], kernel)
    np.testing.assert_array_equal(np.sort(raw["blk.0.attn_q.weight"], 0), np.sort(kernel, 0))


def test_what_results_record(tmp_path):
    _, file = both(tmp_path, "llama", "Q4_0")
    model = hf.load(file)
    facts = provenance.target(model.params, name="", directory=model.directory)
    assert (facts["name"], facts["source"], facts["revision"]) == ("m.gguf", "gguf", None)
    assert facts["dequantised_from"] == "Q4_0" and facts["weights_from"] == "m.gguf"
    assert facts["dtype"] == "float32" and len(facts["weights_sha256"]) == 64
    directory, file = both((tmp_path / "plain").mkdir() or tmp_path / "plain", "llama", "F16")
    assert provenance.target({}, name="", directory=file)["dequantised_from"] is None
    assert provenance.target({}, name="", directory=directory)["source"] == "directory"


def test_keys_of_other_files(tmp_path):
    """Defaults of llama.cpp for keys that a file leaves out, and linear positions."""
    config = gguf_cases.config_of("llama") | {"head_dim": 16, "num_key_value_heads": 4}
    config["rope_theta"] = 10000.0
    left_out = ("head_count_kv", "key_length", "value_length", "theta", "vocab")

    def more(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_eot_token_id(5)
        writer.add_rope_dimension_count(16)

    tensors = gguf_cases.tensors_of(config)
    gguf_cases.write_gguf(tmp_path / "m.gguf", config, tensors, more=more, leave_out=left_out)
    raw = gguf_config.of_file(gguf_file.read(tmp_path / "m.gguf"))
    assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert raw["eos_token_id"] == [2, 5]
    shared = ("head_dim", "num_key_value_heads", "rope_theta", "vocab_size", "rms_norm_eps")
    assert {key: raw[key] for key in shared} == {key: config[key] for key in shared}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_follows_from_its_divisors(factor, tmp_path):
    config = gguf_cases.config_of("llama-rope") | {"head_dim": 64, "rope_theta": 500000.0}
    usual = gguf_cases.LLAMA3 | {"factor": factor, "original_max_position_embeddings": 8192}
    config["rope_scaling"] = usual
    tensors = gguf_cases.tensors_of(config)
    gguf_cases.write_gguf(tmp_path / "m.gguf", config, tensors)
    assert gguf_config.of_file(gguf_file.read(tmp_path / "m.gguf"))["rope_scaling"] == usual


@pytest.mark.parametrize(("layers", "width", "scalar"), [(46, 64, 16), (42, 64, 32), (7, 64, 32)])
def test_the_attention_scale_of_gemma_2_is_that_of_llama_cpp(layers, width, scalar):
    """The key is not in the file: 27B scales by the width of a head among the hidden units."""
    fields = {
        "block_count": layers,
        "embedding_length": width,
        "feed_forward_length": 8,
        "attention.head_count": 4,
        "context_length": 8,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    fields = {f"gemma2.{key}": value for key, value in fields.items()}
    names = ["token_embd.weight", *(f"blk.{i}.attn_norm.weight" for i in range(layers))]
    tensors = dict.fromkeys(names, gguf_file.Stored((5, width), "F32", 0, 4 * width))
    file = gguf_file.GgufFile(Path("m.gguf"), fields | {"general.architecture": "gemma2"}, tensors)
    raw = gguf_config.of_file(file)
    assert raw["query_pre_attn_scalar"] == scalar and raw["final_logit_softcapping"] == 30.0
    assert raw["layer_types"][:2] == ["sliding_attention", "full_attention"]


def shape_of(file, key, value):
    """A change of one key of a valid file."""

    def more(writer):
        writer.kv_data[0].pop(f"llama.{key}", None)
        writer.add_key_value(f"llama.{key}", value, gguf.GGUFValueType.UINT32)

    config = gguf_cases.config_of("llama")
    gguf_cases.write_gguf(file, config, gguf_cases.tensors_of(config), more=more)


def other_architecture(file):
    writer = gguf.GGUFWriter(file, "deepseek2")
    writer.add_tensor("a", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unknown_tensor(file):
    config = gguf_cases.config_of("llama")

    def more(writer):
        writer.add_tensor("blk.0.ssm_a", np.zeros(4, np.float32))

    gguf_cases.write_gguf(file, config, gguf_cases.tensors_of(config), more=more)


def part_of_several(file):
    config = gguf_cases.config_of("llama")
    gguf_cases.write_gguf(
        file, config, gguf_cases.tensors_of(config), more=lambda w: w.add_uint16("split.count", 3)
    )


WRONG = {
    "foreign": (lambda f: f.write_bytes(b"PK\3\4 zip"), "is not a .gguf file: it does not begin"),
    "empty": (lambda f: f.write_bytes(b""), "is not a .gguf file"),
    "header": (lambda f: f.write_bytes(b"GGUF\3\0\0\0"), "is damaged or incomplete"),
    "version": (lambda f: f.write_bytes(b"GGUF\1\0\0\0" + bytes(40)), "which we cannot handle"),
    "family": (other_architecture, "the architecture 'deepseek2' is not supported for .gguf"),
    "experts": (lambda f: shape_of(f, "expert_count", 8), "llama.expert_count = 8 is not supp"),
    "key": (lambda f: shape_of(f, "logit_scale", 8), "llama.logit_scale = 8 is not supported"),
    "partial": (lambda f: shape_of(f, "rope.dimension_count", 8), "only equal widths are supp"),
    "layers": (
        lambda f: shape_of(f, "block_count", 2**31 - 1),
        "llama.block_count is 2147483647, and there are tensors of 3 layers",
    ),
    "tensor": (unknown_tensor, "has the tensor blk.0.ssm_a, which is not understood"),
    "part": (part_of_several, "is one of 3 parts of a model"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_line_for_a_wrong_file(case, tmp_path):
    write, message = WRONG[case]
    write(tmp_path / "m.gguf")
    with pytest.raises(UserError) as caught:
        hf.load(tmp_path / "m.gguf")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="there is no file"):
        hf.load(tmp_path / "other.gguf")


def test_every_truncation_is_one_line(tmp_path):
    _, file = both(tmp_path, "llama")
    data = file.read_bytes()
    cuts = {*range(0, 64), *range(64, len(data), 997), len(data) - 1, len(data) - 128}
    for number, cut in enumerate(sorted(cuts)):
        part = tmp_path / f"{number}.gguf"
        part.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"is not a .gguf file|is damaged or incomplete"):
            gguf_file.read(part)


def test_without_the_library(tmp_path, monkeypatch):
    _, file = both(tmp_path, "llama")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError, match=r"not installed: pip install 'specjax\[gguf\]'"):
        hf.load(file)


@pytest.mark.slow
def test_a_real_chat_model_gives_the_text_of_its_directory():
    """The variables name one model as a directory and as a .gguf file.

    The directory was made from the file by another program; transformers reads the directory.
    """
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    if not all(os.environ.get(name) for name in (DIRECTORY, FILE)):
        pytest.skip(f"{DIRECTORY} and {FILE} name no model")
    a, b = hf.load(os.environ[DIRECTORY]), hf.load(os.environ[FILE])
    assert a.config == b.config and a.lm.vocabulary == b.lm.vocabulary
    assert_same(a.params, b.params)
    messages = [{"role": "user", "content": "Why is the sky blue? Answer in 2 sentences."}]
    text, other = (
        chat.render(chat.load("", each.directory, each.tokenizer), messages, True)
        for each in (a, b)
    )
    ids = b.tokenizer.encode(text, add_special_tokens=False).ids
    reader = transformers.AutoTokenizer.from_pretrained(a.directory)
    theirs = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == other == theirs and ids == reader(text, add_special_tokens=False)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(a.directory, dtype=torch.float32)
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
    expected = out[0, len(ids) :].tolist()
    drafter = drafters.make("none", b.lm)
    prompt, lengths = specjax.pack_prompts([ids])
    room = {"max_len": len(ids) + NEW, "sampling": specjax.make_sampling(1, temperature=0.0)}
    params, keys = specjax.ModelParams(b.params), specjax.row_keys(0, rows=1)
    state = specjax.prefill(b.lm, drafter, params, prompt, lengths, keys, **room)
    rule, ends = accept.load("chain"), b.config.eos_token_id
    state, _ = specjax.generate(b.lm, drafter, rule, params, state, max_steps=NEW, eos_id=ends)
    new = specjax.outputs(state, lengths)[0]
    assert new == expected
    assert b.tokenizer.decode(new) == reader.decode(expected, skip_special_tokens=True)
