"""A network that is trained, exported and read back keeps its tau, in every layout.

A file that is read in a wrong way gives fewer accepted tokens and the same text, so no other test
notices it. Therefore each trap of the layouts is also sprung on purpose: tau must fall.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import by_default
from safetensors.numpy import load_file, save_file

from specjax import decode, drafters, rng, testing
from specjax.drafters.files import codec, head_files, probe
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.sampling import Sampling
from specjax.testing import models
from specjax.types import Batch, ModelParams

VOCAB, WIDTH, DEPTH = 16, 16, 2
# Offsets of these ids ascend too: read as ids, they are a draft vocabulary without an error.
IDS = np.array([0, 2, 4, 6, 8, 11, 13, 15])
IDS_KEY = "eagle_aux_hidden_state_layer_ids"
# Least fall of tau that counts.
FALL = 0.02
SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 8}
CHAIN = {"tree": f"chain:{DEPTH}", "siblings": "iid"}
LONG = CHAIN | {"tree": "chain:5"}


@functools.cache
def world():
    """A random target, and texts i32[32,21] that it wrote."""
    target, params = testing.tiny(layers=3, width=WIDTH, vocab_size=VOCAB, scale=40.0)

    @jax.jit
    def write(params, keys):
        def step(carry, key):
            cache, token = carry
            out, block = target.apply(params, token[:, None], cache)
            cache = target.commit(cache, block, jnp.ones_like(token))
            new = jax.random.categorical(key, out.logits[:, 0]).astype(jnp.int32)
            return (cache, new), new

        first = jnp.arange(32, dtype=jnp.int32) % VOCAB
        _, rest = jax.lax.scan(step, (target.init_cache(32, 21), first), keys)
        return jnp.concatenate([first[:, None], rest.T], 1)

    return target, params, Batch(write(params, jax.random.split(jax.random.key(0), 20)))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained network, and the config.json facts that training writes."""

    name: str
    params: dict
    facts: dict
    tau: float
    chain: dict


def tau(training, params) -> float:
    """Tokens per round at temperature 1 of drafts at every place of the texts."""
    _, target_params, batch = world()
    rows = len(batch.tokens)
    sampling = Sampling(*(jnp.full(rows, x) for x in (1.0, 0, 1.0, 0.0)))
    pair = ModelParams(target_params, params)
    accepted = training.foresee(pair, batch, sampling)
    accepted = accepted[:, : -accepted.shape[-1] - 1]
    return 1 + float(jnp.cumprod(accepted, -1).sum(-1).mean())


def train(
    name, keys, loss=None, steps=120, start=lambda params: params, chain: dict | None = None
) -> Trained:
    """Trains a new network on the texts until it knows them; ``start`` changes its beginning."""
    target, target_params, batch = world()
    chain = CHAIN if chain is None else chain
    drafter = drafters.make(name, target, **chain, **keys)
    training, rule = drafter.training, optax.adam(0.01)

    @jax.jit
    def run(params):
        def step(carry, key):
            params, state = carry
            gradient = jax.grad(
                lambda p: training.loss(p, target_params, batch, key, **(loss or {}))[0]
            )(params)
            updates, state = rule.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(1), steps)
        return jax.lax.scan(step, (params, rule.init(params)), keys)[0][0]

    params = jax.device_get(run(start(training.start(target_params, jax.random.key(0)))))
    facts = dict(training.facts) | {"vocab_size": VOCAB}
    return Trained(name, params, facts, tau(training, params), chain)


@functools.cache
def eagle3() -> Trained:
    """With parts that a reading could lose: norms of queries and keys, a draft vocabulary."""
    keys = SHAPE | {"qk_norm": True, "taps": (0, 1), "draft_ids": IDS}
    return train("eagle3", keys, {"steps": 2})


@functools.cache
def eagle31() -> Trained:
    keys = SHAPE | {"taps": (1, 2), "fc_norm": True, "norm_output": True}
    return train("eagle3", keys, {"steps": 2})


