"""Replay: recordings in and out, and that the counts are those of the decoding that was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.bench import metrics, recorded_target, replay
from specjax.bench.passes import Method
from specjax.data import recordings
from specjax.data.recordings import Trace
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.run import command_line
from specjax.testing import cases
from specjax.types import ModelParams

ROOT = Path(__file__).parents[2]
CONFIG = f"--config={ROOT}/configs/replay.py"


# --- the counts are right --------------------------------------------------------------------------------------------


def conversations(count, seed=0, longest=110):
    """Texts over few words, of many lengths: two sizes of buffers; every third has no category."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        prompt, output = (
            random.integers(0, 6, random.integers(1, longest // 2)).tolist() for _ in range(2)
        )
        found.append(Trace(prompt, output, [None, "b", "a"][i % 3]))
    return found


def simulate(trace, gamma, ngram):
    """Prompt lookup on one text, in plain Python: (rounds, accepted, tested by depth, passed by depth)."""
    text, at, rounds = trace.prompt + trace.output, len(trace.prompt), 0
    tested, passed = np.zeros(gamma, int), np.zeros(gamma, int)
    while at < len(text):
        draft = []
        for n in range(min(ngram, at - 1), 0, -1):
            starts = [i for i in range(at - n) if text[i : i + n] == text[at - n : at]]
            if starts:
                draft = text[:at][starts[0] + n : starts[0] + n + gamma]
                break
        known = draft[: len(text) - at]
        good = 0
        while good < len(known) and known[good] == text[at + good]:
            good += 1
        passed[:good] += 1
        tested[: min(good + 1, len(known))] += 1
        at, rounds = at + good + 1, rounds + 1
    return rounds, int(passed.sum()), tested, passed


def lookup(gamma=4, ngram=2):
    drafter = drafters.make(
        "prompt_lookup", recorded_target.recorded(6), gamma=gamma, max_ngram=ngram
    )
    return Method("lookup", drafter, accept.load("chain"), ModelParams({}, {}))


def test_prompt_lookup_against_plain_python_in_every_batch():
    """Chains: every count, over all and by category; and the same whatever the batch."""
    texts, method = conversations(10), lookup()
    found = replay.measure(method, texts, batch_size=4)
    assert list(found) == [None, "a", "b"]
    for kind, tally in found.items():
        own = [t for t in texts if kind in (None, t.category)]
        rounds, accepted, tested, passed = (
            sum(x) for x in zip(*(simulate(t, 4, 2) for t in own), strict=True)
        )
        counts = tally.counts
        assert (tally.prompts, counts.tokens) == (len(own), sum(len(t.output) for t in own))
        assert (counts.rounds, counts.accepted) == (rounds, accepted)
        assert (
            counts.tested.tolist() == tested.tolist() and counts.passed.tolist() == passed.tolist()
        )
    assert found[None].counts.accepted > 20
    alone = replay.measure(method, texts[::-1], batch_size=1)
    for kind, tally in found.items():
        jax.tree.map(np.testing.assert_array_equal, alone[kind], tally)


@pytest.mark.parametrize(
    "name, rule", [("escalate", "chain"), ("suffix", "deterministic"), ("independent", "recursive")]
)
def test_replay_of_a_run_has_its_counts(name, rule):
    """A table is decoded greedily and recorded. The replay, the real loop with the table, and the real loop with the
    recording as an ``LM`` agree in every count of every row; drafters with states and caches, on chains and trees."""
    case, rule, new, draft = cases.case(name), accept.load(rule), 9, cases.case(name).params.draft
    if name == "independent":  # closer to the target, so that some is accepted
        draft = jax.tree.map(lambda table: case.params.target + 0.7 * table, draft)
    prompts = [[0, 1, 2], [1], [2, 2, 0, 1, 2], [0, 0]]
    packed, lengths = decode.pack_prompts(prompts)

    def begin(target, params, **more):
        settings, keys = sampling.make_sampling(4, 0.0), rng.row_keys(0, 4)
        return decode.prefill(
            target, case.drafter, params, packed, lengths, keys, sampling=settings, **more
        )

    params = ModelParams(case.params.target, draft)
    state = decode.autoregressive(
        case.target, params, begin(case.target, params, max_len=20), max_steps=20
    )
    record = np.asarray(state.tokens)[
        :, :20
    ]  # longer than what is replayed: no draft ends beyond it
    counts, quick = (
        [],
        rule._replace(sampled=lambda keys, draft, laws: rule.greedy(draft, laws)),
    )  # quicker to compile
    for target, first in (
        (case.target, params.target),
        (recorded_target.recorded(cases.VOCAB), jnp.asarray(record)),
    ):
        pair = ModelParams(first, draft)
        state = begin(target, pair, max_len=14, limit=lengths + new)
        state, records = decode.generate(target, case.drafter, quick, pair, state, max_steps=new)
        for row, prompt in enumerate(prompts):
            assert (
                np.asarray(state.tokens)[row, : len(prompt) + new]
                == record[row, : len(prompt) + new]
            ).all()
        counts.append(
            [metrics.count(records, np.arange(4) == row, case.drafter.longest) for row in range(4)]
        )
    texts = [
        Trace(p, r[len(p) :].tolist(), str(i))
        for i, (p, r) in enumerate(zip(prompts, record, strict=True))
    ]
    found = replay.measure(
        Method(name, case.drafter, rule, params), texts, batch_size=4, max_new_tokens=new
    )
    for row in range(4):
        for own in counts:
            jax.tree.map(np.testing.assert_array_equal, own[row], found[str(row)].counts)
    assert found[None].counts.tokens == 4 * new and found[None].counts.accepted > 6


def test_what_a_recording_cannot_answer_is_refused():
    case = cases.case("chain")
    for drafter, rule, says in (
        (
            case.drafter._replace(features=True),
            "chain",
            "draft_model reads what the target computes",
        ),
        (case.drafter, "tolerance", "the rule tolerance is lossy"),
        (case.drafter, "lenient", "the rule lenient is lossy"),
        (cases.case("iid").drafter, "chain", "rules for it are"),
    ):
        with pytest.raises(UserError, match=says):
            recorded_target.fold(drafter, accept.load(rule))
    reader = case.drafter._replace(init=lambda params, *rest: params.target["embed"])
    with pytest.raises(UserError, match="draft_model reads the target's weights"):
        replay.measure(
            Method("", reader, accept.load("chain"), case.params), [Trace([1], [1])], batch_size=1
        )


# --- recordings ------------------------------------------------------------------------------------------------------


GOOD = {"id": 7, "category": "qa", "prompt_ids": [1, 2, 3, 1, 2], "output_ids": [3, 1, 2, 4]}
BAD = {
    "no JSON": ("{", "it is no JSON object"),
    "a list": ("[1]", "it is no JSON object"),
    "deep": ("[" * 100_000, "it is no JSON object"),
    "no prompt": ({"output_ids": [1]}, "prompt_ids is missing"),
    "no output": ({"prompt_ids": [1]}, "output_ids is missing"),
    "empty": (
        {**GOOD, "output_ids": []},
        "output_ids is empty; it must be a list of at least one token id",
    ),
    "text": ({**GOOD, "prompt_ids": "123"}, "prompt_ids is no list"),
    "null": ({**GOOD, "prompt_ids": None}, "prompt_ids is no list"),
    "a fraction": (
        {**GOOD, "prompt_ids": [1, 2.0]},
        "prompt_ids has 2.0; ids are whole numbers in 0..4",
    ),
    "a truth value": (
        {**GOOD, "output_ids": [True]},
        "output_ids has true; ids are whole numbers in 0..4",
    ),
    "a hole": ({**GOOD, "output_ids": [1, None]}, "output_ids has null"),
    "negative": ({**GOOD, "output_ids": [-1]}, "output_ids has -1"),
    "beyond the vocabulary": (
        {**GOOD, "output_ids": [1, 5]},
        "output_ids has 5; ids are whole numbers in 0..4",
    ),
    "category": ({**GOOD, "category": 3}, "category is 3; it must be a text or null"),
}


def write(path, *values):
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


@pytest.mark.fast
@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_or_left_out(tmp_path, name):
    value, says = BAD[name]
    file = write(tmp_path / "t.jsonl", GOOD, " ", value, GOOD)
    with pytest.raises(UserError) as error:
        recordings.read(file, 5)
    assert f"{file} line 3: {says}" in str(error.value)
    found = recordings.read(file, 5, skip_bad=True)
    assert len(found.traces) == 2 and found.vocab_size == 5
    [bad] = found.skipped
    assert bad["line"] == 3 and bad["why"].startswith(says)
    with pytest.raises(UserError, match="none of its 1 lines can be replayed; line 1: "):
        recordings.read(write(tmp_path / "none.jsonl", value), 5, skip_bad=True)


@pytest.mark.fast
def test_recordings_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "t.jsonl"
    recordings.record(
        file, [[1, 2], np.array([3])], [[4], jnp.asarray([0, 9])], categories=["\u2028", None]
    )
    found = recordings.read(file)
    assert found == ([Trace([1, 2], [4], "\u2028"), Trace([3], [0, 9])], 10, [])
    assert [json.loads(line)["id"] for line in file.read_text().split("\n") if line] == [0, 1]
    assert recordings.read(file, most=1) == (found.traces[:1], 5, [])
    with pytest.raises(UserError, match="2 prompts and 1 outputs"):
        recordings.record(file, [[1], [2]], [[1]])
    with pytest.raises(UserError, match="not a writable directory"):
        recordings.record(tmp_path / "no" / "t.jsonl", [[1]], [[1]])
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n")
    assert recordings.read(file).traces == [Trace([1, 2, 3, 1, 2], [3, 1, 2, 4], "qa")]
    with pytest.raises(UserError, match="ids are whole numbers in 0..16777215"):
        recordings.read(write(file, {**GOOD, "prompt_ids": [2**40]}))
    for data, says in (
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"id": "\xe9"}', "byte 8 is not UTF-8"),
    ):
        file.write_bytes(data)
        with pytest.raises(UserError, match=says):
            recordings.read(file, skip_bad=True)
    with pytest.raises(UserError, match="cannot be read"):
        recordings.read(tmp_path)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def cli(tmp_path, capsys):
    """Runs the command line in this process: (exit status, stdout, stderr, workdir)."""

    def call(*args):
        status = command_line.main(["specjax", *map(str, args), f"--workdir={tmp_path / 'out'}"])
        return status, *capsys.readouterr(), tmp_path / "out"

    return call


