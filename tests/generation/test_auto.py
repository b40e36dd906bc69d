"""``tune`` and ``drafter="auto"``: what is kept, for what it counts, and that texts stay."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from commandline import GENERATE, ROOT

import specjax as sj
from specjax import generation, testing
from specjax.bench.methods import MethodChoice
from specjax.control import costs
from specjax.errors import UserError
from specjax.generation import auto
from specjax.generation.auto import Tried
from specjax.run import bench
from specjax.types import is_lossless

LOOKUP = {"name": "prompt_lookup", "gamma": 3, "control": "fixed:3"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "choices"


@pytest.fixture
def folder(tmp_path):
    """Stands for a model: nothing reads its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def model(data_dir):
    return sj.load(data_dir / "models" / "stories260K")


@pytest.fixture
def no_gain_needed(monkeypatch):
    """The slower drafter is taken: the speed of the test does not matter."""
    monkeypatch.setattr(auto, "WORTH", 0.0)


CHOICE = (
    '[{"rows": %s, "sampled": false, "draft": "", "drafter": %s, "accept": "", "speedup": 2, '
    '"tried": {}}]'
)
# Files that were changed by hand.
BY_HAND = [CHOICE % each for each in (('"4"', '{"name": "sam"}'), (1, "{}"), (1, "1"))]


def tried(speed, drafter=LOOKUP, accept="match", **keys):
    return Tried(drafter["name"], drafter | keys, accept, speed)


@pytest.mark.fast
def test_for_what_a_choice_counts(folder):
    """The device, the weights, their dtype, the kind of sampling, up to the measured rows."""
    assert auto.known(folder, "", 1, False) is None
    chosen = auto.keep(folder, 4, False, [tried(1.1), tried(1.5, gamma=5)])
    assert (chosen.drafter["gamma"], chosen.speedup, chosen.accept) == (5, 1.5, "match")
    auto.keep(folder, 2, False, [tried(1.3, gamma=2)])
    auto.keep(folder, 4, True, [tried(1.2, gamma=4)])
    found = {
        (rows, sampled): auto.known(folder, "", rows, sampled)
        for rows in (1, 2, 3, 4, 5)
        for sampled in (False, True)
    }
    gammas = {key: each and each.drafter["gamma"] for key, each in found.items()}
    wanted = {1: (2, 4), 2: (2, 4), 3: (5, 4), 4: (5, 4), 5: (None, None)}
    assert gammas == {(n, bool(i)): each for n, own in wanted.items() for i, each in enumerate(own)}
    assert auto.known(folder, "", 2, False, "bfloat16") is None
    auto.keep(folder, 2, False, [tried(1.2, gamma=3)], dtype="float32 int8")
    assert auto.known(folder, "", 2, False, "float32 int8").drafter["gamma"] == 3
    assert auto.known(folder, "", 2, False).drafter["gamma"] == 2
    # Another folder with the same files, and other weights in the same folder, are other models.
    (folder / "model.safetensors").write_bytes(b"")
    assert auto.known(folder, "", 1, False) is None
    os.utime(folder / "model.safetensors", ns=(1, 1))
    auto.keep(folder, 1, False, [tried(1.4)])
    assert auto.known(folder, "", 1, False) is not None
    os.utime(folder / "model.safetensors", ns=(2, 2))
    assert auto.known(folder, "", 1, False) is None


@pytest.mark.fast
def test_which_classes_are_kept():
    kept = [
        [is_lossless(each, sampled) for sampled in (False, True)] for each in ("L1", "L2", "L3")
    ]
    assert kept == [[True, True], [True, False], [False, False]]


def test_keys_that_are_read_again_make_the_same_method(model):
    """Otherwise each call of ``generate_text`` would compile anew."""
    keys = '{"name": "escalate", "drafters": [{"name": "prompt_lookup", "gamma": 2}]}'
    assert model.method(json.loads(keys)) is model.method(json.loads(keys))
    other = keys.replace("2", "3")
    assert model.method(json.loads(keys)) is not model.method(json.loads(other))


@pytest.mark.fast
def test_a_profile_by_nodes_is_kept(folder, tmp_path):
    path, sizes = tmp_path / "profile.json", {2: costs.linear(7, 0.1, 0.1, 0.5, costs.NODES)}
    value = costs.Profile(costs.device(), "t", "trie", sizes, costs.NODES).to_json()
    path.write_text(json.dumps(value))
    keys = {"name": "trie", "nodes": 7, "control": f"budget:profile={path}"}
    text = auto.keep(folder, 2, False, [tried(1.5, keys)]).drafter["control"]
    assert costs.read(text.removeprefix("budget:profile=")).unit == costs.NODES