@functools.cache
def eagle() -> Trained:
    return train("eagle", SHAPE)


@functools.cache
def redrafter() -> Trained:
    return train("redrafter", {"heads": DEPTH, "inner": 24})


@functools.cache
def mtp(modules: int) -> Trained:
    """Modules with switches that no tensor shows; those of one are the others' opposites."""
    keys = {"modules": modules, "hidden": "raw", "recycled": "raw", "zero_first": True}
    keys = keys if modules > 1 else {"hidden_first": True}
    own = SHAPE | {"qk_norm": True} | keys
    return train("mtp_module", own, {"steps": 2}, start=with_uneven_norms)


def with_uneven_norms(params):
    """With equal factors, an output before the last norm and after it would be read alike."""
    factors = np.geomspace(0.2, 5, WIDTH).astype(np.float32)
    modules = {
        name: module | {"norm": {"scale": jnp.asarray(np.roll(factors, int(name)))}}
        for name, module in params["modules"].items()
    }
    return params | {"modules": modules}


def read_back(folder, trained, layout="", config=lambda raw: raw, tensors=lambda x: x) -> float:
    """tau of the network after a change of its files by ``config`` and ``tensors``."""
    head_files.write(folder, trained.name, trained.params, trained.facts, layout=layout)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config(raw)))
    save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    drafter = drafters.make(trained.name, world()[0], model=folder, **trained.chain)
    return tau(drafter.training, drafter.init_params(None))


def columns(name, by):
    """Rotates the columns of some [out, in] tensors: the parts that are read change places."""

    def change(tensors):
        return {
            key: np.ascontiguousarray(np.roll(x, by, 1)) if name in key and x.ndim == 2 else x
            for key, x in tensors.items()
        }

    return change


def without(*keys, **changes):
    """Removes and changes keys of config.json. ``specjax`` would contradict the others."""

    def change(raw):
        raw = {key: value for key, value in raw.items() if key not in keys}
        return raw | {key: new(raw[key]) for key, new in changes.items()}

    return change


def exchanged(first, second):
    """Exchanges two tensors [D] or [D,D]."""
    pair = {f"{first}.weight": f"{second}.weight", f"{second}.weight": f"{first}.weight"}
    return lambda tensors: tensors | {name: tensors[other] for name, other in pair.items()}


def absolute(tensors):
    """d2t for a reader that adds nothing: logit i belongs to the token d2t[i]."""
    d2t = tensors["d2t"]
    return {k: x for k, x in tensors.items() if k != "t2d"} | {"d2t": d2t - np.arange(len(d2t))}


@pytest.mark.slow
def test_eagle3_keeps_tau_in_every_layout(tmp_path):
    trained = eagle3()
    assert trained.tau > 1.4, "the network has learnt nothing that could be lost"
    for layout in codec.of("eagle3").layouts:
        assert abs(read_back(tmp_path / layout, trained, layout) - trained.tau) < 1e-6, layout


NORMS = ("q_norm.weight", "k_norm.weight")


def shift(ids):
    return [i + 1 for i in ids]


TRAPS = {
    "the next layers": {"config": without("specjax", **{IDS_KEY: shift})},
    "the normed state is recycled": {"config": without("specjax", norm_output=lambda x: not x)},
    "another rotary base": {"config": without(rope_theta=lambda theta: 100.0)},
    "another base, nested": {
        "layout": "speculators",
        "config": without(transformer_layer_config=lambda layer: layer | {"rope_theta": 100.0}),
    },
    "the residual is normed": {"config": without(norm_before_residual=lambda x: not x)},
    "d2t as ids": {"tensors": absolute},
    "feature before token": {"tensors": columns("self_attn.q_proj", WIDTH)},
    "feature before token, all": {"tensors": columns("_proj.weight", WIDTH)},
    "taps in another order": {"tensors": columns("fc.weight", WIDTH)},
    "no norms of queries and keys": {
        "tensors": lambda x: {key: value for key, value in x.items() if not key.endswith(NORMS)}
    },
    "norms of token and feature exchanged": {
        "tensors": exchanged("midlayer.hidden_norm", "midlayer.input_layernorm")
    },
}


