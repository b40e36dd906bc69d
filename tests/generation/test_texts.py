"""``load`` and ``generate_text``: any prompts, any method, several samples."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import arrays_of, made_up_state

import specjax as sj
from specjax import decode, generation, outcome, testing
from specjax.errors import UserError
from specjax.generation import texts
from specjax.models.lm import forward
from specjax.sampling import after_prompt


@pytest.fixture(scope="module")
def model(data_dir):
    return sj.load(data_dir / "models" / "stories260K")


KEYS: dict[str, Any] = {"max_new_tokens": 24, "drafter": {"name": "prompt_lookup", "gamma": 3}}


def test_ten_lines(model):
    """Texts, tokens, logprobs and the reason of the end; the functional API gives the same."""
    prompts = ["Once upon a time", "Tom and Lily"]
    result = sj.generate_text(model, prompts, stop=". ", logprobs=True, **KEYS)
    assert [each.prompt for each in result.completions] == [0, 1] and result.tau >= 1
    method, ids = model.method(KEYS["drafter"]), [model.tokenizer.encode(p).ids for p in prompts]
    packed, lengths = sj.pack_prompts(ids)
    state = sj.prefill(
        *(model.lm, method.drafter, method.params, packed, lengths, sj.row_keys(0, 2)),
        max_len=packed.shape[1] + 24,
        limit=lengths + 24,
        sampling=sj.make_sampling(2, 0.0),
        logprobs=True,
    )
    state, _ = sj.generate(
        *(model.lm, method.drafter, method.accept, method.params, state),
        max_steps=24,
        eos_id=model.eos_ids,
    )
    sizes = [len(each) for each in ids]
    for row, each in enumerate(result.completions):
        tokens = sj.outputs(state, sizes)[row]
        text = model.tokenizer.decode(ids[row] + tokens)[len(prompts[row]) :]
        assert each.text == text.split(". ")[0]
        assert each.finish == ("stop" if ". " in text else "length")
        assert each.tokens == tokens[: len(each.tokens)]
        own = sj.logprobs(state, sizes)[row][: len(each.tokens)]
        assert each.logprobs is not None
        np.testing.assert_allclose(each.logprobs, own, atol=1e-4)
    # The method is kept, so a second call compiles nothing.
    assert model.method(KEYS["drafter"]) is method


@pytest.fixture
def compiled():
    """The names of the programs that XLA has compiled since the list was cleared."""
    names: list[str] = []

    def note(event: str, duration_secs: float, **facts: Any) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(str(facts.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def test_other_calls_compile_nothing(model, compiled):
    """Ten calls after the first: what is data compiles nothing, another shape one large program."""
    prompt = "Once upon a time"
    sj.generate_text(model, prompt, **KEYS)
    assert any("_generate" in name for name in compiled)
    data: list[dict[str, Any]] = [
        {"max_new_tokens": 25},
        {"max_new_tokens": 64, "stop": ". "},
        {"max_new_tokens": 1, "stop": ["the", "\n"]},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.7, "seed": 4, "top_p": 0.9, "stop": "a"},
        {"ignore_eos": True},
    ]
    compiled.clear()
    for keys in data:
        sj.generate_text(model, prompt, **(KEYS | keys))
    assert compiled == []
    # (the call, its large programs): each time another length is data again.
    shapes: list[tuple[dict[str, Any], list[str]]] = [
        ({"logprobs": True}, ["_generate"]),
        ({"n": 2, "temperature": 1.0}, ["_generate", "_repeated"]),
    ]
    for keys, large in shapes:
        compiled.clear()
        sj.generate_text(model, prompt, **(KEYS | keys))
        known = [
            each
            for name in compiled
            for each in ("_generate", "_prefill", "_repeated")
            if each in name
        ]
        assert sorted(known) == large and len(compiled) <= 8
        compiled.clear()
        sj.generate_text(model, prompt, **(KEYS | keys | {"max_new_tokens": 31, "stop": "."}))
        assert compiled == []


@pytest.mark.fast
@pytest.mark.parametrize(
    ("positions", "draft", "prompt", "new", "sizes"),
    [
        (None, None, 5, 24, (64, 128)),
        (None, None, 65, 65, (128, 256)),
        (512, None, 5, 24, (64, 128)),
        (512, None, 5, 500, (64, 512)),  # not beyond the model's positions
        (512, None, 500, 12, (512, 512)),
        (512, 100, 5, 24, (64, 100)),  # nor beyond the draft model's
        (None, 100, 5, 24, (64, 100)),
        (512, 100, 90, 24, (114, 114)),  # the draft model says that it is too small
    ],
)
def test_buffers_have_size_classes(positions, draft, prompt, new, sizes):
    lm = lambda most: SimpleNamespace(lm=SimpleNamespace(max_positions=most))  # noqa: E731
    model = SimpleNamespace(draft=None if draft is None else lm(draft), **vars(lm(positions)))
    method = SimpleNamespace(drafter=SimpleNamespace(training=None))
    fake: Any = SimpleNamespace(model=model, method=method, max_new_tokens=new)
    assert texts._sizes(fake, [[1], [1] * prompt]) == sizes


def test_a_text_of_several_size_classes_is_that_of_the_loop(model):
    """The host looks at the rows after every 64 rounds, and nothing changes."""
    ids = model.tokenizer.encode("Once upon a time").ids
    how = {"temperature": 0.5, "seed": 2, "max_new_tokens": 100, "ignore_eos": True}
    [own] = sj.generate_text(model, ids, drafter="none", **how).completions
    method = model.method("none", temperature=0.5)
    state = sj.prefill(
        *(model.lm, method.drafter, method.params, *sj.pack_prompts([ids]), sj.row_keys(2, 1)),
        max_len=len(ids) + 100,
        sampling=sj.make_sampling(1, 0.5),
    )
    state, records = sj.generate(
        *(model.lm, method.drafter, method.accept, method.params, state), max_steps=100
    )
    assert records.emitted.shape == (128, 1) and int(records.emitted.sum()) == 100
    assert own.tokens == sj.outputs(state, [len(ids)])[0]


def test_a_rule_that_emits_nothing_is_an_error(model):
    """Also in ``generate_text``: the message names row and round."""
    method = model.method(KEYS["drafter"])
    nothing = lambda verdict: outcome.withdraw(verdict, verdict.count >= 0)  # noqa: E731
    rule = method.accept._replace(
        greedy=lambda draft, logits: nothing(method.accept.greedy(draft, logits)),
        sampled=lambda *given: nothing(method.accept.sampled(*given)),
    )
    fake: Any = SimpleNamespace(
        **{
            name: getattr(model, name)
            for name in ("lm", "draft", "tokenizer", "eos_ids", "target", "decode")
        },
        method=lambda *_, **__: method._replace(accept=rule),
    )
    with pytest.raises(UserError, match="row 0 got no token in round 0, and was neither done"):
        sj.generate_text(fake, "Once upon a time", **KEYS)


def test_a_sample_depends_on_its_own_numbers_only(model):
    """The same for another n, another batch and other prompts beside it."""
    prompts = ["Once upon a time", "One day"]
    how = {"temperature": 1.0, "seed": 3, **KEYS}
    four = sj.generate_text(model, prompts, n=2, **how).completions
    assert [(each.prompt, each.sample) for each in four] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({each.text for each in four}) == 4
    parts = sj.generate_text(model, prompts, n=3, batch_size=4, **how).completions
    kept = [each for each in parts if each.sample < 2]
    assert [each.tokens for each in kept] == [each.tokens for each in four]


@pytest.mark.fast
def test_keys_of_samples():
    keys = sj.sample_keys(5, 3, 4)
    assert (sj.sample_keys(5, 3, 2).reshape(3, 2) == keys.reshape(3, 4)[:, :2]).all()
    assert (keys.reshape(3, 4)[:, 0] == sj.row_keys(5, 3)).all()
    assert (sj.sample_keys(5, [2], 4) == keys.reshape(3, 4)[2]).all()
    raw = {tuple(np.asarray(x).tolist()) for x in jax.random.key_data(keys)}
    assert len(raw) == 12


def test_chats_token_ids_and_settings(model, data_dir, tmp_path):
    """A chat is rendered with the model's template; ids are taken as they are."""
    own = tmp_path / "chat"
    shutil.copytree(data_dir / "models" / "stories260K", own)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    chat = sj.load(own)
    turns = [{"role": "user", "content": "Once upon a time"}]
    ids = model.tokenizer.encode("Once upon a time", add_special_tokens=False).ids
    results = [
        sj.generate_text(m, p, repetition_penalty=1.3, min_new_tokens=4, banned=[430], **KEYS)
        for m, p in ((chat, turns), (chat, [turns]), (model, ids))
    ]
    assert results[0].texts == results[1].texts == results[2].texts
    assert 430 not in results[0].completions[0].tokens
    with pytest.raises(UserError, match="no chat template"):
        sj.generate_text(model, turns)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n": 2}, "all samples would be equal"),
        ({"n": 0}, "n is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 10**6}, "positions; shorten"),
        ({"stop": [""]}, "a stop string is ''"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"drafter": "draft_model"}, "needs a draft model"),
        ({"drafter": "nothing"}, "nothing"),
        ({"drafter": {"gamma": 3}}, "give a name"),
        ({"accept": "recursiv"}, "recursiv"),
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [[]]}, "prompt 0 is empty"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"banned": [512]}, "banned has the id 512"),
        ({"banned": [[1], [2]]}, "banned has a value for each row"),
        ({"logit_bias": [{1: 1.0}, None]}, "logit_bias has a value for each row"),
        ({"top_p": [0.5, 0.9]}, "top_p has a value for each row"),
        ({"top_q": 1}, "there is no setting 'top_q'; did you mean top_p or top_k"),
        ({"batchsize": 5}, "there is no setting 'batchsize'; did you mean batch_size?"),
        ({"max_tokens": 5}, "there is no setting 'max_tokens'; here it is max_new_tokens"),
        ({"xyz": 1}, "there is no setting 'xyz'; it has drafter, "),
        ({"repetition_penalty": "x"}, "repetition_penalty is 'x'; it must be in"),
        ({"logit_bias": {1: "x"}}, "its values must be numbers"),
        ({"temperature": "0.7"}, "temperature is '0.7'; it must be a number"),
        ({"stop": None}, "a stop string is None"),
        ({"drafter": 5}, "the drafter is 5"),
        ({"seed": 2**40}, "seed is 1099511627776; it must be .*>= 0, at most 4294967295"),
        ({"seed": 9**5000}, "seed is a number of about 4771 digits; it must be"),
        ({"prompts": 5}, "the prompts are 5"),
        ({"prompts": "a\ud800"}, "which UTF-8 cannot write"),
        ({"prompts": [[1.7, 2.2]]}, "prompt 0 is .*token ids"),
        ({"prompts": [["a"]]}, "prompt 0 is .*token ids"),
        ({"chat": "chatml"}, "no prompt is a chat"),
    ],
)
def test_wrong_arguments_are_one_line(model, keys, message):
    with pytest.raises(UserError, match=message) as error:
        sj.generate_text(model, keys.pop("prompts", "Once"), **keys)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"stop": ("the", ". "), "temperature": 0.0},
        {"temperature": 1.0, "seed": 7, "top_k": 40},
        {"temperature": 1.0, "drafter": "none", "max_new_tokens": 1},
    ],
)
def test_pieces_of_a_stream_are_the_text(model, keys):
    """The same text as at once, in more than one piece; none of a stop string."""
    keys = KEYS | {"accept": ""} | keys
    expected = sj.generate_text(model, "Tom and Lily", **keys)
    pieces = list(sj.stream_text(model, "Tom and Lily", **keys))
    assert "".join(pieces) == expected.texts[0] and all(pieces)
    assert keys["max_new_tokens"] == 1 or len(pieces) > 1
    with pytest.raises(UserError, match="stream_text takes one prompt, and 2 were given"):
        sj.stream_text(model, ["a", "b"])
    for wrong, message in (
        ({"seed": -1}, "seed is -1"),
        ({"max_new_tokens": 10**6}, "positions; shorten"),
        ({"top_p": 2.0}, "top_p"),
        ({"n": 2}, "there is no setting 'n'; it has drafter"),
    ):
        with pytest.raises(UserError, match=message):  # by the call
            sj.stream_text(model, "a", **wrong)


