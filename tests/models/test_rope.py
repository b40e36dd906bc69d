"""Rotary positions: literal formulas, transformers' functions, and the keys of config.json."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import UserError
from specjax.models import families, rope, rope_config
from specjax.models.rope import Rope, RopeScaling

POSITIONS = 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 8.0, 9.0],
    "original_max_position_embeddings": 64,
}
SETTINGS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "longrope": LONG,
}


def read(settings: dict | None = None, head_dim: int = 8, **kwargs) -> Rope:
    return rope_config.read({"rope_scaling": settings}, head_dim, POSITIONS, **kwargs)


def longest_text(own: Rope) -> int:
    """That of a decoder with these rotary positions."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
    sizes = dict.fromkeys((*sizes, "num_kv_heads", "head_dim"), 8)
    more = {"max_positions": POSITIONS, "rope_scaling": own.scaling}
    return families.shape("phi3", **sizes, **more).longest_text


def turned(x: list[float], rope_: Rope, position: int) -> list[float]:
    """``rotate`` of one head, from the formula, in Python floats."""
    factor = 1.0 if rope_.scaling is None else rope_.scaling.attention_factor
    out, half = list(x), rope_.dim // 2
    for pair, frequency in enumerate(np.asarray(rope.frequencies(rope_)).tolist()):
        a, b = pair, pair + half
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[a] = (x[a] * cos - x[b] * sin) * factor
        out[b] = (x[b] * cos + x[a] * sin) * factor
    return out


def formula(kind: str, pair: int) -> float:
    """The frequency of a pair of dimensions among 8, with the settings above."""
    plain = 10000.0 ** (-2 * pair / 8)
    if kind == "linear":
        return plain / 8
    if kind == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < 16 / 4:
            return plain
        smooth = min(1.0, max(0.0, (16 / wavelength - 1) / (4 - 1)))
        return (1 - smooth) * plain / 8 + smooth * plain
    if kind == "yarn":
        turns = [8 * math.log(64 / (n * 2 * math.pi)) / (2 * math.log(10000)) for n in (32, 1)]
        first, last = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), 7)
        ramp = min(1.0, max(0.0, (pair - first) / (last - first)))
        return plain * (1 - ramp) + plain / 4 * ramp
    return plain / LONG["short_factor"][pair] if kind == "longrope" else plain


@pytest.mark.parametrize("kind", SETTINGS)
def test_frequencies_equal_the_formulas(kind):
    expected = [formula(kind, pair) for pair in range(4)]
    np.testing.assert_allclose(rope.frequencies(read(SETTINGS[kind])), expected, rtol=1e-6)


def test_the_attention_factors():
    def factor(settings):
        scaling = read(settings).scaling
        assert scaling is not None
        return scaling.attention_factor

    default = 0.1 * math.log(4.0) + 1
    assert factor(YARN) == pytest.approx(default)
    both = (0.2 * math.log(4.0) + 1) / default
    assert factor(YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}) == pytest.approx(both)
    assert factor(YARN | {"attention_factor": 1.5}) == 1.5
    ratio = math.sqrt(1 + math.log(POSITIONS / 64) / math.log(64))
    assert factor(LONG) == pytest.approx(ratio)
    assert factor(LONG | {"factor": 1.0}) == 1.0


@pytest.mark.parametrize("dim", [8, 6, 2])
def test_rotate_turns_pairs_and_leaves_the_other_dimensions(dim):
    own = Rope(100.0, dim, RopeScaling("linear", 2.0, attention_factor=1.25))
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 8)).astype(np.float32)
    positions = jnp.asarray([[0, 1, 2], [5, 9, 40]])
    got = rope.rotate(jnp.asarray(x), rope.angle(own, positions), own)
    for row, place, head in np.ndindex(2, 3, 2):
        expected = turned(x[row, place, head].tolist(), own, int(positions[row, place]))
        np.testing.assert_allclose(got[row, place, head], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[..., dim:], x[..., dim:])
    half = jnp.asarray(x, jnp.bfloat16)
    assert rope.rotate(half, rope.angle(own, positions), own).dtype == jnp.bfloat16


def test_longrope_has_one_set_of_factors_for_every_position():
    short, long = read(LONG), read(LONG, long=True)
    plain = rope.frequencies(read())
    np.testing.assert_allclose(rope.frequencies(short), plain / np.asarray(LONG["short_factor"]))
    np.testing.assert_allclose(rope.frequencies(long), plain / np.asarray(LONG["long_factor"]))
    assert longest_text(short) == 64
    assert longest_text(long) == POSITIONS
    for kind in ("default", "linear", "llama3", "yarn"):
        assert longest_text(read(SETTINGS[kind])) == POSITIONS