@pytest.mark.parametrize("trap", by_default(TRAPS, ()))
def test_traps_of_eagle3(tmp_path, trap):
    trained = eagle3()
    got = read_back(tmp_path / "a", trained, **TRAPS[trap])
    assert got < trained.tau - FALL, (got, trained.tau)


def test_networks_for_another_target(tmp_path):
    target, params = testing.tiny(layers=3, width=WIDTH, vocab_size=VOCAB)
    new = drafters.make("eagle3", target, **CHAIN, **SHAPE, taps=(0, 1)).training
    facts = dict(new.facts) | {"vocab_size": VOCAB}
    head_files.write(tmp_path / "a", "eagle3", new.start(params, jax.random.key(0)), facts)

    def refused(match, **shape):
        config = models.tiny_config(**{"layers": 3, "width": WIDTH, "vocab_size": VOCAB} | shape)
        with pytest.raises(UserError, match=match) as caught:
            drafters.make("eagle3", lm.from_config(config), model=tmp_path / "a")
        assert "\n" not in str(caught.value)

    refused("is made for features of width 16, and the target has 32", width=32)
    refused("is made for a vocabulary of 16, and the target has 18", vocab_size=18)
    refused(r"reads the layers \[0, 1\], and the target's are 0..0", layers=1)


@pytest.mark.slow
def test_eagle31(tmp_path):
    """The output norm in all layouts, and SpecForge's older meaning of the same key."""
    trained = eagle31()
    for layout in codec.of("eagle3").layouts:
        assert abs(read_back(tmp_path / layout, trained, layout) - trained.tau) < 1e-6, layout
    for i, (layout, config) in enumerate(
        [
            ("eagle3", without("specjax", norm_output=lambda x: not x)),
            # Without the key ``specjax`` true is read as plain EAGLE-3.
            ("specforge", without("specjax")),
        ]
    ):
        got = read_back(tmp_path / str(i), trained, layout, config)
        assert got < trained.tau - FALL, (layout, got, trained.tau)
    got = read_back(tmp_path / "norms", trained, tensors=exchanged("fc_norm.0", "fc_norm.1"))
    assert got < trained.tau, (got, trained.tau)


@pytest.mark.slow
def test_eagle(tmp_path):
    trained = eagle()
    assert trained.tau > 1.4
    assert abs(read_back(tmp_path / "a", trained) - trained.tau) < 1e-6
    changes = (
        {"tensors": columns("fc.weight", WIDTH)},
        {"config": without(rope_theta=lambda theta: 100.0)},
    )
    for change in changes:
        got = read_back(tmp_path / "b", trained, **change)
        assert got < trained.tau - FALL, (got, trained.tau)


@pytest.mark.slow
def test_redrafter(tmp_path):
    trained = redrafter()
    assert trained.tau > 1.4
    assert abs(read_back(tmp_path / "a", trained) - trained.tau) < 1e-6
    for change in (columns("input_proj.weight", WIDTH), exchanged("rnn_w", "rnn_u")):
        got = read_back(tmp_path / "b", trained, tensors=change)
        assert got < trained.tau - FALL, (got, trained.tau)


@pytest.mark.parametrize(
    ("modules", "layout"),
    by_default([(2, "deepseek"), (2, "mimo"), (1, "deepseek"), (1, "mimo"), (1, "qwen3")], ()),
)
def test_mtp_modules_keep_tau(tmp_path, modules, layout):
    """Other orders of concatenation and other norms are converted."""
    trained = mtp(modules)
    assert trained.tau > 1.4, "the modules have learnt nothing that could be lost"
    assert abs(read_back(tmp_path / layout, trained, layout) - trained.tau) < 1e-5


def switched(key, value):
    return lambda raw: raw | {"specjax": raw["specjax"] | {key: value}}


