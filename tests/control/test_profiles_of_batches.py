"""Controllers with measured costs, in loops whose rows do not come from one prefill."""

from __future__ import annotations

import json

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, sharding
from specjax.control import costs
from specjax.errors import UserError
from specjax.generation import texts
from specjax.generation.refill import decode_all
from specjax.types import ModelParams

PROMPTS = [[0, 1, 0, 1, 0], [2, 1], [1, 1, 1], [2, 0, 2, 0]]
BATCHES = (1, 2, 4)


def profile(path, batches):
    """Drafts cost nothing in batches of two or more rows, and are never worth it in one of one."""
    cheap, dear = costs.linear(2, 0.0, 0.0, 0.9), costs.linear(2, 5.0, 5.0, 0.1)
    each = {size: dear if size == 1 else cheap for size in batches}
    path.write_text(json.dumps(costs.Profile(costs.device(), "t", "d", each).to_json()))
    return path


def system(control):
    case = cases.real("prompt_lookup")
    drafter = drafters.make("prompt_lookup", case.target, gamma=2, control=control)
    return case.target, drafter, accept.load("deterministic"), case.params


def prefilled(parts, prompts, prefill=decode.prefill):
    target, drafter, _, params = parts
    packed, lengths = decode.pack_prompts(prompts)
    keys = rng.row_keys(3, range(len(prompts)))
    given = (target, drafter, params, packed, lengths, keys)
    return prefill(*given, max_len=packed.shape[1] + 8)


def drafted(parts, state, generate=decode.generate):
    target, drafter, rule, params = parts
    state, records = generate(target, drafter, rule, params, state, max_steps=8)
    return np.asarray(state.tokens).tolist(), int(np.asarray(records.drafted).sum())


@pytest.mark.parametrize(
    "name", by_default(["goodput:explore=0,", "bandit:"], ["goodput:explore=0,"])
)
def test_costs_are_those_of_the_batch_that_is_decoded(tmp_path, name):
    """Samples of one prompt, and rows that replace others: the state is made in a batch of one."""
    parts = system(f"{name}profile={profile(tmp_path / 'p.json', BATCHES)}")
    target, drafter, _, params = parts
    packed, lengths = decode.pack_prompts(PROMPTS[:1])
    given = (target, drafter, params, packed, lengths, rng.row_keys(3, range(2)), 2)
    options = {"sampling": sampling.make_sampling(2), "limit": jnp.repeat(lengths, 2) + 8}
    state = texts.prefill(*given, max_len=packed.shape[1] + 8, **options)
    _, several = drafted(parts, state)
    # In a batch of one, goodput would draft nothing.
    assert several > 0
    answers = list(decode_all(*parts, PROMPTS, batch_size=2, max_new_tokens=8, temperature=1.0))
    assert {answer.number for answer in answers} == set(range(4))


@pytest.mark.slow
def test_on_a_mesh_they_are_those_of_one_devices_rows(tmp_path):
    parts = system(f"goodput:{profile(tmp_path / 'p.json', BATCHES)}")
    mesh = sharding.make_mesh("data:1")
    target, drafter, rule, params = parts
    loops = sharding.loops(mesh)
    placed = sharding.place(mesh, target, params)
    parts = (target, drafter, rule, placed)
    state = prefilled(parts, PROMPTS, loops.prefill)
    texts, count = drafted(parts, state, loops.generate)
    parts = (target, drafter, rule, params)
    assert (texts, count) == drafted(parts, prefilled(parts, PROMPTS))


@pytest.mark.parametrize("inside", [False, True])
def test_a_batch_that_was_not_measured_is_refused(tmp_path, inside):
    control = f"goodput:{profile(tmp_path / 'p.json', (1, 8))}"
    target, drafter, rule, params = system(control)
    if inside:
        drafter = drafters.make("escalate", target, drafters=[drafter])
        params = ModelParams(params.target, drafter.init_params(jax.random.key(0)))
    parts = (target, drafter, rule, params)
    with pytest.raises(UserError, match="for batches of 1, 8 rows, and the batch has 2") as error:
        drafted(parts, prefilled(parts, PROMPTS[:2]))
    assert "\n" not in str(error.value)


def test_lengths_are_those_of_all_batches(tmp_path):
    sizes = {1: costs.linear(2, 0.1, 0.1, 0.5), 2: costs.linear(3, 0.1, 0.1, 0.5)}
    path = tmp_path / "p.json"
    value = costs.Profile(costs.device(), "t", "d", sizes)
    path.write_text(json.dumps(value.to_json()))
    with pytest.raises(UserError, match="has other lengths for other batch sizes"):
        costs.read(path)
