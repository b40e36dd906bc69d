"""Near ties: the gap of each greedy token to the largest logit, in ulps of the model's dtype."""

from __future__ import annotations

import math

import cases
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ModelParams, accept, drafters, testing
from specjax.bench import lossless, passes, summaries
from specjax.report import columns, terminal

V, GREEDY = 5, {"temperature": 0.0}
TARGET, TABLE = testing.tabular(V), cases.table(0, V)
PROMPTS = [[0, 1], [2], [1, 1, 0]]


def greedy(prompt, count, replaced=None):
    """The table's greedy text; at one place the second-best token."""
    table, text = np.asarray(TABLE), list(prompt)
    for place in range(count):
        earlier = text[-2] if len(text) > 1 else V
        order = np.argsort(-table[earlier, text[-1]])
        text.append(int(order[1 if place == replaced else 0]))
    return text[len(prompt) :]


EXPECTED = [greedy(prompt, 9) for prompt in PROMPTS]


def scored(outputs, settings, target, **options):
    texts = lossless.Texts(target, ModelParams(TABLE), PROMPTS, outputs, settings)
    return lossless.argmax_gap(texts, EXPECTED, **options)


def test_gaps_against_the_table():
    same = scored(EXPECTED, GREEDY, TARGET)
    assert (same["within"], same["identical"], same["largest"], same["different"]) == (1, 1, 0, 0)
    assert (same["tokens"], same["dtype"], same["first_difference"]) == (27, "float32", None)
    # The second prompt differs first, at token 2; the third one at token 4.
    other = [EXPECTED[0], greedy(PROMPTS[1], 9, 2), greedy(PROMPTS[2], 9, 4)]
    found = scored(other, GREEDY, TARGET)
    table, gaps, ulps = np.asarray(TABLE), [], []
    for prompt, output in zip(PROMPTS, other, strict=True):
        text = [*prompt, *output]
        for at in range(len(prompt), len(text)):
            row = table[text[at - 2] if at > 1 else V, text[at - 1]]
            gaps.append(row.max() - row[text[at]])
            ulps.append(gaps[-1] / np.spacing(np.abs(row.max())))
    assert sum(gap > 0 for gap in gaps) == 2
    assert found["largest"] == pytest.approx(max(gaps))
    assert found["largest_ulps"] == pytest.approx(max(ulps))
    assert found["within"] == found["identical"] == pytest.approx(25 / 27)
    assert found["different"] == 2
    first = found["first_difference"]
    assert (first["prompt"], first["token"]) == (1, 2)
    assert first["ulps"] == pytest.approx(ulps[9 + 2])
    # A text that ends early differs where it ends; a bias is part of the logits.
    short = [EXPECTED[0][:4], *EXPECTED[1:]]
    found = scored(short, GREEDY, TARGET)
    assert found["first_difference"] == {"prompt": 0, "token": 4, "ulps": None}
    biased = GREEDY | {"logit_bias": {EXPECTED[0][0]: -30.0}, "vocab_size": V}
    found = scored(EXPECTED, biased, TARGET)
    assert found["identical"] < 1 and found["largest"] > 20


def narrow(params, tokens, cache, layout=None, block=None):
    out, block = TARGET.apply(params, tokens, cache, layout, block)
    return out._replace(hidden=out.hidden.astype(jnp.bfloat16)), block


def test_a_bfloat16_model_has_the_ulps_of_bfloat16():
    """The same float32 logits, of a model that computes in bfloat16: its spacing has 7 bits."""
    target = TARGET._replace(apply=narrow, unembed=None)
    outputs = [greedy(PROMPTS[0], 9, 3), *EXPECTED[1:]]
    found = scored(outputs, GREEDY, target)
    place = [*PROMPTS[0], *outputs[0]]
    row = np.asarray(TABLE)[place[3], place[4]]
    gap, best = row.max() - row[place[5]], row.max()
    assert found["dtype"] == "bfloat16" and found["largest"] == pytest.approx(gap)
    ulps = gap / 2.0 ** (math.floor(math.log2(abs(best))) - 7)
    assert found["largest_ulps"] == found["first_difference"]["ulps"] == pytest.approx(ulps)
    for most, within in ((ulps * 1.01, 1.0), (ulps * 0.99, 26 / 27)):
        again = scored(outputs, GREEDY, target, ulps=most)
        assert again["within"] == pytest.approx(within)


