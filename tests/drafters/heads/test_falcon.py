"""Falcon against a plain reference, round by round; its training, its files, mutants."""

from __future__ import annotations

import functools

import cases
import eagle_cases as shared
import falcon_reference as reference
import growth_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import TABLE, TARGET
from internals import drafters_growth
from internals import heads_along_text as _along_text
from internals import heads_falcon_loss as _falcon_loss
from internals import heads_falcon_network as _falcon_network
from mutants.falcon import ROUNDS, STATIC
from safetensors.numpy import load_file

from specjax import decode, drafters, step, testing, tree
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.testing.claims import drawn_as_declared, widen
from specjax.types import Batch, ModelParams

pytestmark = pytest.mark.xdist_group("falcon")

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "falcon": ("falcon", {"block": 1, "gamma": 2, "siblings": "iid"}, ("chain",)),
    "falcon blocks": ("falcon", {"gamma": 4, "siblings": "iid"}, ()),
    "falcon tree": (
        "falcon",
        {"block": 1, "tree": "2x1", "siblings": "without_replacement", "control": "threshold:0.4"},
        (),
    ),
    "falcon dynamic": ("falcon", {"nodes": 6, "depth": 4, "top_k": 2}, ()),
}
# Block -> tokens of a draft, and a tree of so many.
DEPTHS, TREES = {1: 3, 2: 4, 3: 6}, {2: "2x1x2x1", 3: "2x1x1x2x1x1"}


def keys_of(block, growth):
    depth = DEPTHS[block]
    return {
        "tree": {"tree": TREES.get(block), "siblings": "without_replacement"},
        "dynamic": {"nodes": 8, "depth": depth, "top_k": 2},
        "chain": {"gamma": depth, "siblings": "iid"},
    }[growth]


# Block and growth -> whether it is tested by default.
EVERY = [
    pytest.param(2, "tree", id="2, tree"),
    *(
        pytest.param(block, growth, marks=pytest.mark.slow, id=f"{block}, {growth}")
        for block, growth in ((3, "tree"), (3, "dynamic"), (2, "chain"), (1, "chain"))
    ),
]


@functools.cache
def made(block, growth):
    keys = keys_of(block, growth) | (
        {"kv_heads": 1, "head_dim": 8, "qk_norm": True} if block == 3 else {}
    )
    drafter = cases.random_heads("falcon", TARGET, TABLE, scale=0.25, block=block, **keys)
    return drafter, ModelParams(TABLE, drafter.init_params(None))


def net_of(drafter):
    return shared.stepper_of(drafter).init.args[0]


def plain_of(drafter, params) -> reference.FalconNet:
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params.draft)
    with jax.default_matmul_precision("highest"):
        ends = (
            TARGET.embed(params.target, jnp.arange(shared.VOCAB)),
            TARGET.unembed(params.target, jnp.eye(TARGET.width)),
        )
    facts = dict(drafter.training.facts)
    ends = (np.asarray(each, np.float64) for each in ends)
    return reference.FalconNet(wide, facts["head_dim"], facts["block_size"], *ends)


def features_of(text):
    """[n-1,D]: the target's features of a text but its last token."""
    padded = np.zeros((1, shared.SIZE), np.int32)
    padded[0, : len(text)] = text
    hidden, _ = shared._forward(TARGET, TABLE, padded)
    return np.asarray(hidden, np.float64)[0, : len(text) - 1]


@functools.partial(jax.jit, static_argnums=0)
def look(drafter, params, state, path):
    """What the stepper computes after the pending token and along ``path`` i32[B,M]."""
    stepper = shared.stepper_of(drafter)
    begun = stepper.begin(params, step.context_of(state), state.draft.kept)
    block, logits = begun.memory, [begun.logits[:, None]]
    for place in range(path.shape[1]):
        layout = tree.chain_layout(len(path), 1, place + 1)
        nodes = drafters_growth.Nodes(
            path[:, place : place + 1], np.array([place]), place + 1, layout
        )
        out, memory = stepper.step(params, begun.kept, nodes, block)
        block = tree.join(block, memory)
        logits.append(out)
    return shared.Seen(begun.kept, begun.ready, jnp.concatenate(logits, 1))


def row_of(values, row):
    return jax.tree.map(lambda x: x[row], values)


def close(ours, right):
    np.testing.assert_allclose(ours, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("block", "growth"), EVERY)
