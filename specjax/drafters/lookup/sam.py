"""SAM-Decoding: proposes what followed the longest match, in the row's text or in a datastore.

Deterministic, L1. Hu et al. 2024 (2411.10666). Each row has the suffix automaton of its own text,
which grows by the new tokens in every round. The automaton gives the longest suffix of the text
that occurred before, and its first occurrence. If fewer than ``gamma`` tokens follow there, shorter
matches are tried in turn; if no match has that many, the longest match proposes the tokens there
are. (The published code fills up with token 0 and counts it as drafted.) A match in the datastore
is used if it is longer by more than ``bias`` tokens. The paper takes its first occurrence. Here it
is the middle one in the suffix array's order of continuations: where most of the continuations
agree, it is the most frequent one.

The automaton reads new tokens when the row proposes, which includes those of rounds of other
drafters. A row reads its own text only. Memory: 96 bytes per token of the buffer.

``prompt_lookup`` with a large ``max_ngram`` compares instead. It proposes nearly the same tokens,
and its cost grows with the text, while the cost of this method does not (experiments/draft_cost
measures both at 2048 tokens). But the automaton has to read the prompt first, token by token, which
that study excludes. So this method is for long outputs after long contexts. Accelerators pay for
every small step and read memory fast, which may favour comparing; that is not measured.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import declare
from specjax.bound import Bound
from specjax.data.ngram_tables import hashed
from specjax.declare import key
from specjax.drafters._limited import limited
from specjax.drafters.lookup import _memory
from specjax.drafters.lookup._match import Sizes, follow, longest_match, sample
from specjax.drafters.shared_keys import DatastoreKeys
from specjax.errors import UserError
from specjax.types import LM, Array, Draft, Drafter, Rare

# The suffix automaton of a growing text, on the device: the first occurrence of the text's end.
#
# Blumer et al. 1985; built online as in SAM-Decoding (Hu et al. 2024, 2411.10666, section 3). A
# state represents all phrases that end at the same places. Its suffix link leads to the state of
# their longest suffix that also ends at other places. The link of the state of the whole text
# therefore gives the longest suffix that occurred before, and no match has to be tracked from token
# to token. An occurrence is named by its end: the slot where its continuation begins.
#
# A text of n tokens has at most 2n - 1 states and 3n - 4 edges. A table of states by tokens would
# be too large, so the edges are slots of a hash table with the key (state, token), and the edges of
# one state form a linked list. Memory: 96 bytes per token of the buffer.
#
# The automaton grows in small steps, a few per token on average. The loop runs over the whole
# batch: a loop inside vmap would copy every table in every step, to keep finished rows unchanged.


# Columns of a state: length of its longest phrase, its suffix link, the end of its first
# occurrence, the slot of its newest edge.
LENGTH, LINK, FIRST_END, HEAD = range(4)
# Columns of an edge: the state where it starts (-1: a free slot), its token, the state where it
# leads, the slot of the next older edge of the same state.
STATE, TOKEN, TARGET, NEXT = range(4)
ROOT, NONE = 0, -1
# Slots of the hash table that one step looks at.
BUCKET = 8
# The phases of a row. READY: the next step begins a token. WALK: follow suffix links and add edges
# to the new state. COPY: copy the edges of a split state to its clone. REDIRECT: follow suffix
# links and redirect edges from the split state to the clone.
READY, WALK, COPY, REDIRECT = range(4)


class Automaton(struct.PyTreeNode):
    """The automata of B texts."""

    states: Array  # i32[B,2S,4]
    edges: Array  # i32[B,4S,4] a hash table, at most three quarters full
    count: Array  # i32[B] number of states
    last: Array  # i32[B] the state of the whole text
    read: Array  # i32[B] tokens that were read


class Occurrence(NamedTuple):
    """The first occurrences of the ends of the texts, i32[B] each."""

    end: Array  # where the continuation begins
    size: Array  # tokens of the phrase that occurred there; 0: none
    longest: Array  # tokens of the longest phrase that occurred before; 0: none


class _Job(struct.PyTreeNode):
    """The unfinished work of each row between two steps, i32[B] each."""

    phase: Array
    at: Array  # the current state; its edges are looked at
    new: Array  # the state of the text that ends with the current token
    split: Array  # the state that is split
    clone: Array  # the new state that gets the shorter phrases of ``split``
    edge: Array  # slot of the edge to be copied to ``clone`` next
    passed: Array  # slots of the hash table already looked at for the current key


class _View(NamedTuple):
    """What one step reads in one row; i32[] where not noted."""

    first: Array  # bool[] the step begins a token
    at: Array
    new: Array
    copied: Array  # i32[4] the edge to be copied, in phase COPY
    source: Array  # the state of the key that is looked up
    token: Array  # the token of the key
    slot: Array  # the slot of the key, or the first free slot
    edge: Array  # i32[4] the record in that slot
    exists: Array  # bool[] the key is in the table
    decided: Array  # bool[] False: neither the key nor a free slot in this bucket
    source_state: Array  # i32[4] the record of ``source``
    target_state: Array  # i32[4] the record of the state where the edge leads
    new_state: Array  # i32[4] the record of ``new``


class _Actions(NamedTuple):
    """What one step writes in one row, bool[] each."""

    adds: Array  # an edge from ``source`` to ``new``
    joins: Array  # the suffix link of ``new`` to an existing state
    splits: Array  # a state with longer phrases than that link allows, by cloning it
    copies: Array  # an edge of the split state, from the clone
    redirects: Array  # an edge, from the split state to the clone
    ends: Array  # the token is read


def empty(batch: int, slots: int) -> Automaton:
    """The automata of ``batch`` empty texts that will have at most ``slots`` tokens."""
    states = jnp.full((batch, max(2 * slots, 2), 4), NONE, jnp.int32).at[:, ROOT, LENGTH].set(0)
    edges = jnp.full((batch, max(4 * slots, BUCKET), 4), NONE, jnp.int32)
    zero = jnp.zeros((batch,), jnp.int32)
    return Automaton(states=states, edges=edges, count=zero + 1, last=zero + ROOT, read=zero)


def extend(automaton: Automaton, tokens: Array, length: Array) -> Automaton:
    """Reads the texts i32[B,S] up to ``length`` i32[B]; rows that have read them do not change."""
    zero = jnp.zeros_like(automaton.read)
    job = _Job(zero + READY, *[zero] * 6)

    def unread(carry):
        return (carry[0].read < length).any()

    def body(carry):
        automaton, job = carry
        return jax.vmap(_step)(automaton, job, tokens, length)

    return jax.lax.while_loop(unread, body, (automaton, job))[0]


def occurrence(automaton: Automaton, ahead: int, least: int = 1) -> Occurrence:
    """The first occurrence of the longest phrase that ends the text.

    Phrases are considered that have ``ahead`` tokens after their first occurrence; if there is no
    such phrase, all. Phrases shorter than ``least`` do not count.

    At most ``ahead`` links are followed: if the first occurrence of a phrase is too late, all its
    ends are among the last ``ahead`` places, and every link adds an end.
    """

    def row(states, last, read):
        longest = jnp.maximum(states[last, LINK], ROOT)

        def late(state):
            return (states[state, LENGTH] >= least) & (read - states[state, FIRST_END] < ahead)

        state = jax.lax.while_loop(late, lambda state: states[state, LINK], longest)
        state = jnp.where(states[state, LENGTH] >= least, state, longest)
        sizes = states[state, LENGTH], states[longest, LENGTH]
        return Occurrence(states[state, FIRST_END], *(jnp.where(x >= least, x, 0) for x in sizes))

    return jax.vmap(row)(automaton.states, automaton.last, automaton.read)


def _step(automaton: Automaton, job: _Job, tokens: Array, length: Array) -> tuple[Automaton, _Job]:
    """One step of one row: looks up one key and makes the writes that follow from it.

    These are at most one edge, one new state and one entry of an existing state.
    """
    view = _look_up(automaton, job, tokens)
    act = _decide(job, view, (automaton.read < length) & view.decided)
    states, edges = _write_states(automaton, job, view, act), _write_edge(automaton, job, view, act)
    count = automaton.count + _creates(view, act)
    last = jnp.where(act.ends, view.new, automaton.last)
    after = Automaton(states, edges, count, last, automaton.read + act.ends)
    return after, _next_job(job, view, act, automaton.count)


def _look_up(automaton: Automaton, job: _Job, tokens: Array) -> _View:
    """Looks up the key of this step in the next bucket of the hash table."""
    edges = automaton.edges
    first = job.phase == READY
    at = jnp.where(first, automaton.last, job.at)
    new = jnp.where(first, automaton.count, job.new)
    copied, copying = _get(edges, job.edge, job.edge)[0], job.phase == COPY
    source = jnp.where(copying, job.clone, at)
    token = jnp.where(copying, copied[TOKEN], tokens[automaton.read])

    size = edges.shape[0]
    place = (hashed(source, token) >> 1) % size
    place = (place + job.passed + jnp.arange(BUCKET)) % size
    seen = edges[place]
    equal = (seen[:, STATE] == source) & (seen[:, TOKEN] == token)
    # Edges are never removed, so the key cannot be behind a free slot.
    which = jnp.argmax(equal | (seen[:, STATE] == NONE))
    slot, edge, exists = place[which], seen[which], equal[which]
    decided = exists | (edge[STATE] == NONE)
    records = _get(automaton.states, source, edge[TARGET], new)
    return _View(first, at, new, copied, source, token, slot, edge, exists, decided, *records)


def _decide(job: _Job, view: _View, busy: Array) -> _Actions:
    walking = busy & (job.phase <= WALK)
    redirecting = busy & (job.phase == REDIRECT)
    # The phrases of ``at`` were never followed by this token.
    adds = walking & ~view.exists
    # The suffix link may lead to the target state as it is; otherwise it is split first.
    solid = view.source_state[LENGTH] + 1 == view.target_state[LENGTH]
    joins, splits = walking & view.exists & solid, walking & view.exists & ~solid
    redirects = redirecting & (view.edge[TARGET] == job.split)
    top = view.at == ROOT
    ends = joins | (adds & top) | (redirecting & (~redirects | top))
    return _Actions(adds, joins, splits, busy & (job.phase == COPY), redirects, ends)


def _creates(view: _View, act: _Actions) -> Array:
    """bool[]: whether the step creates a state, the text's own or a clone."""
    return (act.adds & view.first) | act.splits


