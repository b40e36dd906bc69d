"""The rounds of beam search: the draft's beams, one pass of the target, the steps that it decides.

The beams of a row are one tree over its prompt. Place ``s * K + j`` of a block has what a model
computed for the newest token of beam j after s steps; masks name the places before each beam. The
prompt's cache is never written, and no keys move when a beam continues another one. The keys and
values of a decoder and of T5 are a ``cache.GrownBlock``, which is read in place.

The nodes of a round are numbered by levels: the K newest tokens of the beams, then U nodes for each
of gamma levels of the draft. B, K, N, V as in ``_hypotheses``; P is the number of places, D that of
nodes, K + U * gamma.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import sampling, tree
from specjax.cache import GrownBlock, KVBlock, write_after
from specjax.decode import _hypotheses as hypotheses
from specjax.decode._hypotheses import Hypotheses, Rules
from specjax.types import LM, ModelParams


class Sizes(NamedTuple):
    """What is static."""

    beams: int  # K
    most: int  # N
    gamma: int = 0
    drafted: int = 0  # U

    @property
    def places(self) -> int:
        """P: one for each beam and step, and room for what a round writes beyond the last step."""
        return self.beams * (self.most + self.gamma)

    @property
    def levels(self) -> tuple[int, ...]:
        """The number of nodes of each level."""
        return (self.beams, *[self.drafted] * self.gamma)

    def first(self, level: int) -> int:
        """The number of the first node of a level; of level gamma + 1: D."""
        return sum(self.levels[:level])


class Front(struct.PyTreeNode):
    """The newest tokens of the beams of a row."""

    tokens: jax.Array  # i32[B,K]
    before: jax.Array  # bool[B,K,P] the places before each of them


class Search(struct.PyTreeNode):
    """What the loop carries; the caches of the prompts stay outside."""

    own: Hypotheses
    front: Front  # not yet fed
    grown: Any  # the target's block, of P tokens
    passes: jax.Array  # i32[B] the target's, while the row was not done
    failed: jax.Array  # i32[B] the pass in which logits were not finite, or -1
    # With a draft: the front one step before, and the draft's block of K + P tokens without that
    # step. Its first K places are never read.
    last: Front | None = None
    draft: Any = None


class Nodes(NamedTuple):
    """The tree of a round, level by level."""

    tokens: list[jax.Array]  # i32[B,U] each
    parents: list[jax.Array]  # i32[B,U] each: a number in the level before; of level 0 not read
    roots: list[jax.Array]  # i32[B,U] each: the beam that a node continues
    inside: list[jax.Array]  # bool[B,U,D] each: its ancestors among the nodes, and itself


def start(
    sizes: Sizes,
    models: tuple[LM, LM | None],
    own: Hypotheses,
    pending: jax.Array,
    blocks: tuple[Any, Any],
) -> Search:
    """The search after the prompts, whose last tokens are ``pending`` i32[B].

    ``blocks`` are those of one token of both models, [B,1,...]; the draft's is None without one.
    """
    batch, beams = own.scores.shape
    tokens = jnp.broadcast_to(pending[:, None], (batch, beams))
    front = Front(tokens, jnp.zeros((batch, beams, sizes.places), bool))
    none = jnp.zeros((batch,), jnp.int32)
    counts = (sizes.places, beams + sizes.places)
    grown, draft = (_empty(*each) for each in zip(models, blocks, counts, strict=True))
    return Search(own, front, grown, none, none - 1, front if sizes.gamma else None, draft)


def step(
    sizes: Sizes,
    models: tuple[LM, LM | None],
    params: ModelParams,
    caches: tuple[Any, Any],
    now: Search,
    rules: Rules,
) -> Search:
    """One round: in each row that is not done, at least one step and at most gamma + 1."""
    nodes, drafted, sound = _roots(sizes, now.front), None, None
    if models[1] is not None:
        nodes, drafted, sound = _propose(sizes, models[1], params.draft, caches[1], now, rules)
    every = [jnp.concatenate(each, 1) for each in (nodes.tokens, nodes.roots, nodes.inside)]
    visible = jnp.concatenate([hypotheses.of(now.front.before, every[1]), every[2]], 2)
    depth = [jnp.full(count, level) for level, count in enumerate(sizes.levels)]
    layout = tree.Layout(visible, _depths(sizes, now.own.steps, depth))
    out, block = models[0].apply(params.target, every[0], caches[0], layout, now.grown)
    after, chosen = _decide(sizes, now, nodes, out.logits, rules)
    if sound is not None:
        after = _unless(sound | now.own.done, after)
    # The places of a write depend on what was read: see ``write_after``.
    at, read = now.own.steps * sizes.beams, out.logits[:, : sizes.beams, 0]
    if not sizes.gamma:
        # All rows that are not done have as many steps, and each step writes its whole block. The
        # sum differs only where no row has finite logits.
        at = at.max() + jnp.isnan(read).all().astype(at.dtype)
        return after.replace(grown=_put(now.grown, block, at))
    at = write_after(at, read)
    # Beyond the steps that were taken, the places are written again before they are read.
    taken = jnp.repeat(jnp.arange(sizes.gamma + 1), sizes.beams)
    taken = taken < (after.own.steps - now.own.steps)[:, None]
    grown = _put(now.grown, tree.take(block, chosen, taken), at)
    after = after.replace(grown=grown)
    if drafted is None:
        return after
    again, rest = _from(drafted, 0, sizes.beams), _from(drafted, sizes.beams)
    count = sizes.beams * sizes.gamma
    rest = tree.take(rest, chosen[:, :count], taken[:, :count])
    return after.replace(draft=_put(now.draft, tree.join(again, rest), at))


def _decide(
    sizes: Sizes, now: Search, nodes: Nodes, logits: jax.Array, rules: Rules
) -> tuple[Search, jax.Array]:
    """The steps that the logits f32[B,D,V] decide, and the nodes i32[B,(gamma+1)*K] of the beams.

    A further step needs the logits of all new beams: every one of them must be among the draft's.
    """
    beams = sizes.beams
    node = jnp.broadcast_to(jnp.arange(beams), now.front.tokens.shape)
    live, chosen = ~now.own.done, []
    now = now.replace(passes=now.passes + live)
    for level in range(sizes.gamma + 1):
        chosen.append(sizes.first(level) + node)
        scored = logits[:, sizes.first(level) : sizes.first(level + 1)]
        own_logits = hypotheses.of(scored, node)
        bad = live & ~jnp.isfinite(own_logits.max(-1)).all(-1)
        own, parent, token = hypotheses.step(now.own, sampling.log_probs(own_logits), rules)
        here = jnp.arange(sizes.places) == (now.own.steps[:, None] * beams + parent)[..., None]
        front = Front(token, hypotheses.of(now.front.before, parent) | here)
        last = None if now.last is None else now.front
        after = now.replace(own=own, front=front, last=last)
        now = _where(live & ~bad, after, now)
        now = now.replace(
            failed=jnp.where(bad, now.passes - 1, now.failed),
            own=now.own.replace(done=now.own.done | bad),
        )
        if level < sizes.gamma:
            same = nodes.parents[level + 1][:, None] == hypotheses.of(node, parent)[..., None]
            same &= nodes.tokens[level + 1][:, None] == token[..., None]
            node = jnp.argmax(same, -1)
            live &= same.any(-1).all(-1) & ~now.own.done
    return now, jnp.concatenate(chosen, 1)


def _unless(good: jax.Array, now: Search) -> Search:
    """The search in which the rows that are not ``good`` bool[B] have failed in the last pass."""
    failed = jnp.where(~good & (now.failed < 0), now.passes - 1, now.failed)
    return now.replace(failed=failed, own=now.own.replace(done=now.own.done | ~good))


def _propose(
    sizes: Sizes, draft: LM, params: Any, cache: Any, now: Search, rules: Rules
) -> tuple[Nodes, Any, jax.Array]:
    """The draft's beam search from the target's beams and their scores: its nodes, its block.

    The last is bool[B]: whether all logits that were used are finite. The block has the step before
    the front, which the draft may not have been fed, then the nodes without the last level, which
    it is not fed: [B,K+D-U,...].
    """
    assert now.last is not None
    beams, nodes, scores = sizes.beams, _roots(sizes, now.front), now.own.scores
    itself = jnp.broadcast_to(jnp.eye(beams, dtype=bool), (len(scores), beams, beams))
    # Both steps are fed together; the second one sees the places of the first inside the block.
    lead = [(0, 0), (0, 0), (beams, 0)]
    at = now.own.steps[:, None] * beams - beams + jnp.arange(beams)
    newest = (jnp.arange(sizes.places) == at[..., None])[:, None]
    older = now.front.before & ~newest.any(2)
    between = (now.front.before[:, :, None] & newest).any(-1)
    prefix = jnp.concatenate([jnp.pad(older, lead), between], 2)
    first = jnp.concatenate([jnp.pad(now.last.before, lead), itself], 2)
    visible = jnp.concatenate(
        [jnp.pad(first, [(0, 0), (0, 0), (0, beams)]), jnp.concatenate([prefix, itself], 2)], 1
    )
    tokens = jnp.concatenate([now.last.tokens, now.front.tokens], 1)
    depth = [jnp.full(beams, -1), jnp.full(beams, 0)]
    fed, sound = now.draft, jnp.ones(len(scores), bool)
    for level in range(1, sizes.gamma + 1):
        layout = tree.Layout(visible, _depths(sizes, now.own.steps, depth, beams))
        out, part = draft.apply(params, tokens, cache, layout, fed)
        fed = fed.join(part) if isinstance(fed, GrownBlock) else tree.join(fed, part)
        logits = out.logits[:, -sizes.levels[level - 1] :]
        sound &= jnp.isfinite(logits.max(-1)).all(-1)
        logprobs = sampling.log_probs(logits) + scores[..., None]
        # No beam that goes on has ended.
        vocab = logprobs.shape[-1]
        ends = (jnp.arange(vocab)[:, None] == rules.stop).any(-1)
        logprobs = jnp.where(ends, -jnp.inf, logprobs).reshape(len(logprobs), -1)
        scores, place = sampling.top(logprobs, sizes.drafted)
        _extend(sizes, nodes, place // vocab, place % vocab)
        inside = nodes.inside[-1][:, :, : sizes.first(level + 1)]
        visible = jnp.concatenate([hypotheses.of(prefix, nodes.roots[-1]), inside], 2)
        tokens = nodes.tokens[-1]
        depth = [*depth, jnp.full(sizes.drafted, level)]
    drafted = fed.rest if isinstance(fed, GrownBlock) else _from(fed, beams + sizes.places)
    return nodes, drafted, sound


def _roots(sizes: Sizes, front: Front) -> Nodes:
    """The newest tokens of the beams alone."""
    batch, beams = front.tokens.shape
    number = jnp.broadcast_to(jnp.arange(beams), (batch, beams))
    itself = jnp.eye(beams, sizes.first(sizes.gamma + 1), dtype=bool)
    itself = jnp.broadcast_to(itself, (batch, *itself.shape))
    return Nodes([front.tokens], [number], [number], [itself])


def _extend(sizes: Sizes, nodes: Nodes, parent: jax.Array, token: jax.Array) -> None:
    """Adds a level: the tokens i32[B,U] after the nodes ``parent`` of the level before."""
    own = sizes.first(len(nodes.tokens)) + jnp.arange(sizes.drafted)
    itself = jnp.arange(sizes.first(sizes.gamma + 1)) == own[:, None]
    nodes.tokens.append(token)
    nodes.parents.append(parent)
    nodes.roots.append(hypotheses.of(nodes.roots[-1], parent))
    nodes.inside.append(hypotheses.of(nodes.inside[-1], parent) | itself)


def _depths(sizes: Sizes, steps: jax.Array, new: list[jax.Array], lead: int = 0) -> jax.Array:
    """i32[B,lead+P+T]: the positions of all places, and of T tokens ``new`` steps on."""
    fixed = jnp.arange(-lead, sizes.places) // sizes.beams
    later = steps[:, None] + jnp.concatenate(new)
    return jnp.concatenate([jnp.broadcast_to(fixed, (len(later), len(fixed))), later], 1)


def _where(rows: jax.Array, new: Search, old: Search) -> Search:
    """The new search in the rows bool[B], without the blocks, which are equal."""
    bare = [each.replace(grown=None, draft=None) for each in (new, old)]
    return tree.where_rows(rows, *bare).replace(grown=old.grown, draft=old.draft)


def _empty(model: LM | None, like: Any, places: int) -> Any:
    """A block with room for tokens; ``like`` is that of one token, [B,1,...]."""
    # Other models may have an attention that knows no ``GrownBlock``.
    known = model is not None and (model.inside.decoder is not None or model.encoder is not None)
    if known and isinstance(like, KVBlock):

        def slots(x: jax.Array) -> jax.Array:
            return jnp.zeros((len(x), x.shape[2], places, x.shape[3]), x.dtype)

        return GrownBlock(tuple(map(slots, like.k)), tuple(map(slots, like.v)))
    return jax.tree.map(lambda x: jnp.zeros((len(x), places, *x.shape[2:]), x.dtype), like)


def _from(block: Any, first: int, end: int | None = None) -> Any:
    """The tokens of a block from one place to another."""
    return jax.tree.map(lambda x: x[:, first:end], block)


def _put(block: Any, part: Any, at: jax.Array) -> Any:
    """The block with ``part`` at the places from ``at`` on, i32[B] or i32[] for all rows."""
    if isinstance(block, GrownBlock):
        return block.put(part, at)
    each = at.ndim and len(at) > 1
    # With 64-bit types enabled, all indices of an update must have one type.
    return tree.put(block, part, at.astype(jnp.result_type(int)) if each else at.reshape(-1)[0])