@pytest.mark.parametrize("scaled", [False, True])
def test_switches_that_are_off_add_nothing_to_the_program(scaled):
    """Plain and Llama 3 positions compile to the program of a decoder without other switches."""
    own = read(LLAMA3 if scaled else None)

    def plain():
        inverse = 10000.0 ** (-jnp.arange(0, 8, 2, dtype=jnp.float32) / 8)
        if scaled:
            wavelength = 2 * math.pi / inverse
            low, high = 16 / 1.0, 16 / 4.0
            smooth = (16 / wavelength - 1.0) / (4.0 - 1.0)
            between = (1 - smooth) * inverse / 8.0 + smooth * inverse
            inverse = jnp.where(
                wavelength > low, inverse / 8.0, jnp.where(wavelength < high, inverse, between)
            )
        return inverse

    def simple(x, positions):
        turn = positions[..., None].astype(jnp.float32) * plain()
        cos, sin = jnp.cos(turn)[:, :, None], jnp.sin(turn)[:, :, None]
        first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
        parts = [first * cos - second * sin, second * cos + first * sin]
        return jnp.concatenate(parts, axis=-1).astype(x.dtype)

    def switched(x, positions):
        return rope.rotate(x, rope.angle(own, positions), own)

    x, positions = jnp.ones((2, 3, 2, 8), jnp.bfloat16), jnp.arange(6).reshape(2, 3)
    texts = [jax.jit(f).lower(x, positions).as_text() for f in (simple, switched)]
    assert texts[0].replace("simple", "switched") == texts[1]


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("head_dim", [8, 10])
def test_written_keys_are_read_back(kind, head_dim):
    share = {} if head_dim == 8 else {"partial_rotary_factor": 0.8}
    own = read(SETTINGS[kind] | share, head_dim)
    assert own.dim == 8
    raw = rope_config.write(own, head_dim)
    assert rope_config.read(raw, head_dim, POSITIONS) == own
    layers = {"full_attention": own, "sliding_attention": Rope(500.0, head_dim)}
    raw = rope_config.write(layers, head_dim)
    for name, each in layers.items():
        assert rope_config.read(raw, head_dim, POSITIONS, name) == each


def test_every_share_of_a_head_is_written_and_read_back():
    for head_dim in range(2, 130):
        for dim in range(2, head_dim + 1, 2):
            raw = rope_config.write(Rope(10000.0, dim), head_dim)
            assert rope_config.read(raw, head_dim, POSITIONS).dim == dim


def test_the_places_of_the_keys():
    linear = SETTINGS["linear"]
    for raw in (
        {"rope_theta": 500.0, "rope_scaling": linear, "partial_rotary_factor": 0.5},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 8}, "rotary_pct": 0.5},
        {"rope_parameters": linear | {"rope_theta": 500, "partial_rotary_factor": 0.5}},
        {"rotary_emb_base": 500, "rotary_pct": 0.5, "rope_scaling": linear},
    ):
        assert rope_config.read(raw, 8, POSITIONS) == Rope(
            500.0, 4, scaling=RopeScaling("linear", 8.0)
        )
    assert rope_config.read({}, 8, POSITIONS, theta=2e6, partial=0.25) == Rope(2e6, 2)
    assert read(LONG | {"rope_type": None, "type": "su"}) == read(LONG)
    outside = {key: value for key, value in LONG.items() if not key.startswith("original")}
    raw = {"rope_scaling": outside, "original_max_position_embeddings": 64}
    assert rope_config.read(raw, 8, POSITIONS) == read(LONG)


def test_kinds_of_layers():
    """Gemma 3 and OLMo 3: without nested objects, sliding layers have no scaling."""
    linear = SETTINGS["linear"]
    gemma = {"rope_scaling": linear, "rope_theta": 1e6, "rope_local_base_freq": 500.0}
    assert rope_config.read(gemma, 8, POSITIONS, "sliding_attention") == Rope(500.0, 8)
    full = Rope(1e6, 8, scaling=RopeScaling("linear", 8.0))
    assert rope_config.read(gemma, 8, POSITIONS, "full_attention") == full
    del gemma["rope_local_base_freq"], gemma["rope_theta"]
    for local, theta in ((None, 1e6), (1e4, 1e4)):
        own = rope_config.read(
            gemma, 8, POSITIONS, "sliding_attention", theta=1e6, local_theta=local
        )
        assert own == Rope(theta, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "dynamic"}, "rope type 'dynamic' is not supported; supported: default, lin"),
        ({"rope_type": ["yarn"]}, "rope type .'yarn'. is not supported"),
        (3, "rope_scaling is 3; it must be an object or null"),
        (LLAMA3 | {"beta_fast": 3}, "beta_fast 3 is not supported for the rope type 'llama3'"),
        (YARN | {"attn_factor": 0.8}, "put the whole factor under attention_factor in its place"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor 4.0 must be below"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'; it must be a positive number"),
        ({"rope_type": "linear", "factor": math.nan}, "factor is nan; it must be a positive"),
        (YARN | {"truncate": 1}, "truncate is 1; it must be true or false"),
        (YARN | {"beta_fast": 0.5}, "beta_fast 0.5 must not be below beta_slow 1.0"),
        (LONG | {"short_factor": [1.0]}, "short_factor is a list of 1; it must be a list of 4"),
        (LONG | {"long_factor": None}, "long_factor is missing; it must be a list of 4"),
        (LONG | {"long_factor": [1, 2, 3, 0]}, "long_factor is 0; it must be a positive number"),
        ({"partial_rotary_factor": 0.4}, "0.4 of head_dim 8 turns 3 dimensions"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of head_dim 8"),
        ({"rope_theta": 1}, "rope_theta is 1.0; it must be a number above 1"),
    ],
)
def test_a_wrong_value_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        read(settings)


