"""Cost profiles: files out and in, and what is refused."""

from __future__ import annotations

import json

import pytest

from specjax import control
from specjax.control import costs, goodput
from specjax.errors import UserError

pytestmark = pytest.mark.fast


def profile(**changes):
    """A profile of this device for one and eight rows."""
    one = costs.linear(4, 0.1, 0.05, 0.6)
    one = one._replace(sampled=one.sampled._replace(empty=1.2, finds=0.3, missed=0.1))
    facts = {"device": costs.device(), "target": "t", "drafter": "d", "batches": {1: one, 8: one}}
    return costs.Profile(**(facts | changes))


def test_a_file_gives_the_profile_again(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile().to_json()))
    assert costs.read(path) == profile()
    assert control.parse(f"goodput:{path}") and control.parse(f"bandit:profile={path}")
    assert not control.wants_profile(f"goodput:{path}")
    assert control.wants_profile("goodput:explore=0") and not control.wants_profile("heuristic:5")


def test_another_device_and_batch_are_refused():
    with pytest.raises(UserError, match="measured for batches of 1, 8 rows, and the batch has 4"):
        profile().check(4)
    with pytest.raises(UserError, match="the cost profile was measured on other, and this is"):
        profile(device="other").check(1)


@pytest.mark.parametrize(
    "change", ["[]", "{", '{"schema": 2}', '{"schema": 3, "batches": {"1": 3}}']
)
def test_a_file_that_is_no_profile_is_one_line(tmp_path, change):
    path = tmp_path / "p.json"
    path.write_text(change)
    with pytest.raises(UserError, match="cost profile") as caught:
        costs.read(path)
    assert "\n" not in str(caught.value)


def test_times_that_do_not_fit_are_refused(tmp_path):
    value = profile().to_json()
    value["batches"]["1"]["greedy"]["times"] = [1.0, -1.0]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match="times must be 5 positive numbers"):
        costs.read(path)
    value["batches"]["1"]["greedy"]["times"] = [5.0, 6.0, 7.0, 8.0, 9.0]
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match="times begin with 5; a round without a draft is 1"):
        costs.read(path)
    value = profile().to_json()
    value["batches"]["8"]["sampled"]["finds"] = 1.5
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match="finds between 0 and 1"):
        costs.read(path)


@pytest.mark.parametrize("name", ["goodput", "bandit", "calibrated"])
def test_a_key_beside_a_profile_counts(tmp_path, name):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile().to_json()))
    assert control.load(name, profile=str(path)).lengths == (0, 1, 2, 3, 4)
    assert control.load(name, profile=str(path), most=2).lengths == (0, 1, 2)
    with pytest.raises(UserError, match="the longest draft is 0"):
        control.load(name, profile=str(path), most=0)
    for cost in ("draft", "verify"):
        with pytest.raises(UserError, match=f"{cost} is 0.1, and the cost profile .* only one"):
            control.load(name, profile=str(path), **{cost: 0.1})


def test_acceptance_beside_a_profile(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile().to_json()))
    keys = goodput.Keys(profile=str(path), most=3, acceptance=0.25)
    own = costs.known(keys, 8).near(8)
    assert own.lengths == (0, 1, 2, 3) and own.sampled.acceptance == (0.25,) * 3
    assert own.sampled.times == profile().near(8).sampled.times[:4] and own.sampled.empty == 1.2
    value = profile().to_json()
    value["batches"] = {"1": value["batches"]["1"] | {"lengths": [0, 2, 3, 4]}}
    for kind in ("greedy", "sampled"):
        own = value["batches"]["1"][kind]
        own["times"] = own["times"][:1] + own["times"][2:]
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match="longest draft is 1, and the shortest one .* has 2"):
        control.load("goodput", profile=str(path), most=1)
