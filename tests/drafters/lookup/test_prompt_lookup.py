"""Prompt lookup against a plain Python search: many random texts of a small alphabet, all rules."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.lookup import prompt_lookup
from specjax.errors import UserError
from specjax.sampling import make_sampling
from specjax.testing import tabular
from specjax.types import Context

pytestmark = pytest.mark.fast

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "prompt_lookup": ("prompt_lookup", {"gamma": 2, "max_ngram": 2}, ("block",)),
}
ROWS, SLOTS = 10_000, 24


def search(text, gamma, max_ngram, min_ngram=1, match="earliest", partial=True, overlap=True):
    """The continuation that the rule proposes: longest n-gram first, then earliest or latest."""
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        ends = [
            e
            for e in ends
            if (partial or e + gamma <= len(text)) and (overlap or e < len(text) - n)
        ]
        if ends:
            end = ends[0] if match == "earliest" else ends[-1]
            return text[end : end + gamma]
    return []


def original(text, gamma, max_ngram):
    """The published demo: windows from the left, no self-match, a continuation of gamma tokens."""
    for n in range(max_ngram, 0, -1):
        for start in range(len(text) - n + 1):
            end = start + n
            if text[start:end] == text[-n:] and end + gamma <= len(text) and end < len(text) - n:
                return text[end : end + gamma]
    return []


def transformers(text, gamma, max_ngram):
    """``PromptLookupCandidateGenerator``: the first matching window before the last token."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        for start in range(len(text) - n + 1):
            if text[start : start + n] == text[-n:] and start + n < len(text):
                return text[start + n : start + n + gamma]
    return []


def vllm(text, gamma, max_ngram, min_ngram):
    """The failure function of the reversed text.

    The longest n-gram in range, at its latest reversed position, which is the earliest.
    """
    back, best, place, lps = text[::-1], 0, 0, [0]
    for i in range(1, len(back)):
        k = lps[i - 1]
        while k and (back[k] != back[i] or k == max_ngram):
            k = lps[k - 1]
        k += back[k] == back[i]
        lps.append(k)
        if k >= max(best, 1):
            best, place = k, i
    if best < min_ngram:
        return []
    start = len(text) - 1 - place + best
    return text[start : start + gamma]


def texts(seed):
    rng = np.random.default_rng(seed)
    length = rng.integers(1, SLOTS + 1, ROWS)
    tokens = rng.integers(0, 1 << 30, (ROWS, SLOTS)) % rng.integers(1, 5, ROWS)[:, None]
    return tokens, length


def compare(find, oracle, seed=0):
    tokens, length = texts(seed)
    drafted, valid = jax.jit(jax.vmap(find))(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32)
    )
    drafted, valid, proposals = np.asarray(drafted), np.asarray(valid), 0
    for row in range(ROWS):
        expected = oracle(tokens[row, : length[row]].tolist())
        assert drafted[row][valid[row]].tolist() == expected
        assert valid[row].tolist() == [True] * len(expected) + [False] * (
            valid.shape[1] - len(expected)
        )
        proposals += bool(expected)
    assert proposals > ROWS / 10


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("match", ["earliest", "latest"])
@pytest.mark.parametrize("max_ngram, gamma", [(1, 1), (3, 4), (5, 10), (30, 10)])
def test_equals_the_plain_search(max_ngram, gamma, match, partial):
    keys = {"gamma": gamma, "max_ngram": max_ngram, "match": match, "partial": partial}
    compare(
        functools.partial(prompt_lookup.lookup, **keys),
        lambda text: search(text, **keys),
        max_ngram * gamma,
    )


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize(
    ("rule", "oracle"), [("original", original), ("transformers", transformers), ("vllm", vllm)]
)
def test_named_rules_equal_their_programs(rule, oracle, gamma):
    keys = prompt_lookup.RULES[rule] | {"gamma": gamma}
    sizes = (keys["max_ngram"], keys["min_ngram"]) if rule == "vllm" else (keys["max_ngram"],)
    compare(
        functools.partial(prompt_lookup.lookup, **keys), lambda text: oracle(text, gamma, *sizes)
    )
    assert prompt_lookup.make(tabular(5), rule=rule).nodes == prompt_lookup.RULES[rule]["gamma"]


def test_min_ngram():
    keys = {"gamma": 4, "max_ngram": 4, "min_ngram": 3, "match": "latest"}
    compare(functools.partial(prompt_lookup.lookup, **keys), lambda text: search(text, **keys))


def test_a_single_equal_token_is_no_match_by_default():
    """Sizes that are given are searched down to 1."""
    text = Context(jnp.asarray([[3, 1, 4, 3], [3, 1, 3, 1]]), jnp.asarray([4, 4]), make_sampling(2))
    for keys, drafted in (({}, [0, 2]), ({"max_ngram": 1}, [3, 2]), ({"min_ngram": 1}, [3, 2])):
        drafter = prompt_lookup.make(tabular(5), gamma=4, **keys)
        draft, _ = drafter.propose(None, None, text, ())
        assert draft.valid.sum(1).tolist() == drafted, keys


def test_skip_and_periodic():
    find = functools.partial(prompt_lookup.lookup, gamma=5, max_ngram=3)

    def draft(text, **keys):
        tokens = jnp.asarray(text + [7] * (16 - len(text)), jnp.int32)
        drafted, valid = find(tokens, jnp.asarray(len(text)), **keys)
        return np.asarray(drafted)[np.asarray(valid)].tolist()

    # The copy has 9 where the original has 3.
    changed = [1, 2, 3, 4, 5, 6, 1, 2, 9]
    assert draft(changed) == []
    assert draft(changed, skip=True) == [4, 5, 6, 1, 2]
    # A direct match has priority.
    assert draft([1, 2, 3, 1, 2], skip=True) == [3, 1, 2]
    assert draft([9], skip=True) == draft([], skip=True) == []
    assert draft([5, 1, 2, 1, 2], match="latest") == [1, 2]
    assert draft([5, 1, 2, 1, 2], match="latest", periodic=True) == [1, 2, 1, 2, 1]


def test_invalid_keys_are_refused():
    target = tabular(3)
    for keys, message in [
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"max_ngram": 2, "min_ngram": 3}, "max_ngram is 2 and min_ngram 3"),
        ({"rule": "hf"}, "rule is 'hf'; it must be one of specjax, original, transformers, vllm"),
        ({"match": "first"}, "match is 'first'"),
        ({"periodic": True, "partial": False}, "periodic is True and partial False"),
        ({"periodic": True, "rule": "original"}, "periodic is True and partial False"),
    ]:
        with pytest.raises(UserError, match=message):
            prompt_lookup.make(target, **keys)
    # The rule's own value of partial is not a mistake of the user.
    assert prompt_lookup.make(target, rule="original").nodes == 10
    assert prompt_lookup.make(target, rule="original", partial=True, periodic=True).nodes == 10
