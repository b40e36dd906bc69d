"""PaSS: look-ahead embeddings make the target guess several tokens in one pass. L1 with its rules.

Parallel Speculative Sampling, Monea, Joulin and Grave 2023 (2311.13581). L input embeddings are
trained and nothing else. After the pending token they stand for the next L tokens; the target's
output at each of them is the distribution of the token after it, without knowledge of the tokens
between. So the probabilities of a depth are the same on all paths, and best-first trees
(``tree="best_first"``) cost no further pass. The target's keys and values for them are dropped.

``calls=2``, as published: a pass over the pending token and the embeddings makes the draft, and a
second pass verifies it. The first draft token is drawn from the target's own distribution and
always accepted; a draft has up to L + 1 levels.

``calls=1`` verifies a draft and makes the next one in the same pass: the embeddings follow the
pending token and each node of the draft, and after the verdict those behind the last accepted node
give the next draft. They have not seen the token that the target added, so a draft has up to L
levels and all of its tokens are guesses. The pass is over (N + 1) (L + 1) tokens. The chain of this
variant is a tree without siblings: take a rule for trees.

The name is a keyword of Python: ``import`` cannot name this module, ``drafters.load("pass")`` can.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import declare
from specjax.accept.verdict import parents as parents_of
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import _foresee, files, growth
from specjax.drafters.files import Ends, Given
from specjax.drafters.files.codec import Codec, Rule
from specjax.drafters.growth import KINDS, Begun, Fixed, Plan, Stepper
from specjax.drafters.growth.plans import Method
from specjax.drafters.heads import _along_text, _depth_loss
from specjax.drafters.heads._along_text import PLACES, Drafts, Texts
from specjax.drafters.heads._depth_loss import DepthKeys
from specjax.drafters.self_speculation import _own_cache
from specjax.drafters.shared_keys import HeadKeys, stored_size
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.topology import shapes
from specjax.types import (
    DETERMINISTIC,
    LM,
    Array,
    Batch,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Params,
    Training,
    Verdict,
)

REFERENCE = "monea2023pass"

HEADS = 4


class Keys(HeadKeys):
    """The keys of ``pass``."""

    heads: int = stored_size(
        "look-ahead embeddings, the most tokens of a draft",
        lambda params: len(params["look_ahead"]),
        new=HEADS,
    )
    calls: int = key(
        2,
        "passes of the target per round: 2, one that drafts and one that verifies, or 1",
        least=1,
        most=2,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with look-ahead embeddings.

    Raises:
        UserError: files without embeddings or of another target, a target that takes no
            embeddings, another number of calls, a tree that does not fit.
    """
    if target.inside.extended is None:
        raise UserError(
            f"pass has its own input embeddings, and {target.name} takes none; take a decoder of "
            "specjax.models"
        )
    given, keys = files.read("pass", target, keys)
    setup = Setup(target, given.ends, keys.heads, keys.calls)
    return _build(setup, keys, given)


# The id of embedding i is the vocabulary's size plus i (``Inside.extended``). No such token is ever
# proposed: its nodes are invalid, and the target is fed them (``Draft.fed``). Along a text,
# embedding i (from 0) behind the token at place s predicts tokens[s+2+i]: with one pass per round
# it is behind the token before the pending one, with two behind the pending one.


class Setup(NamedTuple):
    """The static settings."""

    target: LM
    ends: Ends
    rows: int  # L, how many embeddings
    calls: int  # passes of the target per round

    @property
    def depth(self) -> int:
        """The longest draft."""
        return self.rows + (self.calls == 2)


class State(struct.PyTreeNode):
    """With one pass per round: the outputs at the embeddings behind the last accepted token."""

    hidden: Array  # [B,L,E]
    known: Array  # bool[B] False: there is none yet, because the prompt has one token only


def rows_of(params: ModelParams) -> Array:
    """[L,E] the embeddings."""
    return params.draft["look_ahead"]


def ids(setup: Setup, *lead: int) -> Array:
    """i32[...,L] the ids of the embeddings, repeated."""
    own = setup.target.vocab_size + jnp.arange(setup.rows, dtype=jnp.int32)
    return jnp.broadcast_to(own, (*lead, setup.rows))


def apply(setup: Setup, params: ModelParams, tokens: Array, cache: Any, layout: Any = None):
    """The target's output for tokens i32[B,T], ids of embeddings among them."""
    assert setup.target.inside.extended is not None
    return setup.target.inside.extended((params.target, rows_of(params)), tokens, cache, layout)[0]