@pytest.mark.fast
def test_another_device_is_another_choice(folder, monkeypatch):
    auto.keep(folder, 1, False, [tried(1.4)])
    monkeypatch.setattr(auto, "device", lambda: "another one")
    assert auto.known(folder, "", 1, False) is None


@pytest.mark.fast
@pytest.mark.parametrize(("speed", "name"), [(1.019, "none"), (1.02, "prompt_lookup")])
def test_a_drafter_that_gains_nothing_is_not_taken(folder, speed, name):
    chosen = auto.keep(folder, 1, True, [tried(speed), tried(0.5, {"name": "sam"})])
    assert chosen.drafter["name"] == name and chosen == auto.known(folder, "", 1, True)
    assert chosen.tried == {"prompt_lookup": speed, "sam": 0.5}
    assert f"prompt_lookup {speed:.2f}x, sam 0.50x" in chosen.text
    assert ("plain decoding" in chosen.text) == (name == "none")


@pytest.mark.fast
def test_without_the_draft_model_the_best_lookup_counts(folder, tmp_path):
    """A choice with a draft model is for those who have it; the name may be that of a workdir."""
    (tmp_path / "draft" / "model").mkdir(parents=True)
    (tmp_path / "draft" / "model" / "config.json").write_text("{}")
    draft = {"name": "draft_model", "gamma": 4, "model": str(tmp_path / "draft")}
    chosen = auto.keep(folder, 1, True, [tried(1.2), tried(1.8, draft, "chain")])
    assert "model" not in chosen.drafter and chosen.draft == str(tmp_path / "draft" / "model")
    assert "are other texts" in chosen.text
    with_draft = auto.known(folder, str(tmp_path / "draft" / "model"), 1, True)
    other, without = (auto.known(folder, each, 1, True) for each in (str(tmp_path / "gone"), ""))
    assert with_draft is not None and with_draft.drafter["name"] == "draft_model"
    assert other == without and without is not None and without.drafter == LOOKUP
    assert "other texts" not in without.text
    # A draft model that was there and did not gain is remembered.
    auto.keep(folder, 1, False, [tried(1.2)], draft=str(tmp_path / "draft"))
    again = auto.known(folder, str(tmp_path / "draft" / "model"), 1, False)
    assert again is not None and again.drafter == LOOKUP and again.draft
    # A draft model alone says nothing about decoding without it.
    auto.keep(folder, 2, False, [tried(1.8, draft, "chain")])
    alone = auto.known(folder, "", 2, False)
    assert alone is None


@pytest.mark.fast
@pytest.mark.parametrize(
    "changes",
    [{"name": "gone"}, {"gone": 1}, {"control": "gone:3"}, {"control": "goodput:profile=/gone"}],
)
def test_what_this_version_cannot_make_does_not_count(folder, changes):
    auto.keep(folder, 2, False, [tried(1.2)])
    auto.keep(folder, 1, False, [tried(1.4)])
    file = auto.file_of(folder, "float32")
    choices = json.loads(file.read_text())
    choices[-1]["drafter"] |= changes
    file.write_text(json.dumps(choices))
    found = auto.known(folder, "", 1, False)
    assert found is not None and (found.rows, found.drafter) == (2, LOOKUP)


@pytest.mark.fast
def test_the_keys_of_a_head_have_its_files(folder):
    """A head is no draft model: its directory is kept with its other keys."""
    head = {"name": "medusa", "model": "heads"}
    assert auto.keep(folder, 1, False, [tried(1.4, head)]).drafter == head


@pytest.mark.fast
@pytest.mark.parametrize("place", ["a,b", "a~b"])
def test_a_folder_that_a_controller_cannot_name(folder, monkeypatch, tmp_path, place):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / place))
    with pytest.raises(UserError, match="set SPECJAX_CACHE"):
        auto.keep(folder, 1, False, [tried(1.4)])


