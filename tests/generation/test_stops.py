"""Stop strings: where a text is cut, and that nothing else of it changes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import accept, decode, drafters, rng, sampling
from specjax.errors import UserError
from specjax.generation import stops
from specjax.types import ModelParams

# Token -> its bytes: parts of characters, characters, and several of them.
PIECES = [b"a", b"b", b"ab", b"ba", b"\n", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"c a"]


def spell(ids):
    """A byte-level decoder."""
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def right(text, stop):
    """The same cut, one character at a time."""
    for end in range(len(text) + 1):
        here = [each for each in stop if text[:end].endswith(each)]
        if here:
            longest = max(here, key=len)
            return text[: end - len(longest)], longest
    return text, None


tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
texts = st.sampled_from(["a", "ab", "bab", "é", "€", "b\nc", "c a", "aéb", "zz", "abcabcabc"])


@pytest.mark.fast
@given(ids=tokens, stop=st.lists(texts, min_size=1, max_size=3), data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_cut_is_at_the_first_complete_stop_string(ids, stop, data):
    """Also across tokens and parts of characters, however the tokens arrive."""
    text, which = right(spell(ids), stop)
    whole = stops.cut(ids, stop, spell)
    assert (whole.text, whole.stop) == (text, which)
    # The tokens are the shortest beginning that completes the stop string.
    if which is None:
        assert whole.tokens == len(ids)
    else:
        assert which in spell(ids[: whole.tokens]) or spell(ids[: whole.tokens]).endswith("\ufffd")
        assert right(spell(ids[: whole.tokens - 1]).rstrip("\ufffd"), stop)[1] is None
    row, rest, shown = stops.Row([], spell, tuple(stop)), list(ids), ""
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        row.add(rest[:count], last=count == len(rest))
        assert row.settled.startswith(shown)
        rest, shown = rest[count:], row.settled
    row.add((), last=True)
    assert row.cut() == whole and text.startswith(shown)


@pytest.mark.fast
def test_a_part_of_a_character_is_no_text_yet():
    """Not even where the stop string is what a decoder gives for such bytes."""
    row = stops.Row([], spell, (stops.PART,))
    assert not row.add([0, 5]) and row.settled == ""
    assert not row.add([6]) and row.cut() == stops.Cut("a\xe9", 3, None)
    # A byte that nothing completes is one.
    assert row.add([5], last=True) and row.cut() == stops.Cut("a\xe9", 4, stops.PART)
    # It is complete with the token that follows, too.
    row = stops.Row([], spell, (stops.PART, "b"))
    assert not row.add([5]) and row.add([1])
    assert row.cut() == stops.Cut("", 1, stops.PART)
    # What was complete before is passed over.
    assert stops.find("aab", ["aa", "b"], 2) == (2, 3) and stops.find("ab", ["ab"], 2) is None


@pytest.mark.fast
@pytest.mark.parametrize("stop", ["", ["a", ""], [3]])
def test_wrong_stop_strings(stop):
    with pytest.raises(UserError, match="a text that is not empty"):
        stops.cut([1], stop, spell)


def test_rows_end_alone_and_their_text_is_the_cut_text(stories):
    """Ragged rows, greedy and sampled: the text is that of plain decoding, cut."""
    prompts = [stories.tokenizer.encode(text).ids for text in ("Once upon a time", "Tom", "It")]
    lengths, new, stop = [len(p) for p in prompts], 48, [". ", "She was", "\n"]
    drafter = drafters.make("prompt_lookup", stories.lm, gamma=3)
    params = ModelParams(stories.params, drafter.init_params(jax.random.key(0)))

    def begin():
        packed, length = decode.pack_prompts(prompts)
        how = sampling.make_sampling(3, [0.0, 0.8, 1.0])
        given = (stories.lm, drafter, params, packed, length, rng.row_keys(1, 3))
        return decode.prefill(*given, max_len=64, limit=length + new, sampling=how)

    # With sample-then-match a text has the noise of plain decoding.
    rule = accept.load("match")
    plain = decode.autoregressive(stories.lm, params, begin(), max_steps=new)
    whole = decode.outputs(plain, lengths)
    state, records, cuts = stops.decode_until(
        *(stories.lm, drafter, rule, params, begin(), prompts),
        stop=stop,
        decode_ids=stories.tokenizer.decode,
        max_steps=new,
    )
    for prompt, ids, each in zip(prompts, whole, cuts, strict=True):
        begun = len(stories.tokenizer.decode(prompt))
        text = stories.tokenizer.decode(prompt + ids)[begun:]
        assert each.text == right(text, stop)[0]
        assert each == stops.cut(ids, stop, stories.tokenizer.decode, prompt)
    assert sum(each.stop is not None for each in cuts) >= 2
    # No row goes on long after its stop string.
    assert np.asarray(records.emitted).shape[1] == 3
    counts = np.asarray(state.length) - lengths
    most = [each.tokens + stops.ROUNDS * (drafter.nodes + 1) for each in cuts]
    assert (counts <= most).all() and (counts < new).any()