def test_rounds_follow_the_reference(block, growth):
    """Ragged rows, greedy and sampled, that end at EOS and at limits.

    In every round cache, carry and all logits along a path are those after a fresh prefill on the
    committed text, and the logits are those of the plain reference. The drafts of all rows have the
    probs of their own paths. A text must have k + 1 tokens.
    """
    drafter, params = made(block, growth)
    net, random = plain_of(drafter, params), np.random.default_rng(0)
    partial, seen, most = 0, 0, DEPTHS[block]
    for number, (state, info, fresh) in enumerate(shared.rounds(drafter, growth, params)):
        path = random.integers(0, shared.VOCAB, (len(shared.PROMPTS), most))
        ours, right = (look(drafter, params, each, path) for each in (state, fresh))
        for row in np.flatnonzero(~np.asarray(state.done)):
            text = np.asarray(state.tokens)[row, : int(state.length[row])].tolist()
            assert bool(ours.ready[row]) == bool(right.ready[row]) == (len(text) > block)
            own, new = (row_of(x.kept.text, row) for x in (ours, right))
            assert own.cache.length == new.cache.length == len(text) - 1
            close(own.carry, new.carry)
            close(own.recent, new.recent)
            for each in ("k", "v"):
                pair = (getattr(x.cache, each)[0][:, : len(text) - 1] for x in (own, new))
                close(*pair)
            if len(text) <= block:
                continue
            seen += 1
            partial += 0 < int(info.accepted[row]) < drafter.longest
            close(ours.logits[row], right.logits[row])
            # The reference is slow: every row in every third round.
            for depth in range(most + 1) if number % 3 == 0 else ():
                plain = reference.after(net, text, features_of(text), path[row, :depth])
                close(ours.logits[row, depth], plain)
    assert seen >= 12 and partial >= 1, (seen, partial)


@pytest.mark.parametrize("block", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_sees_real_drafts(block):
    """The drafts along packed documents are those of the plain reference at every place.

    Blocks of training that end at a slot predict what a draft there begins with.
    """
    drafter, params = made(block, "chain")
    plain, net = plain_of(drafter, params), net_of(drafter)
    tokens = np.random.default_rng(3).integers(0, shared.VOCAB, (2, 13))
    segments = np.repeat([[0] * 13, [0] * 4 + [1] * 9], 1, 0)
    batch = Batch(jnp.asarray(tokens), segments=jnp.asarray(segments))

    @jax.jit
    def along(params):
        texts = _falcon_loss.along(net, TARGET, params, batch, DEPTHS[block])
        layout = _along_text.layout_of(batch)
        out = _along_text.output(TARGET, params.target, batch)
        inputs = _falcon_loss.slots_of(out.hidden, batch)

        def trained(phase):
            blocks = _falcon_loss.blocks_of(layout.depth, jnp.full(2, phase), block)
            hidden = _falcon_loss.forward(net, params, *inputs, layout, blocks)
            return blocks, net.ends.unembed(params.target, hidden)

        return [logits for _, logits, _ in texts], [trained(phase) for phase in range(block)]

    drafts, trained = along(params)
    ranks = np.asarray(jax.jit(drafter.training.ranks)(params, batch))
    last = DEPTHS[block] - 1
    places = [(0, 0, 4, 0), (0, 0, 2, 2), (1, 4, 6, last), (1, 4, 7, block), (0, 0, 3, last)]
    for row, begin, t, depth in places:
        head, path = tokens[row, begin : t + 2].tolist(), tokens[row, t + 2 : t + 2 + depth]
        close(drafts[depth][row, t], reference.after(plain, head, features_of(head), path))
        assert ranks[row, t + 1, depth] >= 0
    # The row's second document begins at token 4. With that token pending, the entry is that of a
    # feature of the first document, as in all heads; the next ones have fewer than k slots.
    assert (ranks[1, 5 : 4 + block] == -1).all() and (ranks[:, :block] == -1).all()
    compared = 0
    for blocks, logits in trained:
        for row, t in np.argwhere(np.asarray(blocks.whole)):
            place = int(blocks.place[row, t])
            end = t + block - 1 - place
            if end < 12 and segments[row, end] == segments[row, t]:
                close(logits[row, t], drafts[place][row, end])
                compared += 1
    assert compared > 20 * (block - 1), compared


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2, 3])
def test_relaxed_mask(size):
    """An output depends on the input of a slot if this is in its block or in one before it."""
    drafter, params = made(size, "chain")
    net, depth = net_of(drafter), tree.chain_layout(size, 8)
    phase, rows = jnp.arange(size), size
    blocks = _falcon_loss.blocks_of(depth.depth, phase, size)
    tokens = jnp.ones((rows, 8), jnp.int32)
    features = jax.random.normal(jax.random.key(0), (rows, 8, TARGET.width))

    @jax.jit
    def run(features):
        return _falcon_loss.forward(net, params, tokens, features, depth, blocks)

    right = run(features)
    for slot in range(8):
        changed = (run(features.at[:, slot].add(1.0)) != right).any(-1)
        for row in range(rows):
            number = (np.arange(8) + size - row) // size
            np.testing.assert_array_equal(changed[row], number >= number[slot], f"{slot} {row}")