def test_arguments_of_the_loops_have_their_types(model):
    """A name, a swapped pair, no pair of parameters, keys for other rows: one line each."""
    method, (packed, lengths) = model.method(), sj.pack_prompts([[1, 2], [3]])
    keys, room = sj.row_keys(0, 2), {"max_len": 8}
    right = [model.lm, method.drafter, method.params, packed, lengths, keys]
    state = sj.prefill(*right, **room)
    for place, value, message in (
        (0, method.drafter, "target is of type Drafter; it must be of type LM: models"),
        (1, "none", "drafter is 'none'; it must be of type Drafter: drafters.make"),
        (2, model.params, "params is of type dict; it must be of type ModelParams"),
        (5, jax.random.key(0), r"keys are key<fry>\[\], and the prompt has 2 rows; rng.row_keys"),
        (5, 0, "keys are of type int, and the prompt has 2 rows"),
        (5, jnp.zeros((2, 2), jnp.uint32), r"keys are uint32\[2, 2\], and the prompt has 2 rows"),
        (5, sj.row_keys(0, 3), r"keys are key<fry>\[3\], and the prompt has 2 rows"),
    ):
        with pytest.raises(UserError, match=message):
            sj.prefill(*[value if i == place else x for i, x in enumerate(right)], **room)
    # Keys of another generator are keys too.
    other = [*right[:5], jax.random.split(jax.random.key(0, impl="rbg"), 2)]
    assert sj.prefill(*other, **room).length.shape == (2,)
    with pytest.raises(
        UserError, match="accept is 'chain'; it must be of type Accept: accept.load"
    ):
        sj.generate(model.lm, method.drafter, "chain", method.params, state, max_steps=4)


