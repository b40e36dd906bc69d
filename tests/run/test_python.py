"""A bench of objects in Python: what it writes, what it returns, and what it refuses."""

from __future__ import annotations

import json

import pytest

from specjax import accept, drafters, run
from specjax.bench import lossless, proofs
from specjax.errors import UserError
from specjax.models import hf
from specjax.report import inputs
from specjax.testing.findings import Finding, Report


@pytest.fixture(scope="module")
def loaded(target):
    return hf.load(target)


@pytest.fixture(scope="module")
def methods(loaded):
    """A method of the package, and one whose drafter is a user's own."""
    lookup = drafters.make("prompt_lookup", loaded.lm, gamma=2)

    def propose(*arguments):
        return lookup.propose(*arguments)

    own = lookup._replace(propose=propose, name="mine")
    return {"lookup": (lookup, accept.load("chain")), "own": (own, accept.load("match"))}


PROMPTS = {"code": ["def add(a", "sub(a, b"], "prose": ["return b + a, a - b"]}
SHORT = {"max_new_tokens": 8, "repeats": 1, "report": False, "show": False}


def test_objects_in_results_out(loaded, methods, tmp_path, capsys):
    failed = Report("mine", (Finding("all", False, ""),))
    proofs.write(failed, tmp_path / "proof.json")
    keys = SHORT | {"show": True, "trace_prompts": 1, "trace_tokens": 20}
    keys |= {"proof": [tmp_path / "proof.json"]}
    own, out = {"own": methods["own"]}, tmp_path / "out"
    results = run.measure(loaded, own, PROMPTS, workdir=out, **keys)
    assert results == json.loads((out / "results.json").read_text())
    rows = results["rows"]
    assert [row["category"] for row in rows] == [None, "code", "prose"]
    assert (rows[0]["method"], rows[0]["drafter"], rows[0]["accept"]) == ("own", "mine", "match")
    assert rows[0]["class_status"] == "declared" and rows[0]["lossless"]["passed"]
    facts = results["target"]
    assert facts["dtype"] == "float32" and len(facts["weights_sha256"]) == 64
    assert (results["max_new_tokens"], results["seed"], results["repeats"]) == (8, 0, 1)
    [trace], notices = inputs.read_traces(out / "trace.jsonl")
    assert sum(len(one["out"]) for one in trace["rounds"]) == 20 and not notices
    shown = " ".join(capsys.readouterr().out.split())
    assert "L1 declared" in shown and "testing.check_drafter and testing.check_accept" in shown
    assert "the proof of mine is not used: not all of its checks passed" in shown
    names = ("results.json", "config.json", "metrics.jsonl", "trace.jsonl")
    assert {path.name for path in out.iterdir()} == set(names)


@pytest.mark.slow
def test_several_methods_a_proof_and_the_report(loaded, methods, tmp_path, capsys):
    passed = Report("mine", (Finding("all", True, ""),), "drafter")
    keys = SHORT | {"report": True, "show": True, "proof": [passed], "batch_sizes": (1, 2)}
    results = run.measure(loaded, methods, ["def add(a", "sub("], workdir=tmp_path / "out", **keys)
    whole = [(row["method"], row["batch_size"]) for row in results["rows"]]
    assert whole == [("lookup", 1), ("own", 1), ("lookup", 2), ("own", 2)]
    assert {row["class_status"] for row in results["rows"]} == {"proven"}
    shown = capsys.readouterr().out
    assert "L1 proven" in shown and "declared" not in shown and "report.html" in shown
    assert {"plots", "report.html"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.slow
def test_a_failed_lossless_check_is_an_error_after_everything_is_written(
    loaded, methods, tmp_path, monkeypatch
):
    bad = Finding("greedy-identity", False, "0/1 prompts")
    monkeypatch.setattr(lossless, "greedy_identity", lambda *_: bad)
    keys = SHORT | {"trace_prompts": 0}
    with pytest.raises(run.NotLossless, match="lookup is not lossless: 0/1 prompts"):
        run.measure(loaded, {"lookup": methods["lookup"]}, ["def"], workdir=tmp_path / "a", **keys)
    assert (tmp_path / "a" / "results.json").exists()


@pytest.mark.fast
def test_mistakes_write_nothing(loaded, methods, tmp_path):
    (tmp_path / "trained" / "model").mkdir(parents=True)
    long = loaded.config.max_positions
    for changes, message in [
        ({"methods": {}}, "methods must be a mapping with at least one name"),
        ({"methods": {"a": methods["own"][:1]}}, "method a is an object of type tuple"),
        ({"prompts": []}, "there are no prompts; give at least one"),
        ({"prompts": "def"}, "prompts is one text; it must be a list"),
        ({"prompts": ["def", ""]}, "prompt 2 is empty"),
        ({"batch_sizes": (2,)}, "the batch size is 2 and there are 1 prompts"),
        ({"batch_sizes": (1, 1)}, "batch_sizes is (1, 1); give each value once"),
        ({"temperatures": ()}, "temperatures is empty; it must have values"),
        ({"temperatures": ("warm",)}, "temperatures is 'warm'; it must be a number >= 0"),
        ({"sampling": {"temperature": 1.0}}, "give temperatures instead"),
        ({"stop": ("x",)}, "measure has no option 'stop'; it takes max_new_tokens, seed, "),
        ({"repeats": 0}, "repeats is 0; it must be a whole number >= 1"),
        ({"max_new_tokens": long}, f"the model has {long} positions"),
        ({"proof": [3]}, "proof has an object of type int"),
        ({"proof": ["none.json"]}, "the proof none.json cannot be read"),
        ({"workdir": tmp_path / "trained"}, "holds a training run (model), which"),
    ]:
        keys = {"methods": methods, "prompts": ["def"], "workdir": tmp_path / "no", **SHORT}
        with pytest.raises(UserError) as error:
            run.measure(loaded, **keys | changes)
        assert message in str(error.value) and "\n" not in str(error.value), changes
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]