def at_one(tensors):
    """The factors of norms as they are, where the reader adds 1."""
    return {name: x + 1 if "norm" in name else x for name, x in tensors.items()}


MTP_TRAPS = {
    "concatenation": ("deepseek", {"tensors": columns("eh_proj", WIDTH)}),
    "concatenation, mimo": ("mimo", {"tensors": columns("input_proj", WIDTH)}),
    "recycled after the norm": ("deepseek", {"config": switched("recycled", "normed")}),
    "norms": (
        "deepseek",
        {"tensors": exchanged("model.layers.3.enorm", "model.layers.3.shared_head.norm")},
    ),
    "modules": (
        "deepseek",
        {"tensors": exchanged("model.layers.3.eh_proj", "model.layers.4.eh_proj")},
    ),
    "factors of norms": ("qwen3", {"tensors": at_one}),
    "rotary base": ("deepseek", {"config": without(rope_theta=lambda theta: 100.0)}),
}


@pytest.mark.parametrize("trap", by_default(MTP_TRAPS, ()))
def test_traps_of_mtp_modules(tmp_path, trap):
    layout, change = MTP_TRAPS[trap]
    trained = mtp(1 if layout == "qwen3" else 2)
    got = read_back(tmp_path / "a", trained, layout, **change)
    assert got < trained.tau - FALL, (got, trained.tau)


# The probe --------------------------------------------------------------------------------------


@functools.cache
def greedy_world():
    """As ``world``, with texts i32[32,24] of which the target chose all but four tokens."""
    target, params = testing.tiny(layers=3, width=WIDTH, vocab_size=VOCAB, scale=40.0)
    first = jax.random.randint(jax.random.key(5), (32, 4), 0, VOCAB)
    state = decode.prefill(
        *(target, drafters.make("none", target), ModelParams(params)),
        *(first, jnp.full(32, 4)),
        rng.row_keys(0, 32),
        max_len=24,
    )
    state = decode.autoregressive(target, ModelParams(params), state, max_steps=20)
    return target, params, Batch(state.tokens[:, :24])