def test_the_command_line_tells_what_it_left_out(cli, tmp_path):
    other = {**GOOD, "category": "[/b] writing", "output_ids": [1] * 9}
    file = write(
        tmp_path / "t.jsonl",
        GOOD,
        {**GOOD, "output_ids": [77]},
        other,
        "x",
        {**GOOD, "category": None},
    )
    common = [
        CONFIG,
        f"--config.traces={file}",
        "--config.vocab_size=50",
        "--config.drafter.gamma=3",
    ]
    status, out, err, workdir = cli(*common)
    assert (
        (status, out) == (2, "")
        and f"{file} line 2: output_ids has 77" in err
        and err.count("\n") == 1
    )
    assert not workdir.exists()
    status, out, err, workdir = cli(*common, "--config.skip_bad=true")
    assert (status, err) == (0, "")
    assert "left out 2 bad lines: line 2: output_ids has 77" in out and "[/b] writing" in out
    results = json.loads((workdir / "results.json").read_text())
    assert [bad["line"] for bad in results["skipped"]] == [2, 4]
    rows = results["rows"]
    assert [(r["category"], r["prompts"], r["tokens"]) for r in rows] == [
        (None, 3, 17),
        ("[/b] writing", 1, 9),
        ("qa", 1, 4),
    ]
    for row in rows:
        assert row["block_efficiency"] == row["tokens"] / row["rounds"] > 1
        assert (row["method"], row["accept"], row["class"], row["temperature"]) == (
            "prompt_lookup",
            "chain",
            "L1",
            0,
        )
        assert (
            row["tokens_per_second"] is row["speedup"] is row["lossless"] is None
            and row["batch_size"] == 3
        )
    assert "\n".join(map(json.dumps, rows)) + "\n" == (workdir / "metrics.jsonl").read_text()