def test_decoding_is_plain_unless_a_drafter_is_asked_for(model):
    assert model.method().drafter.name == "none"
    assert generation.Model(model.target, model.target).method().drafter.name == "draft_model"
    assert sj.generate_text(model, "Once", max_new_tokens=8).tau == 1


def test_samples_have_the_prompt_of_their_row_and_settings_of_their_own():
    state, own = made_up_state(2, 0), made_up_state(6, 1)
    axes = tuple(0 for _ in jax.tree.leaves(state))
    # Of the made-up lengths and limits some rows have nothing to write.
    limit, samples = state.length.repeat(3) + np.asarray([-1, 0, 1] * 2, np.int32), 3
    rest = (limit, own.keys, own.sampling)
    after = texts._repeated(state, samples, axes, rest)
    assert np.array_equal(after.done, [True, True, False] * 2)
    # What penalties count as output begins after the prompt.
    assert np.array_equal(after.sampling.maps.prompt, after.length)
    expected = own.replace(limit=limit, done=after.done)
    expected = expected.replace(sampling=after_prompt(own.sampling, after.length))
    given, before = arrays_of(expected), arrays_of(state)
    for name, array in arrays_of(after).items():
        moved = name.startswith((".keys", ".limit", ".sampling", ".done"))
        assert np.array_equal(array, given[name] if moved else before[name].repeat(3, 0)), name