def test_contradictions_are_refused():
    def refused(message, raw, layer_type=None, head_dim=8):
        with pytest.raises(UserError, match=message):
            rope_config.read(raw, head_dim, POSITIONS, layer_type)

    linear = SETTINGS["linear"]
    other = linear | {"factor": 2.0}
    refused(
        "rope_parameters.factor is 2.0 and rope_scaling.factor is",
        {"rope_scaling": linear, "rope_parameters": other},
    )
    raw = {"original_max_position_embeddings": 32, "rope_scaling": LONG}
    refused("original_max_position_embeddings is 32 and .* is 64; they must be equal", raw)
    layers = {"rope_parameters": {"full_attention": linear}}
    refused(r"an object per kind of layer \(full_attention\)", layers)
    refused("rope_parameters has no object sliding_attention", layers, "sliding_attention")
    refused("head_dim 7 is odd", {}, head_dim=7)


def random_settings(kind: str, rng: np.random.Generator, pairs: int) -> dict:
    original = int(rng.integers(16, 4096))
    number = lambda low, high: float(rng.uniform(low, high))  # noqa: E731
    settings = {"rope_type": kind, "rope_theta": number(50, 1e6)}
    if kind in ("linear", "llama3", "yarn"):
        settings["factor"] = number(1, 40)
    if kind != "linear":
        settings["original_max_position_embeddings"] = original
    if kind == "llama3":
        settings |= {"low_freq_factor": number(0.5, 2), "high_freq_factor": number(2.5, 8)}
    if kind == "yarn":
        if rng.random() < 0.5:
            settings |= {"beta_fast": number(8, 64), "beta_slow": number(0.5, 4)}
        if rng.random() < 0.5:
            settings |= {"mscale": number(0.5, 2), "mscale_all_dim": number(0.5, 2)}
        settings["truncate"] = bool(rng.random() < 0.5)
    if kind == "longrope":
        for key in ("short_factor", "long_factor"):
            settings[key] = rng.uniform(1, 60, pairs).tolist()
        if rng.random() < 0.5:
            settings["factor"] = number(0.5, 40)
    if kind in ("yarn", "longrope") and rng.random() < 0.3:
        settings["attention_factor"] = number(0.5, 2)
    return settings


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind != "default"])
def test_equal_to_transformers(kind):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    rng = np.random.default_rng(len(kind))
    for _ in range(20):
        head_dim = int(rng.choice([16, 64, 80, 128]))
        share = float(rng.choice([1.0, 0.5, 0.25]))
        settings = random_settings(kind, rng, int(head_dim * share) // 2)
        if share != 1:
            settings["partial_rotary_factor"] = share
        config = transformers.LlamaConfig(
            head_dim=head_dim, max_position_embeddings=POSITIONS, rope_parameters=dict(settings)
        )
        raw = {"rope_parameters": settings}
        for length, long in ((None, False), (10**6, True)):
            expected, factor = functions[kind](config, "cpu", seq_len=length)
            own = rope_config.read(raw, head_dim, POSITIONS, long=long)
            np.testing.assert_allclose(rope.frequencies(own), expected.numpy(), rtol=2e-5)
            assert own.scaling is not None
            assert own.scaling.attention_factor == pytest.approx(factor)
            # What is written is the same model for transformers.
            back = transformers.LlamaConfig(
                head_dim=head_dim,
                max_position_embeddings=POSITIONS,
                **rope_config.write(own, head_dim),
            )
            again, same = functions[kind](back, "cpu", seq_len=length)
            np.testing.assert_allclose(again.numpy(), expected.numpy(), rtol=1e-6)
            assert same == pytest.approx(factor)


def test_fields_are_hashable():
    """A configuration is a key of caches of compiled programs."""
    own = read(LONG)
    assert hash(own) == hash(dataclasses.replace(own))