def _write_edge(automaton: Automaton, job: _Job, view: _View, act: _Actions) -> Array:
    leads_to = jnp.where(act.copies, view.copied[TARGET], view.new)
    made = jnp.stack([view.source, view.token, leads_to, view.source_state[HEAD]])
    made = jnp.where(act.adds | act.copies, made, view.edge)
    made = made.at[TARGET].set(jnp.where(act.redirects, job.clone, made[TARGET]))
    return _put(automaton.edges, act.adds | act.copies | act.redirects, view.slot, made)


def _write_states(automaton: Automaton, job: _Job, view: _View, act: _Actions) -> Array:
    count, own, target = automaton.count, view.source_state, view.target_state
    begins = act.adds & view.first
    text = jnp.stack([automaton.read + 1, ROOT, automaton.read + 1, NONE])
    clone = jnp.stack([own[LENGTH] + 1, target[LINK], target[FIRST_END], NONE])
    created = jnp.where(begins, text, clone)
    # One entry of an existing state changes: the newest edge, or the suffix link.
    new_edge, leads_to = act.adds | act.copies, view.edge[TARGET]
    changes = new_edge | act.joins | act.splits | (act.ends & (job.phase == REDIRECT))
    which = jnp.where(new_edge, view.source, jnp.where(act.splits, leads_to, view.new))
    link = jnp.where(act.splits, count, jnp.where(act.joins, leads_to, job.clone))
    value = jnp.where(new_edge, view.slot, link)
    column = jnp.where(new_edge, HEAD, LINK)
    old = jnp.where(which == leads_to, target, view.new_state)
    old = jnp.where(which == view.source, own, old)
    changed = jnp.where(jnp.arange(4) == column, value, old)
    when, where = jnp.stack([_creates(view, act), changes]), jnp.stack([count, which])
    return _put(automaton.states, when, where, jnp.stack([created, changed]))