def glanced(place, number, counted, order, runs, count):
    """The slots of one row that are given, in plain loops."""
    given = np.zeros(len(place), bool)
    for block in np.argsort(order):
        for slot in np.flatnonzero(number == block):
            if counted[slot] and place[slot] < runs[block] and given.sum() < count:
                given[slot] = True
    return given


@pytest.mark.fast
def test_glancing_is_per_row():
    random, size = np.random.default_rng(0), 3
    depth = tree.segments(jnp.asarray([[0] * 12, [0] * 5 + [1] * 7, [0] * 12])).depth
    blocks = _falcon_loss.blocks_of(depth, jnp.asarray([0, 1, 2]), size)
    counted, count = random.random((3, 12)) < 0.8, np.array([2, 4, 20])
    order, runs = random.random((3, 12)), random.integers(1, 3, (3, 12))
    ours = _falcon_loss.glanced(blocks, *map(jnp.asarray, (counted, order, runs, count)))
    number, place, whole = (np.asarray(x) for x in blocks)
    for row in range(3):
        own = (order[row], runs[row], count[row])
        right = glanced(place[row], number[row], counted[row] & whole[row], *own)
        np.testing.assert_array_equal(ours[row], right)
    # The last row has fewer free slots than it may be given.
    assert ours[0].sum() == 2 and ours[1].sum() == 4 and 0 < ours[2].sum() < 20


def smooth_l1(x):
    x = np.abs(x)
    return np.where(x < 1, x * x / 2, x - 0.5).mean(-1)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def network_outputs(net, params, tokens, features, layout, blocks):
    hidden = _falcon_loss.forward(net, params, tokens, features, layout, blocks)
    return hidden, net.ends.unembed(params.target, hidden)


@functools.partial(jax.jit, static_argnums=0)
def target_outputs(net, params, batch):
    del net
    return _along_text.output(TARGET, params.target, batch)


def loss_by_hand(net, params, batch, key, glancing, rate):
    """(the loss in NumPy, the slots of each row that are given), of the network's own outputs."""
    keys, k = jax.random.split(key, 4), net.shape.block
    tokens = np.asarray(batch.tokens)
    rows, size = tokens.shape[0], tokens.shape[1] - 1
    out = target_outputs(net, params, batch)
    hidden, logits = np.asarray(out.hidden, np.float64), np.asarray(out.logits, np.float64)
    layout = tree.chain_layout(rows, size)
    phase = jax.random.randint(keys[0], (rows,), 0, k)
    blocks = _falcon_loss.blocks_of(layout.depth, phase, k)
    slots = np.arange(size)
    counted = (slots + k < size) & (slots >= np.asarray(phase)[:, None])
    ahead = np.minimum(slots + k, size - 1)

    def outputs(tokens, features):
        own = jnp.asarray(tokens, jnp.int32), jnp.asarray(features, jnp.float32)
        each = network_outputs(net, params, *own, layout, blocks)
        return tuple(np.asarray(x, np.float64) for x in each)

    wrong = outputs(tokens[:, 1:], hidden)[1].argmax(-1) != logits[:, ahead].argmax(-1)
    given, (drawn, ordered) = np.zeros((rows, size), bool), jax.random.split(keys[2])
    most = np.floor(glancing * rate * (wrong & counted).sum(1)).astype(int)
    order = np.asarray(jax.random.uniform(ordered, (rows, size)))
    runs = np.asarray(jax.random.randint(drawn, (rows, size), 1, max(k - 1, 1) + 1))
    for row in range(rows):
        own = (order[row], runs[row], most[row])
        place, number = np.asarray(blocks.place)[row], np.asarray(blocks.number)[row]
        given[row] = glanced(place, number, counted[row], *own)
    read = np.where(given, ahead, slots)
    row = np.arange(rows)[:, None]
    feature, own = outputs(tokens[row, read + 1], hidden[row, read])
    right = logits[:, ahead]
    p, q = log_softmax(right), log_softmax(own)
    soft = (np.exp(p) * (p - q)).sum(-1)
    hard = -np.take_along_axis(q, right.argmax(-1)[..., None], -1)[..., 0]
    value = smooth_l1(feature - hidden[:, ahead]) + 0.1 * (0.9 * soft + 0.1 * hard)
    return value[counted].mean(), given & counted


