"""Who proposed each token, for objects in Python."""

from __future__ import annotations

import cases
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, bench, drafters
from specjax.bench import passes
from specjax.data.prompts import Prompt
from specjax.errors import UserError
from specjax.report import inputs, terminal
from specjax.types import ModelParams

V = 5
TARGET, DRAFT, _ = cases.models(V)
TABLE, OWN = cases.table(0, V), cases.table(1, V)


DRAFTER = drafters.make("draft_model", TARGET, model=DRAFT, params=OWN, gamma=2)
CHAIN = accept.load("chain")


def test_a_trace_without_a_job():
    prompt, how = [1, 2, 0, 3], {"max_new_tokens": 12, "temperature": 0.7}
    one = bench.trace((TARGET, TABLE), (DRAFTER, CHAIN), prompt, **how)
    assert inputs.trace_problem(one) is None and inputs.has_probabilities(one)
    assert (one["method"], one["prompt"]) == ("draft_model", " 1 2 0 3")
    pair = ModelParams(TABLE, OWN)
    job = passes.Job(TARGET, TABLE, [prompt], {"temperature": 0.7}, 1, 12, (), 0, 1, spell=str)
    [output] = passes.run_pass(job, passes.Method("x", DRAFTER, CHAIN, pair)).outputs
    out = [token for each in one["rounds"] for token in each["out"]]
    assert [token[1] for token in out] == output
    assert "".join(token[0] for token in out) == "".join(f" {token}" for token in output)
    assert terminal.trace(one).plain.startswith(" 1 2 0 3")
    # Parameters that are given replace those of the drafter: its own, or a pair's.
    other = cases.table(2, V)
    first, second = (
        bench.trace((TARGET, TABLE), (DRAFTER, CHAIN, params), np.array(prompt), name="x", **how)
        for params in (other, ModelParams(TABLE, other))
    )
    assert first == second != one | {"method": "x"}
    given = bench.trace((TARGET, TABLE), (DRAFTER, CHAIN, OWN), prompt, name="mine", **how)
    assert given == one | {"method": "mine"}


@pytest.mark.fast
def test_mistakes_are_one_clear_line():
    method, target = (DRAFTER, CHAIN), (TARGET, TABLE)
    controlled = drafters.make(
        "controlled", TARGET, drafters={"a": {"name": "prompt_lookup"}}, rate=0.5
    )
    for arguments, keys, message in [
        ((TARGET, method, [1]), {}, "target is an object of type LM; it must be what hf.load"),
        ((target, method[0], [1]), {}, "it must be (drafter, rule[, params])"),
        ((target, (method[1], method[0]), [1]), {}, "an object of type Accept where a Drafter"),
        ((target, (method[0], "chain"), [1]), {}, "an object of type str where a Accept belongs"),
        ((target, (method[0], accept.load("traversal")), "text"), {}, "has no tokenizer"),
        ((target, method, []), {}, "prompt 1 is empty or has an id outside 0..4"),
        ((target, method, Prompt("x", [9])), {}, "prompt 1 is empty or has an id outside 0..4"),
        ((target, method, [1]), {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ((target, method, [1]), {"temperature": -1}, "temperature is -1; it must be"),
        ((target, method, [1]), {"temperature": "hot"}, "temperature is 'hot'; it must be"),
        ((target, (controlled, method[1]), [1]), {"temperature": 1.0}, "temperature 0 only"),
    ]:
        with pytest.raises(UserError) as error:
            bench.trace(*arguments, **keys)
        assert message in str(error.value) and "\n" not in str(error.value)
    short = TARGET._replace(max_positions=8)
    with pytest.raises(UserError, match="that is 10, and the model has 8 positions"):
        bench.trace((short, jnp.zeros(1)), method, [1, 2], max_new_tokens=8)