def test_a_row_that_differs_has_the_sentence():
    method = passes.Method(
        "lookup", drafters.make("prompt_lookup", TARGET), accept.load("chain"), ModelParams(TABLE)
    )
    job = passes.Job(TARGET, TABLE, PROMPTS, GREEDY, 1, 9, (), 0, 1)
    plain = passes.run_pass(job, None)
    assert plain.outputs == EXPECTED
    run = passes.run_pass(job, method)
    wrong = run._replace(outputs=[greedy(PROMPTS[0], 9, 3), *run.outputs[1:]])
    [equal] = summaries.rows_of(job, method, [run], [plain], by_definition=False)
    [other] = summaries.rows_of(job, method, [run, wrong], [plain] * 2, by_definition=False)
    # Equal texts are scored where the target computes in bfloat16, whatever its parameters are.
    half = job._replace(target=TARGET._replace(apply=narrow, unembed=None))
    [scored] = summaries.rows_of(half, method, [run], [plain], by_definition=False)
    assert scored["argmax_gap"]["dtype"] == "bfloat16"
    assert equal["argmax_gap"] is None and columns.near_ties(equal) == ""
    assert other["lossless"]["passed"] is False
    sentence = columns.near_ties(other)
    assert sentence.startswith("lossless up to ties of 2 ulp of float32: NO (96.30% of 27 tokens; ")
    assert sentence.endswith("; first difference at token 3 of prompt 0)")
    assert f"lookup: {sentence}" in terminal.notes([equal, other])
    near = other["argmax_gap"] | {"within": 1.0, "largest_ulps": 1.5, "dtype": "bfloat16"}
    assert columns.near_ties(other | {"argmax_gap": near}).startswith(
        "lossless up to ties of 2 ulp of bfloat16: yes (100.00% of 27 tokens; the largest gap is "
    )


def rounding(params, tokens, cache, layout=None, block=None):
    """Logits of passes over several tokens are 1/8 larger for token 0."""
    out, block = TARGET.apply(params, tokens, cache, layout, block)
    more = jnp.where(jnp.arange(V) == 0, 0.125 * (tokens.shape[1] > 1), 0)
    hidden = out.hidden.astype(jnp.bfloat16)
    return out._replace(logits=out.logits + more, hidden=hidden), block


def test_the_gap_of_widths_is_that_of_the_probabilities():
    """Under the settings of sampling, at every output token, for every width; 0 without a gap."""
    how = {"temperature": 0.5, "top_k": 3}
    texts = lossless.Texts(
        TARGET._replace(apply=rounding), ModelParams(TABLE), PROMPTS, EXPECTED, how
    )
    table, distances = np.asarray(TABLE), []
    for prompt, output in zip(PROMPTS, EXPECTED, strict=True):
        text = [*prompt, *output]
        for at in range(len(prompt), len(text)):
            row = table[text[at - 2] if at > 1 else V, text[at - 1]]
            both = []
            for logits in (row, row + 0.125 * np.eye(V)[0]):
                kept = np.where(logits >= np.sort(logits)[-3], np.exp(logits / 0.5), 0)
                both.append(kept / kept.sum())
            distances.append(np.abs(both[0] - both[1]).sum() / 2)
    for width in (2, 3, 5, 40):
        found = lossless.width_gap(texts, width)
        assert found["mean"] == pytest.approx(np.mean(distances), rel=1e-4)
        assert found["largest"] == pytest.approx(max(distances), rel=1e-4)
        assert (found["tokens"], found["width"], found["dtype"]) == (27, width, "bfloat16")
    assert lossless.width_gap(texts, 1)["largest"] == 0
    assert lossless.width_gap(texts._replace(target=TARGET), 4)["largest"] < 1e-6
    sentence = columns.near_ties({"width_gap": found})
    assert sentence.startswith("in bfloat16 a pass over 40 tokens gives probabilities within 0.")
