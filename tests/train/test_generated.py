"""Text that the target writes: equal to plain decoding; resumed with the same bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ml_collections import ConfigDict
from tokenizers import processors

from specjax import decode, rng, sampling, testing
from specjax.data import generated_text, shards, text_files, token_streams
from specjax.drafters import none
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import recipes
from specjax.types import ModelParams

TEXT = "".join(f"def f{i}(x):\n    return x + {i % 7}  # number {i * i}\n\n" for i in range(200))
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    tokenizer = token_streams.train_tokenizer([TEXT], 300)
    config = testing.tiny_config(vocab_size=300, layers=1, width=16)
    hf.save(
        folder / "target", config, testing.tiny(vocab_size=300, layers=1, width=16)[1], tokenizer
    )
    (folder / "text.txt").write_text(TEXT)
    return folder


def config(folder, **changes) -> ConfigDict:
    made = ConfigDict({"objective": "generate", "target": str(folder / "target")})
    made.seed = 3
    made.data = ConfigDict({"dir": "", "files": str(folder / "text.txt"), "dialogues": ""})
    made.generation = ConfigDict(
        {"num_prompts": 10, "prompt_tokens": 8, "new_tokens": NEW, "temperatures": (0.0, 1.0)}
    )
    made.generation.update({"top_k": 0, "top_p": 1.0, "batch_size": 3, "shard_prompts": 4})
    made.drafter = ConfigDict({"name": "prompt_lookup", "gamma": 3, "max_ngram": None})
    made.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return made


@pytest.fixture(scope="module")
def run(folder):
    return folder / "run", recipes.run(config(folder), folder / "run")


def files(workdir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (workdir / "generated").iterdir()}


def records(workdir) -> list[dict]:
    return [
        record
        for path in sorted((workdir / "generated").glob("shard*"))
        for record in shards.read(path)
    ]


def test_the_files(folder, run):
    workdir, summary = run
    tokenizer = hf.load(folder / "target").tokenizer
    assert sorted(files(workdir)) == ["manifest.json", "plan.json"] + [
        f"shard-0000{n}-of-00003.array_record" for n in range(3)
    ]
    made = records(workdir)
    assert [(r["prompt"], r["temperature"]) for r in made] == [
        (n, t) for n in range(10) for t in (0.0, 1.0)
    ]
    assert [r["split"] for r in made] == ["train"] * 18 + ["valid"] * 2
    assert all(len(r["prompt_ids"]) == 8 and 1 <= len(r["output_ids"]) <= NEW for r in made)
    texts = {
        split: text_files.load_files(str(folder / "text.txt"), split)[0][1]
        for split in generated_text.SPLITS
    }
    for r in made:
        text = tokenizer.decode(r["prompt_ids"])
        assert "\n" + text in "\n" + texts[r["split"]]  # at a line start of its split
    tokens, rounds = (
        sum(value)
        for value in zip(*((len(r["output_ids"]), r["rounds"]) for r in made), strict=True)
    )
    assert summary == {
        "records": 20,
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_round": tokens / rounds,
        "shards": 3,
    }
    manifest = json.loads(files(workdir)["manifest.json"])
    assert manifest["counts"] == summary and manifest["prompts"]["sources"] == [
        str(folder / "text.txt")
    ]
    assert (
        manifest["drafter"] == {"name": "prompt_lookup", "gamma": 3}
        and manifest["accept"] == "chain"
    )
    assert json.loads((workdir / "summary.json").read_text()) == summary


def test_greedy_records_are_plain_decoding(folder, run):
    loaded, made = hf.load(folder / "target"), [r for r in records(run[0]) if r["temperature"] == 0]
    prompts, lengths = decode.pack_prompts([r["prompt_ids"] for r in made])
    keys, settings = rng.row_keys(0, len(made)), sampling.make_sampling(len(made), 0.0)
    params, drafter = ModelParams(loaded.params), none.make(loaded.lm)
    given = {"max_len": prompts.shape[1] + NEW, "sampling": settings}
    state = decode.prefill(loaded.lm, drafter, params, prompts, lengths, keys, **given)
    state = decode.autoregressive(
        loaded.lm, params, state, max_steps=NEW, eos_id=loaded.config.eos_token_id
    )
    assert decode.outputs(state, np.asarray(lengths)) == [r["output_ids"] for r in made]


@pytest.mark.parametrize(
    "lost", [("manifest.json", 2), ("manifest.json", 0, 2), ("manifest.json", "half")]
)
def test_a_killed_command_ends_with_the_same_bytes(folder, run, tmp_path, lost):
    before = files(run[0])
    workdir = tmp_path / "again"
    (workdir / "generated").mkdir(parents=True)
    (workdir / "config.json").write_bytes((run[0] / "config.json").read_bytes())
    missing = {f"shard-0000{n}-of-00003.array_record" if isinstance(n, int) else n for n in lost}
    for name, content in before.items():
        if name not in missing:
            (workdir / "generated" / name).write_bytes(content)
    last = workdir / "generated" / "shard-00002-of-00003.array_record"
    if "half" in lost:  # left by a full disk, not by a kill
        last.write_bytes(before[last.name][:100])
        (workdir / "generated" / "shard-00002-of-00003.partial").write_bytes(b"half")
    kept = workdir / "generated" / "shard-00001-of-00003.array_record"
    written = kept.stat().st_mtime_ns
    assert recipes.run(config(folder), workdir) == run[1]
    after = files(workdir)
    assert {name: after[name] for name in before} == before
    assert kept.stat().st_mtime_ns == written  # not written again


def test_a_finished_text_is_not_changed(folder, run):
    before = {path: path.stat().st_mtime_ns for path in run[0].rglob("*")}
    assert recipes.run(config(folder), run[0]) == run[1]
    with pytest.raises(UserError, match=r"generation\.top_k was 0, is 5"):
        recipes.run(config(folder, generation__top_k=5), run[0])
    assert before == {path: path.stat().st_mtime_ns for path in run[0].rglob("*")}


def test_other_text_cannot_be_resumed(folder, run, tmp_path):
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "plan.json").write_bytes(files(run[0])["plan.json"])
    (tmp_path / "text.txt").write_text(TEXT[:-900])
    with pytest.raises(UserError, match=r"prompts\.sha256 was"):
        recipes.run(config(folder, data__files=str(tmp_path / "text.txt")), tmp_path)
    assert not list(tmp_path.rglob("shard*"))


def test_noise_is_keyed_by_prompt_and_temperature(folder, run, tmp_path):
    # Not by the shard or the other rows of the batch: one prompt per shard gives the same sums in a
    # batch of the same size.
    recipes.run(config(folder, generation__shard_prompts=1), tmp_path)
    assert records(tmp_path) == records(run[0])
    sampled = [r["output_ids"] for r in records(run[0]) if r["temperature"] == 1]
    assert len({tuple(ids) for ids in sampled}) == len(sampled)


def test_documents(folder, run):
    workdir, _ = run
    vocabulary, made = hf.fingerprint(hf.load(folder / "target").tokenizer), records(run[0])
    valid = generated_text.load(workdir, vocabulary, "valid")
    assert [d.ids.tolist() for d in valid] == [r["prompt_ids"] + r["output_ids"] for r in made[-2:]]
    assert all(d.labelled.all() for d in valid)
    greedy = generated_text.load(
        workdir / "generated", vocabulary, "train", temperature=0.0, labels="output"
    )
    assert [d.ids[d.labelled].tolist() for d in greedy] == [r["output_ids"] for r in made[:18:2]]


def test_an_error_of_loading_is_one_line(folder, run, tmp_path):
    vocabulary = hf.fingerprint(hf.load(folder / "target").tokenizer)

    def refused(message, *args, **keys):
        with pytest.raises(UserError, match=message) as error:
            generated_text.load(*args, **keys)
        assert "\n" not in str(error.value)

    refused("made with another tokenizer", run[0], "0" * 64, "train")
    refused("no text of temperature 0.5; it has 0, 1", run[0], vocabulary, "train", 0.5)
    refused("no split 'test'; it has 'train' and 'valid'", run[0], vocabulary, "test")
    refused(
        "labels is 'prompt'; it must be one of all, output",
        run[0],
        vocabulary,
        "train",
        labels="prompt",
    )
    refused(
        "no manifest.json; build the generated text with configs/self_generate.py",
        tmp_path,
        vocabulary,
        "train",
    )
    for name, content in files(run[0]).items():
        (tmp_path / name).write_bytes(content)
    path = next(tmp_path.glob("shard-00001*"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    refused(
        "shard-00001-of-00003.array_record is missing or damaged", tmp_path, vocabulary, "train"
    )
    path.unlink()
    refused(
        "shard-00001-of-00003.array_record is missing or damaged", tmp_path, vocabulary, "train"
    )
    (tmp_path / "manifest.json").write_text("{")
    refused(
        "manifest.json is damaged, or no generated text of specjax", tmp_path, vocabulary, "train"
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": ""}, "config.target is empty"),
        ({"target": "/nowhere"}, "/nowhere is no directory"),
        ({"seed": -1}, "config.seed is -1"),
        ({"generation__num_prompts": 1}, "num_prompts is 1; it must be a whole number >= 2"),
        ({"generation__batch_size": 0}, "batch_size is 0; it must be a whole number >= 1"),
        ({"generation__temperatures": ()}, "give one number or more"),
        ({"generation__temperatures": (1.0, 1.0)}, "give each value once"),
        ({"generation__temperatures": (-1.0,)}, "temperatures is -1"),
        ({"generation__top_p": 0.0}, "top_p is 0"),
        ({"generation__new_tokens": 400}, "8 [+] 400 tokens and the model has 128"),
        ({"generation__skip": 2}, "skip is 2 and config.generation.prompts is ''"),
        ({"generation__num_prompts": 9999}, "num_prompts is 9999, train split: only"),
        ({"drafter__name": None}, "config.drafter.name is empty; name a drafter"),
        ({"drafter__name": "unknown"}, "unknown drafter 'unknown'"),
        ({"accept": "typical"}, "accept=typical has lossless class L3"),
        ({"drafter__name": "token_recycling"}, "rules for it are"),
        ({"data__files": "/nowhere.txt"}, "No such file"),
        (
            {"data__files": "", "data__dialogues": "a.jsonl"},
            "config.data.dialogues is not a key of objective generate",
        ),
        ({"data__packing": "documents"}, "config.data.packing is not a key of objective generate"),
        ({"data__labels": "all"}, "config.data.labels is not a key of objective generate"),
        (
            {"data__long_pairs": "leave_out"},
            "long_pairs belongs to config.data.pairs, which is not",
        ),
    ],
)
def test_an_error_is_one_line_and_nothing_is_written(folder, tmp_path, changes, message):
    given = config(folder)
    with given.unlocked():
        given.accept = "chain"
    if "drafter__name" in changes:
        given.drafter = ConfigDict({"name": changes.pop("drafter__name")})
    given.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    with pytest.raises(UserError, match=message) as error:
        recipes.run(given, tmp_path / "work")
    assert "\n" not in str(error.value) and not (tmp_path / "work").exists()


@pytest.mark.parametrize("name", ["checkpoints", "datastore.json"])
def test_a_training_run_is_not_overwritten(folder, tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"holds a training run .{name}."):
        recipes.run(config(folder), tmp_path)


def test_a_manifest_of_another_program_is_one_line(tmp_path):
    (tmp_path / "manifest.json").write_text('{"files": []}')
    with pytest.raises(UserError, match="is damaged, or no generated text of specjax") as error:
        generated_text.target_fingerprint(tmp_path)
    assert "\n" not in str(error.value)


def test_progress_is_reported(folder, run, tmp_path, capsys):
    recipes.run(config(folder, generation__num_prompts=4), tmp_path)
    err = capsys.readouterr().err
    assert "tokens/s" in err and "tokens per round" in err and err.count("\n") == 1


def test_a_token_that_the_tokenizer_puts_before_every_text(folder, tmp_path):
    loaded = hf.load(folder / "target")
    loaded.tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token_streams.SEPARATOR} $A", special_tokens=[(token_streams.SEPARATOR, 0)]
    )
    hf.save(tmp_path / "target", loaded.config, loaded.params, loaded.tokenizer)
    changes = {
        "target": str(tmp_path / "target"),
        "generation__num_prompts": 2,
        "generation__temperatures": (0,),
    }
    recipes.run(config(folder, **changes), tmp_path / "run")
    assert [r["prompt_ids"][0] for r in records(tmp_path / "run")] == [0, 0]
    assert [len(r["prompt_ids"]) for r in records(tmp_path / "run")] == [9, 9]


def test_the_target_answers_questions(folder):
    """First turns of different lengths, through a chat template; too long ones are left out."""
    lines = [
        {"question_id": i, "category": "code", "turns": [f"return {'x ' * i}", "and then?"]}
        for i in range(1, 30)
    ]
    lines.append({"question_id": 99, "category": "code", "turns": ["def " * 120]})
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = {"prompts": str(questions), "chat": "chatml", "num_prompts": 29, "prompt_tokens": 112}
    changes = {f"generation__{key}": value for key, value in asked.items()} | {"data__files": ""}
    made = config(folder)
    made.generation.update({"prompts": "", "chat": ""})
    made.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    recipes.run(made, folder / "answers")
    written = records(folder / "answers")
    assert len(written) == 58 and len({tuple(each["prompt_ids"]) for each in written}) == 29
    target = hf.load(folder / "target")
    texts = [target.tokenizer.decode(each["prompt_ids"]) for each in written]
    assert all("user\nreturn" in text and "and then" not in text for text in texts)
    # A row equals plain decoding, although the prompts of its batch have other lengths.
    one = next(each for each in written if each["temperature"] == 0 and each["prompt"] == 3)
    state = decode.prefill(
        target.lm,
        none.make(target.lm),
        ModelParams(target.params),
        *decode.pack_prompts([one["prompt_ids"]]),
        rng.row_keys(0, 1),
        max_len=len(one["prompt_ids"]) + NEW,
        sampling=sampling.make_sampling(1, 0.0),
    )
    eos = target.config.eos_token_id
    state = decode.autoregressive(
        target.lm, ModelParams(target.params), state, max_steps=NEW, eos_id=eos
    )
    assert decode.outputs(state, [len(one["prompt_ids"])])[0] == one["output_ids"]
    # A second part has the questions that the first one left out.
    parts = [{"num_prompts": 20}, {"num_prompts": 9, "skip": 20}]
    for number, part in enumerate(parts):
        made.generation.update(part | {"temperatures": (0.0,), "new_tokens": 1})
        recipes.run(made, folder / f"part {number}")
    first, second = ({each["prompt"] for each in records(folder / f"part {n}")} for n in (0, 1))
    assert (first, second) == (set(range(20)), set(range(20, 29)))
    found = [tuple(each["prompt_ids"]) for n in (0, 1) for each in records(folder / f"part {n}")]
    assert sorted(found) == sorted({tuple(each["prompt_ids"]) for each in written})
    with pytest.raises(UserError, match=r"tokens, of which 21 are skipped, and .* is 9; lower"):
        made.generation.skip = 21
        recipes.run(made, folder / "more")
    made.generation.skip = 0
    made.generation.num_prompts = 30
    with pytest.raises(UserError, match=r"29 different prompts of at most 112 tokens"):
        recipes.run(made, folder / "more")
    made.generation.prompts = str(folder / "none.jsonl")
    with pytest.raises(UserError, match=r"^config.generation.prompts: .*none.jsonl cannot be read"):
        recipes.run(made, folder / "missing")
    made.data.files = str(folder / "text.txt")
    with pytest.raises(UserError, match="give one of them"):
        recipes.run(made, folder / "both")
    made.data.files, made.data.pairs = "", "docstrings"
    with pytest.raises(UserError, match="config.data.pairs other prompts; give one of them"):
        recipes.run(made, folder / "both")
