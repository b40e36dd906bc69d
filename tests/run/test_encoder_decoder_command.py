"""The command line with a T5 directory as the target: the prompt is the source."""

from __future__ import annotations

import json

import jax
import pytest
import t5_cases
import tokenizers
from commandline import BENCH, GENERATE, ROOT

from specjax import generation, testing
from specjax.errors import UserError
from specjax.models import hf, t5_config

WORDS = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(3, 40))]


def save(path, seed, layers, **fields):
    """A random tiny T5 model with a tokenizer that ends every text with </s>."""
    vocab = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_layers": layers, "num_heads": 2, "head_dim": 8, "start_token_id": 0}
    config = t5_config.t5(**sizes | fields)
    _, params = testing.tiny_t5(
        seed, vocab_size=len(WORDS), num_layers=layers, buckets=32, max_distance=128, **fields
    )
    hf.save(path, config, jax.tree.map(lambda x: x, params), tokenizer)
    return str(path)


@pytest.mark.slow
def test_generate_reads_the_prompt_as_a_source(cli, tmp_path):
    target = save(tmp_path / "target", 0, 2)
    draft = save(tmp_path / "draft", 1, 1, gated=True, activation="gelu_tanh")
    prompts = tmp_path / "p.txt"
    prompts.write_text("w5 w6 w7 w5\nw9\n")
    texts = {}
    for name, keys in (
        ("none", []),
        ("prompt_lookup", ["--config.drafter.gamma=2", "--config.batch_size=2"]),
        ("draft_model", [f"--config.drafter.model={draft}", "--config.drafter.gamma=2"]),
    ):
        given = [GENERATE, f"--config.target={target}", f"--config.prompts={prompts}"]
        given += [f"--config.drafter.name={name}", "--config.max_new_tokens=6"]
        status, out, err, workdir = cli(*given, *keys)
        assert (status, err) == (0, "")
        results = json.loads((workdir / "results.json").read_text())
        texts[name] = results["texts"], results["token_ids"]
        for text in results["texts"]:
            assert text in out and not text.startswith(" ")
    assert texts["none"] == texts["prompt_lookup"] == texts["draft_model"]
    # The same from Python; a source as token ids, with and without the start token.
    model = generation.load(target)
    again = generation.generate_text(model, ["w5 w6 w7 w5", "w9"], max_new_tokens=6)
    assert (again.texts, [each.tokens for each in again.completions]) == texts["none"]
    ids = [[5, 6, 7, 5, 1], [9, 1, 0]]
    assert generation.generate_text(model, ids, max_new_tokens=6).texts == again.texts


def test_a_decoder_does_not_draft_for_an_encoder_decoder_model(cli, tmp_path, draft):
    target = save(tmp_path / "target", 0, 1)
    status, _, err, _ = cli(
        *(GENERATE, f"--config.target={target}", "--config.prompt=w5"),
        *("--config.drafter.name=draft_model", f"--config.drafter.model={draft}"),
    )
    assert status == 2 and err.count("\n") == 1
    assert "take an encoder-decoder model as the draft model" in err


@pytest.mark.slow
def test_a_model_is_trained_distilled_and_measured(cli, tmp_path):
    """From a file of pairs to the speed of a draft and of a lookup in the source."""
    pairs = t5_cases.write(tmp_path / "pairs.jsonl", t5_cases.lines(400))
    sizes = {**t5_cases.SIZES, "encoder_layers": 1}
    both = [f"--config.model.{key}={value}" for key, value in sizes.items()]
    both += [f"--config.data.pairs={pairs}", "--config.train.steps=20", "--config.train.length=48"]
    both += ["--config.train.batch_size=4", "--config.train.eval_batches=2"]
    target, draft = tmp_path / "target", tmp_path / "draft"
    config = f"--config={ROOT}/configs/t5.py"
    status, out, _, _ = cli(config, *both, "--config.model.vocab_size=320", workdir=target)
    assert status == 0 and "heldout_loss" in out
    config = f"--config={ROOT}/configs/t5_distill.py"
    own = [f"--config.target={target}", "--config.examine.prompts=4"]
    assert cli(config, *both, *own, workdir=draft)[0] == 0
    common = [BENCH, f"--config.target={target}", f"--config.prompts={pairs}"]
    common += ["--config.num_prompts=8", "--config.max_new_tokens=8", "--config.repeats=1"]
    for name, keys in (
        ("draft_model", [f"--config.drafter.model={draft}"]),
        ("prompt_lookup", ["--config.drafter.min_ngram=1", "--config.drafter.max_ngram=2"]),
    ):
        given = [*common, f"--config.drafter.name={name}", "--config.drafter.gamma=2", *keys]
        status, _, _, workdir = cli(*given, workdir=tmp_path / name)
        [row] = json.loads((workdir / "results.json").read_text())["rows"]
        assert status == 0 and row["lossless"]["passed"] and row["block_efficiency"] >= 1


@pytest.mark.slow
def test_a_text_with_the_start_token_is_refused(cli, tmp_path):
    target = save(tmp_path / "target", 0, 1)
    status, _, err, _ = cli(GENERATE, f"--config.target={target}", "--config.prompt=w5 <pad> w6")
    assert status == 2 and err.count("\n") == 1
    assert "prompt 1 has the token 0, with which the decoder of" in err
    with pytest.raises(UserError, match="prompt 0 has the token 0"):
        generation.generate_text(generation.load(target), "w5 <pad> w6", max_new_tokens=2)