# The network, how its files are made wrong, the reading that mends them.
WRONG = {
    "eagle3": (
        ("eagle3", SHAPE | {"taps": (0, 1)}, {"steps": 2}),
        {"config": without("specjax", **{IDS_KEY: shift}, norm_before_residual=lambda x: not x)},
        {"taps": [0, 1], "norm_before_residual": False},
    ),
    "mtp_module": (
        ("mtp_module", SHAPE | {"modules": 2}, {"steps": 2}),
        {"tensors": columns("eh_proj", WIDTH)},
        {"hidden_first": True},
    ),
    "block_head": (
        ("block_head", SHAPE | {"block": DEPTH + 1, "taps": (0, 1), "anchor": True}),
        {"config": without("specjax", sample_from_anchor=lambda _: False)},
        {"sample_from_anchor": True},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_probe_finds_the_reading_that_was_trained(tmp_path, monkeypatch, name):
    monkeypatch.setitem(globals(), "world", greedy_world)
    made, change, right = WRONG[name]
    trained = train(*made)
    target, params, batch = world()
    prompts = np.asarray(batch.tokens[:, :4]).tolist()
    keys = {"new_tokens": 19, "tree": f"chain:{DEPTH}"}
    got = {}
    for folder, changed in (("right", {}), ("wrong", change)):
        read_back(tmp_path / folder, trained, **changed)
        got[folder] = probe.probe(target, params, trained.name, tmp_path / folder, prompts, **keys)
    assert got["right"].best.changes == {} and got["wrong"].best.changes == right
    assert got["right"].best.tau == got["wrong"].best.tau > 1.2
    drafter = drafters.make(trained.name, target, **trained.chain, model=got["wrong"].head)
    assert tau(drafter.training, drafter.init_params(None)) == pytest.approx(trained.tau)


# Drafters of one pass ---------------------------------------------------------------------------

AUX = "aux_hidden_state_layer_ids"


@functools.cache
def p_eagle() -> Trained:
    keys = SHAPE | {"parallel": DEPTH, "layers": 2, "taps": (1, 2), "mask_id": 15}
    return train("eagle3", keys, {"keep": 1.0})


@functools.cache
def jetspec() -> Trained:
    """Causal inside a long block, so that many later masks are hidden from the first one."""
    keys = {"block": 6, "causal": True, "layers": 2, "qk_norm": True, "window": 4}
    return train("block_head", SHAPE | keys | {"taps": (0, 1), "mask_id": 15}, chain=LONG)


@functools.cache
def dspark() -> Trained:
    keys = {"block": 3, "anchor": True, "correction": "markov", "rank": 8, "confidence": True}
    return train("block_head", SHAPE | keys | {"taps": (1, 2), "mask_id": 15})


@functools.cache
def domino() -> Trained:
    keys = {"block": 3, "anchor": True, "correction": "gru", "rank": 8, "state": 12}
    return train("block_head", SHAPE | keys | {"taps": (1, 2), "mask_id": 15})


@functools.cache
def early_dspark() -> Trained:
    """DSpark without an anchor, as the speculators library exported it at first."""
    keys = {"block": 4, "correction": "markov", "rank": 8}
    return train("block_head", SHAPE | keys | {"taps": (1, 2), "mask_id": 15})


@functools.cache
def anchored_dflash() -> Trained:
    """DFlash with an anchor, which released files do not state."""
    return train("block_head", SHAPE | {"block": 3, "anchor": True, "taps": (1, 2), "mask_id": 15})


@functools.cache
def dflare() -> Trained:
    return train("block_head", SHAPE | {"block": 3, "context": "mixed", "taps": (1, 2)})


@functools.cache
def reduced() -> Trained:
    """DSpark with embeddings of its own and a head for a part of the vocabulary."""
    target, target_params, _ = world()
    trained = dspark()
    head = target.unembed(target_params, jnp.eye(WIDTH))[:, IDS]
    markov = trained.params["markov"]
    params = trained.params | {
        "embed": {"embedding": target.embed(target_params, jnp.arange(VOCAB))},
        "head": {"kernel": head},
        "markov": markov | {"out": {"kernel": markov["out"]["kernel"][:, IDS]}},
    }
    return dataclasses.replace(trained, params=jax.device_get(params))


def at(key, change):
    """Changes a key of config.json or of ``dflash_config``."""

    def changed(raw):
        nested = raw.get("dflash_config", {})
        if key in nested:
            return without("specjax", dflash_config=lambda own: own | {key: change(own[key])})(raw)
        return without("specjax", **{key: change})(raw)

    return changed


def nested_base(raw):
    """The rotary base as newer programs write it, and another one."""
    return {k: x for k, x in raw.items() if k != "rope_theta"} | {
        "rope_parameters": {"rope_theta": 2.0, "rope_type": "default"}
    }


BLOCKS = [
    (dspark, "speculators"),
    (dspark, "deepspec"),
    (dspark, "specforge"),
    (dspark, "dflash"),
    (jetspec, "dflash"),
    (jetspec, "specforge"),
    (domino, "specforge"),
    (domino, "dflash"),
    (dflare, "dflash"),
    (p_eagle, "speculators"),
    (p_eagle, "eagle3"),
    (p_eagle, "specforge"),
]


@pytest.mark.parametrize(
    ("make", "layout"),
    by_default(BLOCKS, ((dspark, "speculators"),)),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_drafters_of_one_pass_keep_tau(tmp_path, make, layout):
    trained = make()
    assert trained.tau > 1.4, "the network has learnt nothing that could be lost"
    assert abs(read_back(tmp_path / "a", trained, layout) - trained.tau) < 1e-5


def other(token):
    return (token + 4) % VOCAB


ONE_PASS_TRAPS = {
    "no anchor, domino": (
        domino,
        "specforge",
        {
            "config": lambda raw: at("sample_from_anchor", lambda _: False)(
                at("shift_label", lambda _: False)(raw)
            )
        },
    ),
    "no GRU": (
        domino,
        "specforge",
        {"tensors": lambda x: x | {"embed_proj.2.weight": 0 * x["embed_proj.2.weight"]}},
    ),
    "other mixtures": (
        dflare,
        "dflash",
        {"tensors": lambda x: x | {"layer_fusion_weights": x["layer_fusion_weights"][:, ::-1] - 2}},
    ),
    "layers as they are": (dspark, "speculators", {"config": at(AUX, lambda ids: [1, 2])}),
    "no anchor": (dspark, "speculators", {"config": at("sample_from_anchor", lambda _: False)}),
    "no anchor, deepspec": (
        dspark,
        "deepspec",
        {"config": at("sample_from_anchor", lambda _: False)},
    ),
    "another mask": (dspark, "specforge", {"config": at("mask_token_id", other)}),
    "layers one later": (jetspec, "dflash", {"config": at("target_layer_ids", shift)}),
    "not causal": (jetspec, "dflash", {"config": at("causal_head", lambda _: False)}),
    "not causal, nested": (jetspec, "specforge", {"config": at("causal_head", lambda _: False)}),
    "another mask, dflash": (jetspec, "dflash", {"config": at("mask_token_id", other)}),
    "another base, nested": (jetspec, "dflash", {"config": nested_base}),
    "another mask, p_eagle": (
        p_eagle,
        "speculators",
        {
            "config": without(
                "specjax",
                "ptd_token_id",
                mask_token_id=other,
            )
        },
    ),
    "layers as they are, p_eagle": (
        p_eagle,
        "speculators",
        {"config": without("specjax", **{IDS_KEY: lambda ids: [1, 2]})},
    ),
    "no feature of masks": (
        p_eagle,
        "eagle3",
        {"tensors": lambda x: x | {"mask_hidden": 0 * x["mask_hidden"]}},
    ),
}


@pytest.mark.parametrize("trap", by_default(ONE_PASS_TRAPS, ("layers as they are",)))
def test_traps_of_drafters_of_one_pass(tmp_path, trap):
    make, layout, change = ONE_PASS_TRAPS[trap]
    trained = make()
    got = read_back(tmp_path / "a", trained, layout, **change)
    assert got < trained.tau - FALL, (got, trained.tau)


@pytest.mark.slow
def test_files_that_do_not_state_the_anchor(tmp_path):
    """Exports of before the key keep tau, the anchor's other name keeps it, and so does the key."""
    no_key = without("specjax", "sample_from_anchor")
    early, new = early_dspark(), dspark()
    assert min(early.tau, new.tau) > 1.4
    got = read_back(tmp_path / "early", early, "speculators", config=no_key)
    assert abs(got - early.tau) < 1e-5
    got = read_back(tmp_path / "lost", new, "speculators", config=no_key)
    assert got < new.tau - FALL, (got, new.tau)

    def other_name(raw):
        return no_key(raw) | {"query_zero_predicts_next": True}

    for trained, layout in ((new, "speculators"), (anchored_dflash(), "dflash")):
        got = read_back(tmp_path / f"alias {layout}", trained, layout, config=other_name)
        assert abs(got - trained.tau) < 1e-5
    released = anchored_dflash()
    got = read_back(tmp_path / "released", released, "dflash", config=no_key)
    assert got < released.tau - FALL, (got, released.tau)
    with pytest.warns(UserWarning, match="anchor True is taken"):
        drafter = drafters.make(
            "block_head", world()[0], model=tmp_path / "released", anchor=True, **CHAIN
        )
    assert abs(tau(drafter.training, drafter.init_params(None)) - released.tau) < 1e-5


@pytest.mark.slow
def test_names_of_the_mask_and_of_early_files(tmp_path):
    """Other names of the same id, an early prefix of names, and what contradicts itself."""
    trained = dspark()

    def alias(name):
        return lambda raw: {k: x for k, x in raw.items() if k != "mask_token_id"} | {name: 15}

    def early(tensors):
        return {
            f"logit_head.{name}" if name.startswith(("markov", "confidence")) else name: x
            for name, x in tensors.items()
        }

    for name in ("dspark_noise_token_id", "pard_token", "ptd_token_id"):
        change = {"config": alias(name), "tensors": early}
        got = read_back(tmp_path / name, trained, "deepspec", **change)
        assert abs(got - trained.tau) < 1e-5

    def inside(raw):
        nested = raw["dflash_config"] | {"block_size": raw["block_size"]}
        return {k: x for k, x in raw.items() if k != "block_size"} | {"dflash_config": nested}

    got = read_back(tmp_path / "inside", trained, "specforge", config=inside)
    assert abs(got - trained.tau) < 1e-5
    for layout, change, message in (
        ("deepspec", lambda raw: raw | {"ptd_token_id": 3}, "they must be equal"),
        ("deepspec", lambda raw: raw | {AUX: [1, 2]}, "name different layers"),
        ("deepspec", lambda raw: raw | {"markov_head_type": "rnn"}, "the tensors are those of"),
        ("specforge", lambda raw: raw | {"mask_token_id": 3}, "they must be equal"),
        ("speculators", lambda raw: raw | {"speculators_model_type": "mtp"}, "is not supported"),
        ("speculators", lambda raw: raw | {"enable_confidence_head": False}, "have such a part"),
        ("deepspec", lambda raw: raw | {"layer_types": 3}, "must be a list of names"),
        ("deepspec", lambda raw: raw | {"specjax": {"taps": 3}}, "a list of different layer"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read_back(tmp_path / "wrong", trained, layout, config=change)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_draft_vocabulary_of_a_block_drafter(tmp_path):
    """DeepSpec's embeddings and head, and d2t of the speculators library."""
    trained, taus = reduced(), {}
    facts = trained.facts | {"draft_ids": tuple(IDS.tolist())}
    trained = dataclasses.replace(trained, facts=facts)
    for layout in ("dflash", "deepspec", "speculators"):
        taus[layout] = read_back(tmp_path / layout, trained, layout)
    best = max(taus.values())
    assert best > 1.2 and best - min(taus.values()) < 1e-5, taus
    got = read_back(tmp_path / "absolute", trained, "speculators", tensors=absolute)
    assert got < best - FALL, (got, best)


@pytest.mark.slow
def test_pard_keeps_tau(tmp_path):
    """A directory of a model with ``pard_token``; another mask lowers tau."""
    target, target_params, batch = world()
    shape = {"layers": 1, "width": WIDTH, "vocab_size": VOCAB}
    config = models.tiny_config(**shape)
    model, start = testing.tiny(**shape)
    drafter = drafters.make(
        "pard", target, model=model._replace(vocabulary=None), params={}, gamma=DEPTH, mask_id=15
    )
    rule = optax.adam(0.01)

    @jax.jit
    def run(params):
        def step(carry, key):
            params, state = carry
            gradient = jax.grad(
                lambda p: drafter.training.loss(p, target_params, batch, key, keep=1.0)[0]
            )(params)
            updates, state = rule.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        keys = jax.random.split(jax.random.key(1), 150)
        return jax.lax.scan(step, (params, rule.init(params)), keys)[0][0]

    params = jax.device_get(run(start))
    taus = []
    for number, more in enumerate(
        ({"pard_token": 15}, {"mask_token_id": 15}, {"pard_token": 11}, {"ptd_token_id": 15})
    ):
        hf.save(tmp_path / str(number), config, params, more=more)
        read = drafters.make("pard", target, model=tmp_path / str(number), gamma=DEPTH)
        taus.append(tau(read.training, read.init_params(None)))
    right = tau(drafter.training, params)
    assert right > 1.3
    np.testing.assert_allclose([taus[i] for i in (0, 1, 3)], right, atol=1e-5)
    assert taus[2] < right - FALL, taus
