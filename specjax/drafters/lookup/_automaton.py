"""The suffix automaton of a growing text, on the device: where the end of a text occurred first, whatever its length.

Blumer et al. 1985; grown online as in SAM-Decoding (Hu et al. 2024, 2411.10666, section 3). A state stands for all phrases
that end at the same places; its suffix link leads to the longest of their suffixes that ends elsewhere too. The link of the
state of the whole text is therefore the longest suffix that occurred before: nothing has to follow the match from token to
token. An occurrence is named by its end, the slot where its continuation begins.

A text of n tokens has at most 2n - 1 states and 3n - 4 edges. A vocabulary is too large for a table of states by tokens, so
the edges are slots of a hash table, keyed by state and token and chained by state. 96 bytes a token of the buffer.

Growing is a loop of small steps, a few per token on the average. It is written for the whole batch: a loop under vmap would
copy every table in every step, to hold back the rows that are through.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

LENGTH, LINK, FIRST_END, HEAD = range(
    4
)  # of a state: its longest phrase, its suffix link, its newest edge's slot
STATE, TOKEN, TARGET, NEXT = range(
    4
)  # of an edge: where it starts (-1: a free slot), ..., the state's next older edge
ROOT, NONE = 0, -1
BUCKET = 8  # slots of the hash table that are looked at together
REST, WALK, COPY, REDIRECT = range(4)  # what a row is about to do


class Automaton(struct.PyTreeNode):
    """The automata of B texts."""

    states: jax.Array  # i32[B,2S,4]
    edges: jax.Array  # i32[B,4S,4] a hash table; at most three quarters of it are ever taken
    count: jax.Array  # i32[B] states that exist
    last: jax.Array  # i32[B] the state of the whole text
    read: jax.Array  # i32[B] tokens of the text


class Occurrence(NamedTuple):
    """Where the ends of the texts occurred first, i32[B] each."""

    end: jax.Array  # where the continuation begins
    size: jax.Array  # tokens of the phrase that was found there; 0: nothing was
    longest: jax.Array  # tokens of the longest phrase that occurred before; 0: none


class _Job(struct.PyTreeNode):
    """What is in hand in each row, i32[B] each."""

    phase: jax.Array
    at: jax.Array  # the state whose edges are looked at
    new: jax.Array  # the state of the text with the token that is being read
    split: jax.Array  # the state that is split, and
    clone: jax.Array  # the new one that takes its shorter phrases
    edge: jax.Array  # slot of the edge to be copied to it next
    passed: jax.Array  # slots already looked at for this key


def empty(batch: int, slots: int) -> Automaton:
    """The automata of ``batch`` empty texts that will have at most ``slots`` tokens."""
    states = jnp.full((batch, max(2 * slots, 2), 4), NONE, jnp.int32).at[:, ROOT, LENGTH].set(0)
    edges = jnp.full((batch, max(4 * slots, BUCKET), 4), NONE, jnp.int32)
    zero = jnp.zeros((batch,), jnp.int32)
    return Automaton(states=states, edges=edges, count=zero + 1, last=zero + ROOT, read=zero)


def extend(automaton: Automaton, tokens: jax.Array, length: jax.Array) -> Automaton:
    """Reads on in texts i32[B,S] until ``length`` i32[B]; a row that has read as much stays as it is."""
    zero = jnp.zeros_like(automaton.read)
    job = _Job(phase=zero + REST, at=zero, new=zero, split=zero, clone=zero, edge=zero, passed=zero)

    def unread(carry):
        return (carry[0].read < length).any()

    def body(carry):
        automaton, job = carry
        return jax.vmap(_step)(automaton, job, tokens, length)

    return jax.lax.while_loop(unread, body, (automaton, job))[0]


def occurrence(automaton: Automaton, ahead: int, least: int = 1) -> Occurrence:
    """Where the longest phrase that ends the text occurred first, of those that have ``ahead`` tokens after their first
    occurrence; if there is none, the longest of all. Phrases shorter than ``least`` do not count.

    At most ``ahead`` links are followed: a phrase that first occurred too late has all its ends among the last ``ahead``
    places, and every link adds an end.
    """

    def row(states, last, read):
        longest = jnp.maximum(states[last, LINK], ROOT)

        def late(state):
            return (states[state, LENGTH] >= least) & (read - states[state, FIRST_END] < ahead)

        state = jax.lax.while_loop(late, lambda state: states[state, LINK], longest)
        state = jnp.where(states[state, LENGTH] >= least, state, longest)
        size, most = states[state, LENGTH], states[longest, LENGTH]
        return Occurrence(
            states[state, FIRST_END],
            jnp.where(size >= least, size, 0),
            jnp.where(most >= least, most, 0),
        )

    return jax.vmap(row)(automaton.states, automaton.last, automaton.read)


def _step(
    automaton: Automaton, job: _Job, tokens: jax.Array, length: jax.Array
) -> tuple[Automaton, _Job]:
    """One row, one step: looks one key up and makes the writes that follow, at most an edge, a new state and one entry."""
    states, edges, count = automaton.states, automaton.edges, automaton.count
    first = job.phase == REST
    at, new = jnp.where(first, automaton.last, job.at), jnp.where(first, count, job.new)
    copied, copying = _get(edges, job.edge, job.edge)[0], job.phase == COPY
    source = jnp.where(copying, job.clone, at)
    token = jnp.where(copying, copied[TOKEN], tokens[automaton.read])

    place = (_hash(source, token) % edges.shape[0] + job.passed + jnp.arange(BUCKET)) % edges.shape[
        0
    ]
    seen = edges[place]
    ours = (seen[:, STATE] == source) & (seen[:, TOKEN] == token)
    which = jnp.argmax(
        ours | (seen[:, STATE] == NONE)
    )  # nothing is ever taken out: the key is not behind a free slot
    slot, edge, exists = place[which], seen[which], ours[which]
    known = exists | (edge[STATE] == NONE)
    busy = (automaton.read < length) & known

    mine, target, newest = _get(states, source, edge[TARGET], new)
    walking = busy & (job.phase <= WALK)
    adds = walking & ~exists  # the phrases of ``at`` were never followed by this token
    solid = (
        mine[LENGTH] + 1 == target[LENGTH]
    )  # the link may lead there as it is; otherwise it is split first
    joins, splits = walking & exists & solid, walking & exists & ~solid
    copies = busy & copying
    redirects = busy & (job.phase == REDIRECT) & (edge[TARGET] == job.split)
    top = at == ROOT
    ends = joins | (adds & top) | (busy & (job.phase == REDIRECT) & (~redirects | top))

    made = jnp.where(
        adds | copies,
        jnp.stack([source, token, jnp.where(copies, copied[TARGET], new), mine[HEAD]]),
        edge,
    )
    made = made.at[TARGET].set(jnp.where(redirects, job.clone, made[TARGET]))
    edges = _put(edges, adds | copies | redirects, slot, made)

    begins = adds & first
    born = jnp.where(
        begins,
        jnp.stack([automaton.read + 1, ROOT, automaton.read + 1, NONE]),
        jnp.stack([mine[LENGTH] + 1, target[LINK], target[FIRST_END], NONE]),
    )
    # One entry of a state that is there already: a longer list of edges, or a link.
    whose = jnp.where(adds | copies, source, jnp.where(splits, edge[TARGET], new))
    value = jnp.where(
        adds | copies, slot, jnp.where(splits, count, jnp.where(joins, edge[TARGET], job.clone))
    )
    column = jnp.where(adds | copies, HEAD, LINK)
    writes = adds | copies | joins | splits | (ends & (job.phase == REDIRECT))
    old = jnp.where(whose == source, mine, jnp.where(whose == edge[TARGET], target, newest))
    changed = jnp.where(jnp.arange(4) == column, value, old)
    states = _put(
        states,
        jnp.stack([begins | splits, writes]),
        jnp.stack([count, whose]),
        jnp.stack([born, changed]),
    )

    after = jnp.where(splits, COPY, jnp.where(copies & (copied[NEXT] == NONE), REDIRECT, job.phase))
    after = jnp.where(ends, REST, jnp.where(adds, WALK, after))
    automaton = Automaton(
        states,
        edges,
        count + (begins | splits),
        jnp.where(ends, new, automaton.last),
        automaton.read + ends,
    )
    return automaton, _Job(
        phase=after,
        at=jnp.where(adds | redirects, mine[LINK], at),
        new=new,
        split=jnp.where(splits, edge[TARGET], job.split),
        clone=jnp.where(splits, count, job.clone),
        edge=jnp.where(splits, target[HEAD], jnp.where(copies, copied[NEXT], job.edge)),
        passed=jnp.where(known, 0, job.passed + BUCKET),
    )


def _get(table: jax.Array, *index: jax.Array) -> jax.Array:
    """The records at several places. Of a single one XLA makes a slice, which on the CPU it reads again wherever it is used,
    also after the table has changed: it would copy the table in every step."""
    return table[jnp.stack(index)]


def _put(table: jax.Array, when: jax.Array, index: jax.Array, record: jax.Array) -> jax.Array:
    """The table with other records at some places; where ``when`` is False nothing is written."""
    return table.at[jnp.where(when, index, table.shape[0])].set(
        record.astype(table.dtype), mode="drop"
    )


def _hash(state: jax.Array, token: jax.Array) -> jax.Array:
    """Bits from which the place in the table is taken: uint32, mixed by multiplying and shifting."""
    mixed = state.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) ^ token.astype(
        jnp.uint32
    ) * jnp.uint32(0x85EBCA77)
    mixed = (mixed ^ mixed >> 15) * jnp.uint32(0x2C1B3C6D)
    mixed = (mixed ^ mixed >> 12) * jnp.uint32(0x297A2D39)
    return (mixed ^ mixed >> 15) >> 1