@pytest.mark.fast
def test_paths_hold_in_any_working_directory(folder, tmp_path, monkeypatch):
    """Of several models each; a name of the Hub stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("draft", "tables"):
        (tmp_path / name).mkdir()
    draft, name = str(tmp_path / "draft"), "openai-community/gpt2"
    for drafter, key, value, expected in (
        ("ngram_lm", "tables", "tables", str(tmp_path / "tables")),
        ("rest", "datastore", "~/tables", str(tmp_path / "tables")),
        ("specinfer", "models", f"draft, {name}", f"{draft},{name}"),
        ("prompt_lookup", "scores", "draft", "draft"),
    ):
        each = Tried(drafter, {"name": drafter, key: value}, "chain", 1.5)
        assert auto._choice(folder / "x.json", 1, False, "", [each]).drafter[key] == expected


@pytest.mark.fast
def test_the_profile_goes_along(folder, tmp_path, cache):
    """For fewer rows the costs of the next larger number that was measured."""
    path = tmp_path / "profile.json"

    def write(cost):
        sizes = {size: costs.linear(3, cost * size, 0.1, 0.5) for size in (1, 4, 8)}
        value = costs.Profile(costs.device(), "t", "prompt_lookup", sizes).to_json()
        path.write_text(json.dumps(value))

    write(0.1)
    controlled = tried(1.5, control=f"goodput:{path},rows=open")
    text = auto.keep(folder, 5, False, [controlled]).drafter["control"]
    own = text.removeprefix("goodput:profile=").removesuffix(",rows=open")
    assert Path(own).parent == cache
    kept, measured = costs.read(own), costs.read(path)
    wanted = {1: 1, 2: 4, 3: 4, 4: 4, 5: 8}
    assert kept.batches == {size: measured.batches[near] for size, near in wanted.items()}
    # Other costs have another name: a method that was made keeps those that it was made with.
    assert auto.keep(folder, 5, False, [controlled]).drafter["control"] == text
    write(0.2)
    assert auto.keep(folder, 5, False, [controlled]).drafter["control"] != text


@pytest.mark.fast
@pytest.mark.parametrize(
    "text",
    ["", "[", "{}", '[{"rows": 1}]', "[1]", *BY_HAND],
)
def test_a_file_of_another_version_is_no_choice(folder, text):
    auto.keep(folder, 1, False, [tried(1.4)])
    auto.file_of(folder, "float32").write_text(text)
    assert auto.known(folder, "", 1, False) is None
    auto.keep(folder, 1, False, [tried(1.4)])
    assert auto.known(folder, "", 1, False) is not None


def test_a_seeded_text_is_that_of_plain_decoding(model, no_gain_needed):
    """``generate_text`` takes what ``tune`` kept, for these rows and this kind of sampling."""
    prompts, keys = ["Once upon a time", "Tom and Lily"], {"max_new_tokens": 24, "seed": 3}
    plain = sj.generate_text(model, prompts, drafter="none", temperature=0.9, **keys)
    for name in (None, "auto"):
        found = sj.generate_text(model, prompts, drafter=name, temperature=0.9, **keys)
        assert found.completions == plain.completions and found.drafter == "none"
    lines: list[str] = []
    chosen = sj.tune(
        *(model, prompts),
        methods={"lookup": LOOKUP | {"min_ngram": 1, "accept": "match"}},
        max_new_tokens=16,
        temperature=0.9,
        batch_size=2,
        repeats=1,
        report=lines.append,
    )
    assert chosen.drafter == LOOKUP | {"min_ngram": 1} and chosen.rows == 2 and chosen.sampled
    assert list(chosen.tried) == ["lookup"] and "kept after" in lines[-1]
    for name in (None, "auto"):
        found = sj.generate_text(model, prompts, drafter=name, temperature=0.9, **keys)
        assert found.drafter == "prompt_lookup" and found.texts == plain.texts
        assert found.counts.rounds < sum(len(each.tokens) for each in found.completions)
    pieces = sj.stream_text(model, prompts[0], temperature=0.9, **keys)
    assert "".join(pieces) == plain.texts[0]
    # Not measured: greedy texts, three rows. A rule of one's own is for one's own drafter.
    for how in ({"temperature": 0.0}, {"temperature": 0.9, "n": 2}):
        assert sj.generate_text(model, prompts, **how, **keys).drafter == "none"
    own = sj.generate_text(model, prompts, accept="match", temperature=0.9, **keys)
    assert own.drafter == "none"


def test_the_draft_model_of_load_is_used(target, draft, no_gain_needed):
    """The keys that are kept have no path, so the loaded model drafts."""
    pair = sj.load(target, draft=draft)
    method = {"draft": {"name": "draft_model", "gamma": 2, "control": "fixed:2"}}
    how = {"max_new_tokens": 8, "repeats": 1, "report": lambda line: None}
    chosen = generation.tune(pair, ["def add"], methods=method, **how)
    assert chosen.drafter == method["draft"] and chosen.draft == str(Path(draft).resolve())
    text = sj.generate_text(pair, "def add", max_new_tokens=8)
    assert text.drafter == "draft_model"
    assert text.texts == sj.generate_text(pair, "def add", max_new_tokens=8, drafter="none").texts
    assert sj.generate_text(sj.load(target), "def add", max_new_tokens=8).drafter == "none"
    # What was measured without the draft model does not replace it, unless "auto" is asked for.
    auto.keep(target, 2, False, [tried(1.5)])
    for name, drafter in ((None, "draft_model"), ("auto", "prompt_lookup")):
        texts = sj.generate_text(pair, ["def add"] * 2, max_new_tokens=8, drafter=name)
        assert texts.drafter == drafter


def test_a_profile_is_measured(model, cache, no_gain_needed):
    """Without a controller the method gets goodput, with costs that were measured here."""
    prompts = ["Once upon a time"] * 2
    methods = {"lookup": {"name": "prompt_lookup", "gamma": 1, "accept": "match"}}
    how = {"max_new_tokens": 8, "repeats": 1, "report": lambda line: None}
    chosen = sj.tune(model, prompts, methods=methods, batch_size=2, **how)
    name, _, path = chosen.drafter["control"].partition(":profile=")
    assert name == "goodput" and costs.read(path).batches.keys() == {1, 2}
    assert Path(path).parent == cache
    # One row has a profile too.
    assert sj.generate_text(model, prompts[0], max_new_tokens=4).drafter == "prompt_lookup"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"batch_size": 2}, "batch_size is 2 and there are 1 prompts; give more"),
        ({"batch_size": 0}, "batch_size"),
        ({"repeats": 0}, "repeats"),
        ({"temperature": -1.0}, "temperature"),
        ({"methods": {"x": {"name": "prompt_lokup"}}}, "prompt_lookup"),
        ({"methods": {}}, "methods has none"),
        ({"methods": ["prompt_lookup"]}, "methods has none"),
        ({"methods": {"x": "prompt_lookup"}}, "method x is 'prompt_lookup'; it must hold keys"),
        ({"methods": {"x": LOOKUP | {"params": object()}}}, "method x is .* texts and numbers"),
        ({"methods": {"x": LOOKUP | {"accept": "lenient"}}}, "lenient, which changes the law"),
        ({"methods": {"x": LOOKUP | {"control": "ltd"}}}, "is fitted to prompts that are not meas"),
    ],
)
def test_a_mistake_is_one_line(model, keys, message, cache):
    with pytest.raises(UserError, match=message) as error:
        sj.tune(model, "Once", report=lambda line: None, **keys)
    assert "\n" not in str(error.value) and not cache.exists()


# The command line --------------------------------------------------------------------------------


def test_a_rule_with_keys_is_not_kept(monkeypatch, folder):
    """What is kept has the name of a rule alone."""
    choices = {
        "plain": MethodChoice(LOOKUP, "chain", {}),
        "keys": MethodChoice(LOOKUP, "coupled", {"anything": 1}),
        "warm": MethodChoice(LOOKUP, "chain", {}, warm=True),
    }
    common = {"temperature": 0.0, "batch_size": 1, "category": None, "class": "L1", "speedup": 2.0}
    rows = [{"method": name} | common for name in choices]
    found = []
    monkeypatch.setattr(auto, "keep", lambda *args, **_: found.append(args))
    settings = SimpleNamespace(methods=choices, dtype="float32", weights="")
    bench._kept(settings, SimpleNamespace(directory=folder), SimpleNamespace(rows=rows), folder)
    assert [[each.label for each in args[3]] for args in found] == [["plain"]]


def test_auto_of_a_model_without_parameters():
    """A model in memory may be a function: "auto" finds nothing, and writes plainly."""
    table, lm = jax.random.normal(jax.random.key(0), (4, 3, 3)), testing.tabular(3)
    own = lm._replace(apply=lambda _, *given: lm.apply(table, *given))
    model = sj.Model.from_lm(own, {})
    given = {"max_new_tokens": 4, "temperature": 0.0}
    texts = [sj.generate_text(model, [[1]], drafter=name, **given) for name in ("auto", "none")]
    assert len({tuple(each.completions[0].tokens) for each in texts}) == 1


def test_a_bench_keeps_the_fastest_and_generate_takes_it(cli, target, tmp_path, no_gain_needed):
    prompts = tmp_path / "p.txt"
    prompts.write_text("def add\nreturn a + b\n")
    bench = (
        f"--config={ROOT}/configs/auto.py",
        *(f"--config.target={target}", f"--config.prompts={prompts}", "--config.report=False"),
        *("--methods=prompt_lookup", "--config.max_new_tokens=8", "--config.accept=match"),
        *("--config.grid.methods.prompt_lookup.gamma=1", "--config.grid.batch_sizes=(1,2)"),
    )
    status, out, err, _ = cli(*bench)
    assert (status, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("kept for drafter.name=auto: ")]
    assert ["in batches of 1" in line for line in lines] == [True, False]
    common = [GENERATE, f"--config.target={target}", "--config.max_new_tokens=8"]
    # Where the folder cannot be written a line says so, and the results count.
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(tmp_path / "file"))
        status, out, err, workdir = cli(*bench, "--config.again=True")
    assert (status, err) == (0, "") and (workdir / "results.json").exists()
    [line] = [line for line in out.splitlines() if line.startswith("kept for drafter.name=auto: ")]
    assert line.startswith("kept for drafter.name=auto: nothing: ") and "file/choices" in line
    texts = {}
    for name in ("auto", "none"):
        args = [*common, f"--config.prompts={prompts}", f"--config.drafter.name={name}"]
        status, out, _, workdir = cli(*args, "--config.batch_size=2", workdir=tmp_path / name)
        assert status == 0
        results = json.loads((workdir / "results.json").read_text())
        texts[name] = results["rows"][0]["method"], results["token_ids"]
        assert ("auto: prompt_lookup (in batches of 2: prompt_lookup" in out) == (name == "auto")
    assert texts["auto"] == ("prompt_lookup", texts["none"][1])
    # Nothing was measured for three rows, and with sampling.
    prompts.write_text("def add\nreturn a + b\nreturn\n")
    for more in ("--config.batch_size=3", "--config.sampling.temperature=0.5"):
        args = [*common, f"--config.prompts={prompts}", "--config.drafter.name=auto", more]
        status, out, _, workdir = cli(*args, workdir=tmp_path / "plain")
        assert status == 0 and "auto: plain decoding; nothing was measured" in out
        assert json.loads((workdir / "results.json").read_text())["rows"][0]["method"] == "none"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        ("generate", ["drafter.gamma=3"], "auto, which has no gamma; leave it out"),
        ("bench", [], "auto, which is for modes generate and chat"),
        ("generate", ["beams.count=2"], "for one device, without beams"),
        ("generate", ["mesh=data:2"], "for one device, without beams"),
    ],
)
def test_auto_has_no_keys_and_is_not_measured(cli, target, config, args, message):
    status, _, err, workdir = cli(
        f"--config={ROOT}/configs/{config}.py",
        *(f"--config.target={target}", "--config.prompt=def", "--config.drafter.name=auto"),
        *(f"--config.{each}" for each in args),
    )
    assert status == 2 and message in err and len(err.splitlines()) == 1 and not workdir.exists()


def test_auto_takes_a_lookup_that_was_faster_than_the_draft_model(cli, target):
    slow = {"name": "draft_model", "gamma": 2, "model": str(target)}
    auto.keep(target, 1, False, [tried(1.5), tried(1.2, slow, "chain")])
    args = [GENERATE, f"--config.target={target}", "--config.prompt=def"]
    args += ["--config.drafter.name=auto", f"--config.drafter.model={target}"]
    status, out, err, _ = cli(*args, "--config.max_new_tokens=4")
    assert (status, err) == (0, "") and "auto: prompt_lookup (in batches of 1" in out


@pytest.mark.fast
def test_drafters_of_drafters_are_not_kept(model):
    """What is kept has one draft model, or none."""
    nested = {"name": "escalate", "drafters": {"a": {"name": "sam"}}}
    with pytest.raises(UserError, match="method x has drafters in it, which are not kept"):
        sj.tune(model, ["Once"], methods={"x": nested})
    row = {"method": "x", "temperature": 0.0, "category": None, "class": "L1"}
    settings = SimpleNamespace(methods={"x": MethodChoice(nested, "chain", {})})
    measured = SimpleNamespace(rows=[row | {"batch_size": 1, "speedup": 2.0}])
    kept = importlib.import_module("specjax.run.bench")._kept
    assert kept(settings, None, measured, None) == []