def loss_error(block=2) -> float:
    """The largest difference of the loss from the formula, with glancing and later in a run."""
    drafter, params = made(block, "chain")
    net, tokens = net_of(drafter), np.random.default_rng(5).integers(0, shared.VOCAB, (3, 14))
    worst, keys = 0.0, {"noise": 0.0, "dropout": 0.0, "glancing": 0.8, "run_steps": 10}
    loss = jax.jit(functools.partial(_falcon_loss.loss, net, TARGET, **keys))
    for seed, done in enumerate((0, 5, 10)):
        batch, key = Batch(jnp.asarray(tokens), step=jnp.full(3, done)), jax.random.key(seed)
        value, metrics = loss(params.draft, TABLE, batch, key)
        right, given = loss_by_hand(net, params, batch, key, 0.8, 1 - done / 10)
        count = float(metrics["weight"]["loss"])
        worst = max(worst, abs(float(value) - right), abs(metrics["glanced"] * count - given.sum()))
        assert (given.sum(1) > 0).all() == (done < 10)
    return worst


def test_loss_is_the_formula():
    assert loss_error() < 1e-5


@pytest.mark.slow
def test_noise_and_dropout_change_the_loss():
    drafter, params = made(2, "chain")
    batch = Batch(jnp.asarray(np.random.default_rng(5).integers(0, shared.VOCAB, (3, 14))))
    zero, key = {"noise": 0.0, "dropout": 0.0, "glancing": 0.0}, jax.random.key(0)

    def value(**keys):
        return float(drafter.training.loss(params.draft, TABLE, batch, key, **zero | keys)[0])

    values = {value(), value(noise=0.1), value(dropout=0.1), value(glancing=1.0)}
    assert len(values) == 4
    grads = jax.grad(lambda own: drafter.training.loss(own, TABLE, batch, key)[0])(params.draft)
    assert all(bool(jnp.isfinite(x).all() & (x != 0).any()) for x in jax.tree.leaves(grads))


def reference_error(drafter, params) -> float:
    """Of the logits along paths after prompts, from the plain reference."""
    net, worst, path = plain_of(drafter, params), 0.0, np.arange(16).reshape(4, 4) % 8
    packed, lengths = decode.pack_prompts(shared.PROMPTS, shared.SIZE)
    ours = look(drafter, params, shared.prefilled(drafter, params, packed, lengths), path)
    for row in (0, 2):
        text = shared.PROMPTS[row]
        for depth in (0, 1, 2, 4):
            right = reference.after(net, text, features_of(text), path[row, :depth])
            worst = max(worst, np.abs(np.asarray(ours.logits)[row, depth] - right).max())
    return float(worst)


def rounds_error(change) -> float:
    """Of the logits along a path, after rounds of a changed drafter and a fresh prefill."""
    drafter, params = made(2, "tree")
    wrong = change(drafter)._replace(name=drafter.name)
    path, worst = np.zeros((len(shared.PROMPTS), 4), int), 0.0
    for state, _, fresh in shared.rounds(wrong, "tree", params, most=5):
        ours, right = look(wrong, params, state, path), look(drafter, params, fresh, path)
        alive = ~np.asarray(state.done) & np.asarray(right.ready)
        error = np.abs(np.subtract(ours.logits, right.logits)).max((1, 2))
        worst = max(worst, float(error[alive].max(initial=0)))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ROUNDS, ids=lambda each: each.name)
def test_mutants_of_rounds_are_detected(mutant):
    assert rounds_error(lambda drafter: drafter) < 1e-4
    assert rounds_error(mutant.change) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", STATIC)