def _next_job(job: _Job, view: _View, act: _Actions, count: Array) -> _Job:
    copied_all = act.copies & (view.copied[NEXT] == NONE)
    phase = jnp.where(act.splits, COPY, jnp.where(copied_all, REDIRECT, job.phase))
    next_edge = jnp.where(act.copies, view.copied[NEXT], job.edge)
    return _Job(
        phase=jnp.where(act.ends, READY, jnp.where(act.adds, WALK, phase)),
        at=jnp.where(act.adds | act.redirects, view.source_state[LINK], view.at),
        new=view.new,
        split=jnp.where(act.splits, view.edge[TARGET], job.split),
        clone=jnp.where(act.splits, count, job.clone),
        edge=jnp.where(act.splits, view.target_state[HEAD], next_edge),
        passed=jnp.where(view.decided, 0, job.passed + BUCKET),
    )


def _get(table: Array, *index: Array) -> Array:
    """The records at several places.

    For a single place XLA makes a slice. On the CPU it reads that slice again at every use, also
    after the table has changed, and so would copy the table in every step.
    """
    return table[jnp.stack(index)]


def _put(table: Array, when: Array, index: Array, record: Array) -> Array:
    """The table with new records at some places; where ``when`` is False no record is written."""
    at = jnp.where(when, index, table.shape[0])
    return table.at[at].set(record.astype(table.dtype), mode="drop")