def _build(setup: Setup, keys: HeadKeys, given: Given) -> Drafter:
    """The drafter. L1 with a rule that takes its siblings. Raises UserError."""
    depth, vocab, accuracy = setup.depth, setup.target.vocab_size, given.config.get("accuracy")
    # Measured with two passes there is one level more, before the others.
    measured = accuracy[-depth:] if accuracy and len(accuracy) >= depth else None
    method = Method("pass", shapes.chain(depth), "iid", vocab, depth, True, measured)
    plan = growth.read(method, keys)
    one = setup.calls == 1
    if one and plan.controller is not None and plan.controller.size is not None:
        raise UserError(
            f"control is {plan.controller.name!r}, and pass feeds as many nodes in every round "
            "with one call; give calls=2, or another controller"
        )
    stepper = Stepper(Bound(_begin_with_pass, setup), growth.step_at_depth, independent=True)
    if one:
        begin, init = Bound(_begin_behind, setup), Bound(_init, setup)
        commit = Bound(_commit, setup, plan.growth.nodes)
        stepper = stepper._replace(begin=begin, init=init, commit=commit)
    forecasts = _foresee.forecasts(Bound(_along, setup), plan, before=2 - setup.calls, ranked=depth)
    training = Training(
        loss=Bound(loss, setup), start=Bound(_start, setup), reads_tokens=True, **forecasts
    )
    more = {"training": training, "features": one, "gaps": not one}
    drafter = growth.build("pass", stepper, plan, given.init_params("pass"), **more)
    return _with_embeddings(setup, drafter, plan) if one else drafter


# Two passes per round.


def _begin_with_pass(setup: Setup, params: ModelParams, context: Context, kept: Any) -> Begun:
    _own_cache.check_cache("pass", context.cache)
    batch = context.length.shape[0]
    tokens = jnp.concatenate([context.pending[:, None], ids(setup, batch)], 1)
    logits = apply(setup, params, tokens, context.cache).logits
    return Begun(logits[:, 0], kept, reads=logits)


# One pass per round.


def _init(setup: Setup, params: ModelParams, context: Context, *_: Any) -> State:
    """The cache has the prompt without its pending token: the embeddings follow it there."""
    out = apply(setup, params, ids(setup, context.length.shape[0]), context.cache)
    return State(out.hidden, context.length > 1)


def _begin_behind(setup: Setup, params: ModelParams, context: Context, kept: State) -> Begun:
    logits = setup.ends.unembed(params.target, kept.hidden)
    return Begun(logits[:, 0], kept, ready=kept.known, reads=logits)


def _commit(
    setup: Setup, nodes: int, params: Any, kept: State, _: None, verdict: Verdict, out: Output
) -> State:
    # The last committed token that the target was fed: the pending token, or an accepted node.
    last = jnp.maximum(verdict.count - 1, 0)
    fed = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    place = jnp.take_along_axis(fed, last[:, None], 1)
    own = 1 + nodes + place * setup.rows + jnp.arange(setup.rows)
    hidden = jnp.take_along_axis(out.hidden, own[..., None], 1)
    alive = verdict.count > 0
    return State(jnp.where(alive[:, None, None], hidden, kept.hidden), kept.known | alive)


def _with_embeddings(setup: Setup, drafter: Drafter, plan: Plan) -> Drafter:
    """The drafter whose drafts have the embeddings behind the pending token and each node."""
    growth = plan.growth
    return drafter._replace(
        propose=Bound(_propose, setup, drafter),
        nodes=growth.nodes + (growth.nodes + 1) * setup.rows,
        depth=growth.depth,
        siblings=KINDS[growth.how] if isinstance(growth, Fixed) else DETERMINISTIC,
        # The embeddings are fed in every round, so a round has one width, and none may leave them
        # out: the next draft is made of the outputs at them.
        whole=True,
        rare=drafter.rare._replace(rest=None, rows=rows_of),
    )


def _propose(
    setup: Setup, drafter: Drafter, params: ModelParams, keys: RowKeys, context: Context, state: Any
) -> tuple[Draft, Any]:
    draft, state = drafter.propose(params, keys, context, state)
    (batch, nodes), parents = draft.tokens.shape, parents_of(draft)
    more = (nodes + 1) * setup.rows
    probs = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, more), (0, 0))), draft.probs)
    behind = jnp.broadcast_to(jnp.asarray(_parents(nodes, setup.rows)), (batch, more))
    draft = Draft(
        tokens=jnp.concatenate([draft.tokens, ids(setup, batch, nodes + 1).reshape(batch, -1)], 1),
        valid=jnp.pad(draft.valid, ((0, 0), (0, more))),
        parents=jnp.concatenate([parents, behind], 1),
        probs=probs,
        finite=draft.finite,
        fed=jnp.full((batch,), nodes + more, jnp.int32),
        depth=drafter.longest,
    )
    return draft, state