def test_a_prompt_is_read_with_the_settings_of_its_first_sample():
    given = {"limit": jnp.arange(6), "keys": jnp.arange(12).reshape(6, 2)}
    first = texts._firsts(given, 3)
    assert first["limit"].tolist() == [0, 3] and first["keys"].tolist() == [[0, 1], [6, 7]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["chain", "without_replacement", "eagle dynamic", "trie", "jacobi"]
)
def test_a_repeated_state_is_that_of_repeated_prompts(name):
    """Every array of the state, whichever axis has its rows."""
    case = cases.real(name)
    packed, lengths = sj.pack_prompts([[0, 1, 2, 0, 1], [2, 1]])
    keys, limit = sj.sample_keys(0, 2, 3), jnp.repeat(lengths, 3) + 7
    how = sj.make_sampling(6, [0.0, 1.0, 0.5] * 2, presence_penalty=0.5)
    given, options = (case.target, case.drafter, case.params), {"max_len": 16, "sampling": how}
    once = texts.prefill(*given, packed, lengths, keys, 3, limit=limit, **options)
    rows = (jnp.repeat(packed, 3, 0), jnp.repeat(lengths, 3))
    every = sj.prefill(*given, *rows, keys, limit=limit, **options)
    for one, other in zip(jax.tree.leaves(once), jax.tree.leaves(every), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_model_that_is_in_memory(model):
    """The texts of a model from files; token ids without a tokenizer; other parameters."""
    own = sj.Model.from_lm(model.lm, model.params, model.tokenizer, model.eos_ids)
    prompts, ids = ["Once upon a time", "Tom"], [[1, 5, 9], [1]]
    expected = sj.generate_text(model, prompts, **KEYS)
    assert sj.generate_text(own, prompts, **KEYS).completions == expected.completions
    plain = sj.Model.from_lm(
        model.lm._replace(token_bytes=None, vocabulary=None),
        *(model.params, model.tokenizer, model.eos_ids),
    )
    forced = {"grammar": "[0-9]{1,4}", **KEYS}
    found = sj.generate_text(plain, prompts, **forced)
    assert found.completions == sj.generate_text(model, prompts, **forced).completions
    bare = sj.Model.from_lm(own.lm, model.params)
    found = sj.generate_text(bare, ids, ignore_eos=True, **KEYS)
    known = sj.generate_text(model, ids, ignore_eos=True, **KEYS)
    assert found.texts == ["", ""]
    assert [each.tokens for each in found.completions] == [
        each.tokens for each in known.completions
    ]
    # Parameters of a later training step: no program is compiled again.
    before = decode._generate._cache_size()
    later = jax.tree.map(lambda x: x * 1.5, model.params)
    changed = sj.generate_text(own, prompts, params=later, **KEYS)
    assert decode._generate._cache_size() == before
    other = sj.Model.from_lm(model.lm, later, model.tokenizer, model.eos_ids)
    assert changed.completions == sj.generate_text(other, prompts, **KEYS).completions
    assert changed.completions != expected.completions
    assert "".join(sj.stream_text(own, prompts[0], params=later, **KEYS)) == changed.texts[0]


def test_a_warm_drafter_learns_between_calls(compiled):
    """Greedy texts stay the same, drafts get better, and a later call compiles nothing."""
    target, params = testing.tiny(vocab_size=32, width=16)
    own, prompts = sj.Model.from_lm(target, params), [[1, 2, 3], [4], [5, 6]]
    drafter = {"name": "suffix", "mode": "path", "memory": 256}
    keys = {"drafter": drafter, "max_new_tokens": 24, "warm": True}
    plain = sj.generate_text(own, prompts, max_new_tokens=24)
    results = []
    for _ in range(3):
        results.append(sj.generate_text(own, prompts, batch_size=3, **keys))
        if len(results) > 1:
            assert compiled == []
        compiled.clear()
    for each in results:
        assert [x.tokens for x in each.completions] == [x.tokens for x in plain.completions]
    assert results[1].tau > results[0].tau
    # Parameters of the target do not change what is kept; without ``warm`` nothing is read.
    other = jax.tree.map(lambda x: -x, params)
    compiled.clear()
    changed = sj.generate_text(own, prompts, params=other, **keys)
    assert compiled == [] and changed.texts == [""] * 3
    cold = sj.generate_text(own, prompts, **keys | {"warm": False, "drafter": "suffix"})
    assert cold.tau <= results[1].tau
    with pytest.raises(UserError, match="prompt_lookup does not learn from other prompts"):
        sj.generate_text(own, prompts, **keys | {"drafter": "prompt_lookup"})


def test_a_draft_model_of_the_keys_bounds_the_padding(model):
    """Texts are padded to multiples of 64 tokens, but not beyond the positions of the draft."""
    draft, params = testing.tiny(vocab_size=512)
    draft = draft._replace(max_positions=100)
    keys = {"name": "draft_model", "gamma": 2, "model": draft, "params": params}
    found = sj.generate_text(model, [[1] * 70], max_new_tokens=20, drafter=keys, ignore_eos=True)
    assert len(found.completions[0].tokens) == 20


def test_mistakes_with_a_model_in_memory(model):
    own = sj.Model.from_lm(model.lm, model.params)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    chat = [{"role": "user", "content": "Hi"}]
    known = sj.Model.from_lm(model.lm, model.params, model.tokenizer)
    for problem, call in {
        "there is none; text needs a tokenizer": lambda: sj.generate_text(own, "Tom"),
        "stop strings need a tokenizer": lambda: sj.generate_text(own, [1, 2], stop="a"),
        r"params has bfloat16\[.* and the model float32\[": lambda: sj.generate_text(
            own, [1], params=half
        ),
        r"params has nothing at \['embed'\]": lambda: sj.generate_text(own, [1], params={}),
        "there is none; text needs": lambda: sj.stream_text(own, [1, 2]),
        "ignore_eos is 'no'": lambda: sj.generate_text(own, [1], ignore_eos="no"),
        "chats need a model that was read from files": lambda: sj.generate_text(known, chat),
        "tune keeps its choice for a model's files": lambda: sj.tune(known, ["Tom"]),
        "the tokenizer is a str; give one of package": lambda: sj.Model.from_lm(
            model.lm, model.params, "gpt2"
        ),
        r"eos_ids has 512, and the tokens are 0\.\.511": lambda: sj.Model.from_lm(
            model.lm, model.params, None, [512]
        ),
    }.items():
        with pytest.raises(UserError, match=problem) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_logprobs_of_the_distribution_that_is_sampled(model):
    """By hand from whole passes: penalty, temperature and top_k; a drafter and plain decoding."""
    whole = jax.jit(lambda params, text: forward(model.lm, params, text).logits)
    ids, how = [[1, 5, 9, 5], [1]], {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3}
    for drafter in ("none", {"name": "prompt_lookup", "gamma": 3, "min_ngram": 1}):
        keys = {"max_new_tokens": 24, "drafter": drafter, "ignore_eos": True, **how}
        result = sj.generate_text(model, ids, logprobs="sampled", **keys)
        for prompt, each in zip(ids, result.completions, strict=True):
            text = prompt + each.tokens
            padded = jnp.asarray([(text + [0] * 32)[:32]])
            logits = np.asarray(whole(model.params, padded))[0]
            for place, (token, found) in enumerate(zip(each.tokens, each.logprobs, strict=True)):
                own = logits[len(prompt) + place - 1].copy()
                seen = list(set(text[: len(prompt) + place]))
                own[seen] = np.where(own[seen] > 0, own[seen] / 1.3, own[seen] * 1.3)
                kept = np.sort(own)[-20]
                own = np.where(own >= kept, own / 0.7, -np.inf)
                expected = own[token] - np.log(np.exp(own - own.max()).sum()) - own.max()
                np.testing.assert_allclose(found, expected, atol=2e-4)
    greedy = sj.generate_text(model, ids, logprobs="sampled", max_new_tokens=4)
    assert all(each.logprobs == [0.0] * 4 for each in greedy.completions)
    with pytest.raises(UserError, match="logprobs is 'raw'; it must be True, False or 'sampled'"):
        sj.generate_text(model, ids, logprobs="raw")