REFERENCE = "hu2025sam"


class Keys(DatastoreKeys):
    """The keys of ``sam``."""

    gamma: int = key(15, "most tokens drafted (the original's n_predicts)", least=1)
    min_match: int = key(
        2,
        "shorter matches are not used. The paper uses 5 together with another drafter "
        "(``escalate``). With 1, most drafts follow a single equal token and are rejected.",
        least=1,
    )
    max_ngram: int = key(
        16,
        "longest match in the datastore (or in what was learnt; with neither, this key and "
        "``bias`` have no effect); matches in the row's own text have no limit",
        least=1,
    )
    bias: int = key(
        5,
        "a match in the datastore is used if it is longer than the match in the row's own text by"
        " more than this number of tokens",
        least=0,
    )

    def check(self) -> None:
        if self.min_match > self.max_ngram:
            raise UserError(
                f"min_match is {self.min_match} and max_ngram {self.max_ngram}: "
                "a datastore could never match; raise max_ngram"
            )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts a chain from the longest match.

    Raises:
        UserError: numbers out of range, min_match > max_ngram, a datastore of another tokenizer.
    """
    store = _memory.load(target, keys.datastore, keys.max_ngram)
    sizes = Sizes(keys.max_ngram, keys.min_match, _memory.reach(store, keys.max_ngram))
    drafter = Drafter(
        init_params=lambda key: _memory.params(store),
        init=_init,
        propose=Bound(_propose, keys.settings(), sizes),
        nodes=keys.gamma,
        name="sam",
        rare=Rare(learn=_memory.learner(store, keys.max_ngram, keys.memory)),
    )
    return limited(drafter, keys.control)


def _init(params, context, target_out, slots):
    return extend(empty(context.length.shape[0], slots), context.tokens, context.length)


def _propose(settings: Keys, sizes: Sizes, params, keys, context, automaton):
    text = context.tokens, context.length
    automaton = extend(automaton, *text)
    match = occurrence(automaton, settings.gamma, settings.min_match)
    own = jax.vmap(lambda tokens, length, at: follow(tokens, at, settings.gamma, length)[0])
    tokens = own(*text, jnp.where(match.longest > 0, match.end, -1)[:, None])
    if params.draft:
        others, size = jax.vmap(Bound(_stored, settings, sizes), (None, 0, 0))(params.draft, *text)
        use_own = (match.longest > 0) & (match.longest >= size - settings.bias)
        tokens = jnp.where(use_own[:, None], tokens, others)
    return Draft(jnp.maximum(tokens, 0), tokens >= 0), automaton


def _stored(settings: Keys, sizes: Sizes, store, text, length) -> tuple[Array, Array]:
    """The datastore's continuation, i32[gamma], -1 after its end; the match's size, i32[]."""
    tokens, order = store["tokens"], store["order"]
    low, high, size = longest_match(store, text, length, sizes)
    middle = sample(order, low, high, 1)[0] + size
    # The middle one may be at the end of its document; then a token follows the last one.
    last = jnp.take(order, jnp.maximum(high - 1, 0)) + size
    start = jnp.where(jnp.take(tokens, middle, mode="fill", fill_value=-1) >= 0, middle, last)
    return follow(tokens, jnp.where(size > 0, start, -1)[None], settings.gamma)[0], size