def _parents(nodes: int, rows: int) -> np.ndarray:
    """i32[(nodes+1)*rows]: the parents of the embeddings' nodes, which follow the draft's own."""
    place = np.arange((nodes + 1) * rows)
    return np.where(place % rows == 0, place // rows - 1, nodes + place - 1).astype(np.int32)


def _start(setup: Setup, target_params: Params, key: Array) -> Params:
    """The embeddings of random tokens."""
    some = jax.random.randint(key, (setup.rows,), 0, setup.target.vocab_size)
    return {"look_ahead": setup.ends.embed(target_params, some).astype(jnp.float32)}


def outputs(setup: Setup, params: ModelParams, batch: Batch, places: Array) -> tuple[Array, Array]:
    """Hidden vectors of the text [B,T,E], and of the embeddings behind ``places`` [B,P,L,E].

    ``places`` i32[B,P] are of the T tokens of the text that are fed. One pass.
    """
    text, own = batch.tokens[:, :-1], _along_text.layout_of(batch)
    (rows, size), (_, count) = text.shape, places.shape
    fed = jnp.concatenate([text, ids(setup, rows, count).reshape(rows, -1)], 1)
    # The text sees itself. An embedding sees what its place sees, and those before it there.
    group, step = jnp.divmod(jnp.arange(count * setup.rows), setup.rows)
    among = (group[:, None] == group) & (step <= step[:, None])
    places = jnp.repeat(places, setup.rows, 1)
    layout = _along_text.layout_behind(own, places, 1 + step, among)
    above = jnp.pad(own.visible, ((0, 0), (0, 0), (0, count * setup.rows)))
    layout = layout.replace(visible=jnp.concatenate([above, layout.visible], 1))
    cache = setup.target.init_cache(rows, 0)
    hidden = apply(setup, params, fed, cache, layout).hidden
    return hidden[:, :size], hidden[:, size:].reshape(rows, count, setup.rows, -1)


class LossKeys(DepthKeys):
    """The keys of the loss."""

    places: int = key(
        PLACES,
        "tokens of each row that embeddings follow: random ones, of those that have a label",
        least=1,
    )


@declare.method(LossKeys)
def loss(
    setup: Setup, params: Params, target_params: Params, batch: Batch, key: Array, keys: LossKeys
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label of the first embedding (with ``Batch.depths``: of all), and metrics.

    ``_depth_loss.loss`` of the embeddings behind random tokens, or all where there are fewer.

    Raises:
        UserError: weights out of range, a batch of fewer than 3 tokens.
    """
    _along_text.check_length(batch, 2, "look-ahead embeddings predict two tokens ahead")
    chosen = _along_text.random_places(key, batch, 2, setup.rows, keys.places)
    drafts = _drafts(setup, ModelParams(target_params, params), batch, chosen)
    drafts = drafts._replace(places=(chosen,) * setup.rows)
    number = drafts.number_of_labels(setup.rows)
    return _depth_loss.loss(drafts, keys, setup.rows, number)


def _drafts(setup: Setup, params: ModelParams, batch: Batch, places: Array) -> Drafts:
    """What the embeddings behind ``places`` predict.

    With two passes per round the target's own output is depth 0 of a draft.
    """
    text, hidden = outputs(setup, params, batch, places)
    unembed = Bound(setup.ends.unembed, params.target)

    def step(state: Any, depth: int) -> tuple[Array, Any]:
        return unembed(hidden[:, :, depth]), state

    return Drafts(batch, unembed(text), step, first=setup.calls - 1)


def _along(setup: Setup, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """``_along_text.Along``: at every place of the text.

    With one pass per round an entry belongs to the token before the pending one, with two to the
    pending token; then depth 0 is the target's own output.
    """
    rows, size = batch.tokens.shape
    drafts = _drafts(setup, params, batch, _along_text.every_place(rows, size - 1))
    if setup.calls == 2:
        yield _along_text.label(batch, 1)[0], drafts.teacher, drafts.teacher
    yield from drafts.along(depth - (setup.calls == 2))


class _Files(Codec):
    """No files were released: the name is specjax's. L is the number of embeddings."""

    files = ("look_ahead.safetensors",)
    tables: ClassVar = {"": (Rule("look_ahead.weight", "look_ahead", "L D"),)}


CODEC = _Files("pass")