def save(path, seed, words=30):
    """A random model with a tokenizer of so many words: "w0 w1"."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    config = testing.tiny_config(vocab_size=words, layers=1, width=16)
    params = lm.init_params(config, jax.random.key(seed))
    hf.save(path, config, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params), tokenizer)
    return path


def test_generate_records_and_replay_gives_its_counts_back(cli, tmp_path):
    target, draft = save(tmp_path / "target", 0), save(tmp_path / "draft", 0)
    prompts = write(
        tmp_path / "p.jsonl",
        {"prompt": "w1 w2 w3 w1", "category": "b"},
        {"prompt": "w4"},
        {"prompt": "w5 w5"},
    )
    drafter = [
        "--config.drafter.name=draft_model",
        f"--config.drafter.model={draft}",
        "--config.drafter.gamma=2",
    ]
    common = ["--config.batch_size=2", *drafter]
    options = [
        f"--config={ROOT}/configs/generate.py",
        f"--config.target={target}",
        f"--config.prompts={prompts}",
        *common,
    ]
    status, _, err, workdir = cli(
        *options, "--config.record={workdir}.jsonl", "--config.max_new_tokens=12"
    )
    assert (status, err) == (0, "")
    made = json.loads((workdir / "results.json").read_text())
    found = recordings.read(tmp_path / "out.jsonl")
    assert [t.output for t in found.traces] == made["token_ids"]
    assert [t.category for t in found.traces] == ["b", None, None]
    replays = [CONFIG, f"--config.traces={tmp_path / 'out.jsonl'}", *common]
    status, out, err, workdir = cli(*replays, f"--config.target={target}")
    assert (status, err) == (0, "") and "vocabulary 30" in out
    row = json.loads((workdir / "results.json").read_text())["rows"][0]
    same = ("prompts", "tokens", "rounds", "block_efficiency")
    assert [row[key] for key in same] == [made["rows"][0][key] for key in same]
    assert (
        row["acceptance_rate"] == 1
    )  # it is its own draft model, and the replay never judges what was not recorded
    status, _, err, _ = cli(*replays)
    assert status == 2 and "give config.vocab_size" in err and err.count("\n") == 1
    status, _, err, _ = cli(*replays, "--config.vocab_size=29", f"--config.target={target}")
    assert status == 2 and "config.vocab_size is 29 and" in err
    status, _, err, _ = cli(*options, f"--config.record={tmp_path / 'no' / 'x.jsonl'}")
    assert status == 2 and "config.record: " in err and "not a writable directory" in err


MISTAKES = {
    "no recording": (["--config.traces="], "config.traces is empty; give a .jsonl file"),
    "no such file": (
        ["--config.traces=/nowhere.jsonl"],
        "config.traces: /nowhere.jsonl cannot be read",
    ),
    "sampled": (["--config.sampling.temperature=0.5"], "replayed at temperature 0 only"),
    "minus one": (["--config.num_traces=-1"], "config.num_traces is -1; it must be at least 0"),
    "beyond": (
        ["--config.vocab_size=4"],
        "line 1: output_ids has 4; ids are whole numbers in 0..3",
    ),
    "no target": (["--config.target=/nowhere"], "/nowhere is no directory"),
    "no model": ([f"--config.target={ROOT}"], "no config.json that can be read"),
    "batch 0": (["--config.batch_size=0"], "batch size is 0"),
    "lossy": (["--config.accept=typical"], "the rule typical is lossy"),
    "no drafts": (["--config.drafter.gamma=0"], "gamma is 0"),
    "reads the target": (["--config.drafter.name=jacobi"], "jacobi reads what the target computes"),
    "warm": (["--config.drafter.warm=True"], "warm=True"),
    "another mode": (["--config.mode=generate"], "mode generate needs the key 'prompt'"),
    "unknown drafter": (["--config.drafter.name=medusa9"], "unknown drafter 'medusa9'"),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(cli, tmp_path, name):
    args, says = MISTAKES[name]
    file = write(tmp_path / "t.jsonl", GOOD)
    status, out, err, workdir = cli(CONFIG, f"--config.traces={file}", *args)
    assert (
        (status, out) == (2, "")
        and says in err
        and err.startswith("specjax: ")
        and err.count("\n") == 1
    ), err
    assert not workdir.exists()
