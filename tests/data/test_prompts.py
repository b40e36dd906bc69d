"""Prompts of every source begin like a text of the target's tokenizer."""

from __future__ import annotations

import dataclasses
import json

import pytest
import t5_cases
from tokenizers.processors import TemplateProcessing

from specjax import testing
from specjax.data import corpora, prompts, token_streams
from specjax.data.prompts import PromptSource
from specjax.errors import UserError
from specjax.models import hf

pytestmark = pytest.mark.fast
TEXT = "".join(f"def f{n}(x):\n    return x * {n} + 1\n" for n in range(60))
BOS = 0


@pytest.fixture(params=["bos", "bos and eos", "none"])
def target(request, tmp_path, monkeypatch):
    """A model with a tokenizer that puts tokens before (and after) every text, or none."""
    tokenizer = token_streams.train_tokenizer([TEXT], 300)
    if request.param != "none":
        bos = token_streams.SEPARATOR
        template = f"{bos} $A {bos}" if request.param == "bos and eos" else f"{bos} $A"
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[(bos, BOS)])
    monkeypatch.setattr(corpora, "load_texts", lambda folder, split: [("a.py", TEXT)])
    shape = testing.tiny_config(vocab_size=300, layers=1, width=16)
    return hf.Loaded(testing.tabular(3), {}, shape, tokenizer, str(tmp_path))


def ids(target, name="", context=0, **keys):
    source = PromptSource(names=(name,), **keys)
    result = prompts.read(source, target, lambda _: [], name=name, context=context)
    return [prompt.ids for prompt in result.prompts]


def opening(target):
    return [BOS] if target.tokenizer.post_processor is not None else []


def test_every_source_begins_like_a_text(target, tmp_path):
    first = opening(target)
    assert token_streams.opening(target.tokenizer) == first
    file = tmp_path / "p.txt"
    file.write_text(TEXT[:40].replace("\n", " ") + "\n" + "return x\n")
    for chosen in (
        ids(target, "stdlib", prompt_tokens=8, num_prompts=5, data_dir="d"),
        ids(target, str(file)),
        ids(target, text="def f1(x):"),
        ids(target, "stdlib", context=6, num_prompts=5, data_dir="d"),
    ):
        for each in chosen:
            assert each[: len(first)] == first and BOS not in each[len(first) : -1]
    lengths = {
        len(each) for each in ids(target, "stdlib", prompt_tokens=8, num_prompts=5, data_dir="d")
    }
    assert lengths == {8}


def test_a_prompt_that_is_cut_keeps_its_opening_and_its_end(target):
    first, whole = opening(target), ids(target, text=TEXT[:80])[0]
    assert ids(target, text=TEXT[:80], max_prompt_tokens=5) == [
        first + whole[len(whole) - 5 + len(first) :]
    ]
    assert ids(target, text=TEXT[:80], max_prompt_tokens=len(whole)) == [whole]
    assert ids(target, text=TEXT[:80], max_prompt_tokens=1) == [whole[-1:]]
    cut = ids(target, "stdlib", prompt_tokens=9, max_prompt_tokens=4, num_prompts=3, data_dir="d")
    assert all(len(each) == 4 and each[: len(first)] == first for each in cut)


def test_a_source_that_is_cut_keeps_its_beginning_and_its_end(tmp_path):
    """The task is named at the beginning; </s> and the start token are ids 1 and 0."""
    model, _ = testing.tiny_t5(vocab_size=40, num_layers=1)
    config = testing.tiny_config(vocab_size=40)
    target = hf.Loaded(model, {}, config, t5_cases.tokenizer(), str(tmp_path))
    text = "w9 w5 w6 w7 w8"
    assert ids(target, text=text) == [[9, 5, 6, 7, 8, 1, 0]]
    assert ids(target, text=text, max_prompt_tokens=5) == [[9, 5, 6, 1, 0]]
    assert ids(target, text=text, max_prompt_tokens=3) == [[9, 1, 0]]
    assert ids(target, text=text, max_prompt_tokens=2) == [[9, 0]]
    assert ids(target, text=text, max_prompt_tokens=7) == ids(target, text=text)


def test_a_prompt_without_text_is_refused(target):
    keys = {"prompt_tokens": 1, "num_prompts": 2, "data_dir": "d"}
    if opening(target):
        with pytest.raises(UserError, match="a prompt of 1 tokens has no text"):
            ids(target, "stdlib", **keys)
    else:
        assert [len(each) for each in ids(target, "stdlib", **keys)] == [1, 1]


def test_a_sample_of_a_file_and_what_is_learnt_from(target, tmp_path):
    path = tmp_path / "q.jsonl"
    names = ["writing"] * 4 + ["math"] * 4 + ["qa"] * 4
    lines = [{"question_id": n, "category": c, "turns": ["x", "y"]} for n, c in enumerate(names)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = PromptSource(names=(str(path),), num_prompts=4, warm_prompts=2)
    result = prompts.read(source, target, lambda turn: [[5] for _ in turn], name=str(path))
    # In the order of the file, and each turn is a prompt.
    assert [prompt.question for prompt in result.prompts] == [0, 0, 1, 1, 4, 4, 8, 8]
    assert [prompt.question for prompt in result.others] == [5, 5, 9, 9]
    assert result.about() == "q: 4 conversations, 8 turns (writing 2, math 1, qa 1)"
    prompts.check(source, str(path), 8)
    with pytest.raises(UserError, match="the batch size is 9 and there are 8 turns"):
        prompts.check(source, str(path), 9)
    with pytest.raises(UserError, match="there are 12 prompts, and config.warm_prompts takes 12"):
        prompts.check(PromptSource(names=(str(path),), warm_prompts=12), str(path), 1)


def test_a_split_of_speed_bench_has_the_name_of_its_folder(target, tmp_path):
    row = {"question_id": "a", "category": "qa", "sub_category": None, "turns": ["def f1(x):"]}
    names = []
    for split in ("qualitative", "throughput_1k"):
        path = tmp_path / split / "test.jsonl"
        path.parent.mkdir()
        path.write_text(json.dumps(row) + "\n")
        names.append(f"speed_bench:{path}")
    source = PromptSource(names=tuple(names))
    read = [prompts.read(source, target, lambda _: [], name=name) for name in names]
    assert [each.name for each in read] == ["qualitative", "throughput_1k"]
    assert read[0].about() == "qualitative: 1 prompts (qa 1)"
    assert read[0].prompts[0][:1] + read[0].prompts[0][2:4] == ("def f1(x):", "qa", "a")
    with pytest.raises(UserError) as error:
        prompts.read(dataclasses.replace(source, kind="gsm8k"), target, lambda _: [], name=names[0])
    assert "the kind is speed_bench, and config.prompt_kind is gsm8k" in str(error.value)