def test_mutants_of_the_network_are_detected(monkeypatch, name):
    """Each fails the comparison with the plain reference, or with the formula of the loss."""
    mutant = STATIC[name]
    mutant.change(monkeypatch)
    drafter = cases.random_heads("falcon", TARGET, TABLE, scale=0.25, gamma=4, siblings="iid")
    params = ModelParams(TABLE, drafter.init_params(None))
    error = reference_error(drafter, params) if mutant.network else loss_error()
    assert error > 1e-3, error


def test_network_without_mutants():
    assert reference_error(*made(2, "chain")) < 1e-4


@pytest.mark.fast
def test_files(tmp_path):
    """What is written is read again, with EAGLE's names and torch's."""
    drafter, params = made(2, "chain")
    facts = dict(drafter.training.facts)
    head_files.write(tmp_path / "a", "falcon", params.draft, facts)
    head = head_files.read(tmp_path / "a", "falcon")
    jax.tree.map(np.testing.assert_array_equal, head.params, params.draft)
    again = drafters.make("falcon", TARGET, model=tmp_path / "a", gamma=2)
    assert again.training.facts == drafter.training.facts
    stored = load_file(tmp_path / "a" / "model.safetensors")
    names = {"layers.0.self_attn.q_proj.weight", "layers.0.post_attention_layernorm.weight"}
    assert names <= stored.keys() and not any("fc" in name for name in stored)
    assert stored["lstm.weight_ih_l0"].shape == (4 * TARGET.width, 2 * TARGET.width)
    # A language model Falcon is no directory of heads that may be replaced.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"model_type": "falcon"}')
    with pytest.raises(UserError, match="is no directory of heads"):
        head_files.write(tmp_path / "b", "falcon", params.draft, facts)


def test_a_cell_adds_up_small_numbers_in_bfloat16():
    """Its carry is in float32: 600 summands of 0.004 would end at about 1 in bfloat16."""
    width, size = 2, 600
    take, cell = jnp.asarray([-5.3, 1.0], jnp.bfloat16)
    gates = jnp.repeat(jnp.stack([take, jnp.asarray(20, take.dtype), cell, take]), width)
    own = {
        name: {"kernel": jnp.zeros((rows, 4 * width), take.dtype), "bias": bias}
        for name, rows, bias in (("input", 2 * width, gates), ("hidden", width, 0 * gates))
    }
    second = own | {"input": own["input"] | {"kernel": own["hidden"]["kernel"]}}
    net = net_of(made(2, "tree")[0])._replace(dtype=jnp.dtype(jnp.bfloat16))
    carry = _falcon_network.no_carry(net, ModelParams({}, {"lstm": {"0": own}}), 1)[..., :width]
    x = jnp.zeros((1, size, 2 * width), take.dtype)
    outputs, carries = _falcon_network.lstm({"0": own, "1": second}, x, carry)
    assert (outputs.dtype, carries.dtype) == (jnp.bfloat16, jnp.float32)
    take, cell = (float(each) for each in (take, cell))
    right = size * np.tanh(cell) / (1 + np.exp(-take))
    np.testing.assert_allclose(carries[0, -1, :, 1], right, rtol=1e-3)


@pytest.mark.slow
def test_lstm_is_torchs(tmp_path):
    """torch computes the same with the stored tensors; a text may be fed in parts."""
    torch = pytest.importorskip("torch")
    drafter, params = made(2, "chain")
    head_files.write(tmp_path / "a", "falcon", params.draft, dict(drafter.training.facts))
    stored = load_file(tmp_path / "a" / "model.safetensors")
    width, x = TARGET.width, np.random.default_rng(0).normal(size=(2, 7, 2 * TARGET.width))
    lstm = torch.nn.LSTM(2 * width, width, 2, batch_first=True)
    own = {name: value for name, value in stored.items() if name.startswith("lstm.")}
    lstm.load_state_dict({name[5:]: torch.tensor(value) for name, value in own.items()})
    x = x.astype(np.float32)
    with torch.no_grad():
        right, (h, c) = lstm(torch.tensor(x))
    carry = jnp.zeros((2, 2, 2, width))
    first, states = _falcon_network.lstm(params.draft["lstm"], jnp.asarray(x[:, :3]), carry)
    second, last = _falcon_network.lstm(params.draft["lstm"], jnp.asarray(x[:, 3:]), states[:, -1])
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), right, atol=1e-6)
    # torch: [layers,B,D] of each.
    np.testing.assert_allclose(last[:, -1], np.stack([h, c], 2).swapaxes(0, 1), atol=1e-6)


LAWS = {
    "blocks": ({"gamma": 4, "siblings": "iid"}, "chain"),
    "tree": ({"tree": "2x1", "siblings": "without_replacement"}, "traversal"),
    "blocks of one": ({"block": 1, "tree": "2x1", "siblings": "iid"}, "recursive"),
    "dynamic": ({"nodes": 5, "depth": 4, "top_k": 2}, "deterministic"),
}


@pytest.mark.slow
@pytest.mark.parametrize("label", LAWS)
def test_exact_law(label):
    """Enumerated in float64; tokens are drawn from the declared probs."""
    keys, rule = LAWS[label]
    target, prompts = testing.tabular(3), [[2, 1, 0, 1], [0, 2, 1]]
    drafter = cases.random_heads("falcon", target, cases.table(0), **keys)
    params = ModelParams(cases.table(0), drafter.init_params(None))
    settings = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8})
    found = drawn_as_declared(target, drafter, params, prompts, settings, after=(1,))
    assert found.passed, found
    with jax.enable_x64(True):
        params = jax.tree.map(widen, params)
        for each in settings:
            error = growth_cases.law_error(drafter, rule, target, params, (2, 1, 0, 1), **each)
            assert error < growth_cases.EXACT


@pytest.mark.fast
def test_keys():
    drafter = drafters.make("falcon", TARGET)
    assert (drafter.siblings, drafter.longest, drafter.taps) == ("deterministic", 6, ())
    assert drafters.make("falcon", TARGET, block=4).longest == 8
    with pytest.raises(UserError, match="falcon has no parameters yet; give model="):
        drafter.init_params(None)

    def refused(match, target=TARGET, **keys):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make("falcon", target, **keys)
        assert "\n" not in str(caught.value), caught.value

    refused("block is -1; it must be a whole number >= 0", block=-1)
    refused("draft is 3 tokens deep, and falcon drafts blocks of 2; .* 2 or 4 tokens", gamma=3)
    refused("draft is 1 tokens deep, and falcon drafts blocks of 2; .* 2 tokens", tree="4")
    refused("draft is 4 tokens deep, and falcon drafts blocks of 3", block=3, depth=4)
    refused("does not take the key 'layers'", layers=2)
    refused("reads the features of its target, and lm has none", TARGET._replace(embed=None))
    refused("reads the tokens of its draft", tree="best_first", nodes=4)
    params = made(2, "chain")[0].init_params(None)
    foreign = "the parameters are not those of falcon"
    for wrong in ({}, {"lstm": {}}, params | {"more": np.zeros(3)}, {"lstm": params["lstm"]}):
        refused(foreign, params=wrong)
    refused("qk_norm is True, and the given falcon has False", params=params, qk_norm=True)
    wider = testing.tiny(layers=1, width=32, vocab_size=shared.VOCAB)[0]
    refused("on this target it must be .*; use heads made for this target", wider, params=params)


@pytest.mark.fast
def test_block_of_files(tmp_path):
    drafter, params = made(2, "chain")
    head_files.write(tmp_path / "a", "falcon", params.draft, dict(drafter.training.facts))
    with pytest.raises(UserError, match="block is 4, and the given falcon has 2") as no:
        drafters.make("falcon", TARGET, model=tmp_path / "a", block=4)
    assert "\n" not in str(no.value)
    facts = {key: value for key, value in drafter.training.facts if key != "block_size"}
    head_files.write(tmp_path / "b", "falcon", params.draft, facts)
    with pytest.raises(UserError, match="lacks block_size"):
        drafters.make("falcon", TARGET, model=tmp_path / "b")


@pytest.mark.fast
def test_loss_refuses():
    drafter, params = made(2, "chain")

    def refused(match, tokens=9, depths=None, **keys):
        batch = Batch(jnp.zeros((1, tokens), jnp.int32), depths=depths)
        with pytest.raises(UserError, match=match):
            drafter.training.loss(params.draft, TABLE, batch, jax.random.key(0), **keys)

    refused("loss.hard is 2; it must be", hard=2)
    refused("loss.dropout is 1; it must be", dropout=1)
    refused("loss.feature and loss.weight are both 0", feature=0, weight=0)
    refused("loss.hard is 0.5 and loss.weight is 0", hard=0.5, weight=0)
    refused("no effect where loss.hard is 1", hard=1, divergence="reverse_kl")
    refused("raise train.length to 4 or more", tokens=4)
    refused("falcon learns whole blocks", depths=jnp.zeros((1, 9), jnp.int32))
