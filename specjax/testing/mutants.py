"""Mistakes that must be caught. Each was made in published code or is a step away from it; a test kit that lets one of them
live proves nothing. ``tests/test_mutants.py`` kills every one, by the test named in ``killed_by``.

A mutant changes a correct rule or a correct drafter. ``case`` says on which drafter of ``specjax.testing.cases`` it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import rng
from specjax.accept import _verdict, _walk, block, chain, k_seq, recursive, traversal
from specjax.types import SIBLINGS, Accept, Draft, Drafter, Verdict

ENUMERATION, LEDGER, COUNTING, CONFORMANCE = "enumeration", "ledger", "counting", "conformance"


class Mutant(NamedTuple):
    """One mistake."""

    name: str
    what: str  # the mistake, in a line
    source: str  # where it was found, or which sentence of a paper it misreads
    case: str  # a name of ``cases.drafters``
    rule: Callable[[], Accept]
    change: Callable[[Drafter], Drafter] = lambda drafter: drafter
    killed_by: str = ENUMERATION
    settings: dict = {}  # noqa: RUF012


def _rule(sampled: Callable) -> Callable[[], Accept]:
    return lambda: Accept(sampled, _verdict.greedy, sampled.__name__, "L3", SIBLINGS)


# Rules.


def resample_from_target(keys, draft, target_probs):
    kept = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
        *chain.masses(draft, target_probs)
    )
    accepted = _verdict.first_failure(kept & draft.valid)
    return _verdict.prefix(
        draft, accepted, keys.draw(rng.RESIDUAL, _verdict.at(target_probs, accepted))
    )


def match_then_resample(keys, draft, target_probs):
    path, law = _match_path(keys, draft, target_probs)
    return _verdict.along(draft, path, keys.draw(rng.RESIDUAL, law))


def _match_path(keys, draft, target_probs):
    """Sample-then-match, without the token at the mismatch: the path, and the target's law at its end."""
    walk = _walk.begin(draft, target_probs)
    for depth in range(draft.longest):
        active = walk.open.any(-1)
        token = keys.draw_at(depth, walk.probs, active)
        hit = walk.open & (draft.tokens == token[:, None]) & active[:, None]
        stays = ~hit.any(-1)[:, None]
        walk = walk.replace(open=walk.open & ~stays)
        walk = _walk.descend(walk, draft, target_probs, jnp.argmax(hit, -1), hit.any(-1))
    return walk.path, walk.probs


def residual_after_everything(keys, draft, target_probs):
    kept = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
        *chain.masses(draft, target_probs)
    )
    accepted = _verdict.first_failure(kept & draft.valid)
    full = (accepted == draft.tokens.shape[1])[:, None]
    wrong = recursive.residual(target_probs[:, -1], draft.probs[:, -1])
    law = jnp.where(full, wrong, chain.leftover(accepted, draft, target_probs))
    return _verdict.prefix(draft, accepted, keys.draw(rng.RESIDUAL, law))


def go_on_after_a_rejection(keys, draft, target_probs):
    kept = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
        *chain.masses(draft, target_probs)
    )
    accepted = jnp.max(jnp.where(kept, jnp.arange(1, kept.shape[1] + 1), 0), -1)
    return _verdict.prefix(
        draft, accepted, keys.draw(rng.RESIDUAL, chain.leftover(accepted, draft, target_probs))
    )


def unadjusted_last_token(keys, draft, target_probs):
    """At temperature 1/2 the law without the temperature is the square root of the law with it."""
    kept = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
        *chain.masses(draft, target_probs)
    )
    accepted = _verdict.first_failure(kept & draft.valid)
    full = (accepted == draft.tokens.shape[1])[:, None]
    law = jnp.where(
        full, jnp.sqrt(target_probs[:, -1]), chain.leftover(accepted, draft, target_probs)
    )
    return _verdict.prefix(draft, accepted, keys.draw(rng.RESIDUAL, law))


def block_stops_at_the_first_failure(keys, draft, target_probs):
    weight = block.weights(draft, target_probs)
    kept, total = block.chances(draft, target_probs, weight)
    stands = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(kept, total)
    accepted = _verdict.first_failure(stands)
    return _verdict.prefix(
        draft, accepted, keys.draw(rng.RESIDUAL, block.after(accepted, draft, target_probs, weight))
    )


def block_with_the_plain_residual(keys, draft, target_probs):
    weight = block.weights(draft, target_probs)
    kept, total = block.chances(draft, target_probs, weight)
    stands = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(kept, total)
    accepted = jnp.max(jnp.where(stands, jnp.arange(1, stands.shape[1] + 1), 0), -1)
    return _verdict.prefix(
        draft, accepted, keys.draw(rng.RESIDUAL, chain.leftover(accepted, draft, target_probs))
    )


def twins_are_merged(keys, draft, target_probs):
    """Strikes out every sibling that repeats an elder one."""
    parents = _walk.parents(draft)
    same = (draft.tokens[:, :, None] == draft.tokens[:, None]) & (
        parents[:, :, None] == parents[:, None]
    )
    elder = jnp.tril(jnp.ones(same.shape[1:], bool), -1) & draft.valid[:, None]
    return recursive.recursive(
        keys, draft.replace(valid=draft.valid & ~(same & elder).any(-1)), target_probs
    )


def best_child_first(keys, draft, target_probs):
    """Tries the siblings in the order of the target's favour: the order looks at the values drawn."""
    own = jnp.take_along_axis(_walk.before(draft, target_probs), draft.tokens[..., None], -1)[
        ..., 0
    ]
    root = _walk.parents(draft) < 0
    order = jnp.argsort(
        jnp.where(root, -own, jnp.inf), axis=-1
    )  # only the first level changes places

    def take(x):
        return jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), 1)

    where = jnp.argsort(order, -1)
    parents = _walk.parents(draft)
    moved = jnp.where(parents < 0, -1, jnp.take_along_axis(where, jnp.maximum(parents, 0), 1))
    changed = Draft(
        take(draft.tokens), take(draft.valid), take(moved), take(draft.probs), depth=draft.depth
    )
    rows = jnp.concatenate([jnp.zeros_like(order[:, :1]), order + 1], 1)
    laws = jnp.take_along_axis(target_probs, rows[..., None], 1)
    verdict = recursive.recursive(keys, changed, laws)
    path = jnp.where(
        verdict.path >= 0, jnp.take_along_axis(order, jnp.maximum(verdict.path, 0), 1), -1
    )
    return Verdict(verdict.tokens, verdict.count, path.astype(jnp.int32))


def longest_of_separate_chains(keys, draft, target_probs):
    """Judges each root-to-leaf chain by itself, with noise of its own, and takes the longest."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    before = _walk.before(draft, target_probs)
    own = jnp.take_along_axis(before, draft.tokens[..., None], -1)[..., 0]
    drawn = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
    path, end = _verdict.deepest(draft, coins.flip(own, drawn))
    children = draft.valid & (_walk.parents(draft) == end[:, None] - 1)
    rejected = recursive.residual(
        _verdict.at(target_probs, end), _verdict.at(draft.probs, jnp.argmax(children, -1))
    )
    law = jnp.where(children.any(-1)[:, None], rejected, _verdict.at(target_probs, end))
    return _verdict.along(draft, path, keys.draw(rng.RESIDUAL, law))


def traversal_forgets_what_was_lost(keys, draft, target_probs):
    """Updates the weight of a node by what is owed over the draft mass that is left, Z / sum(D without x)."""

    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)

    def turn(carry):
        visit, probs = carry
        visit = traversal.descend(visit, probs, draft)
        accepted = traversal.accepts(visit, coins)
        after, rest = traversal.leave(visit, probs, draft, accepted)
        node, parent = jnp.maximum(visit.at - 1, 0), after.at
        drawn = _verdict.at(draft.probs, node)
        weight = _verdict.at(visit.weight, parent)[:, None]
        owed = jnp.maximum(weight * _verdict.at(probs, parent) - drawn, 0).sum(-1)
        wrong = jnp.minimum(1, owed / jnp.maximum(1 - drawn.max(-1), 1e-9))
        changed = (~visit.done & ~accepted)[:, None] & (
            jnp.arange(visit.weight.shape[1]) == parent[:, None]
        )
        return after.replace(weight=jnp.where(changed, wrong[:, None], after.weight)), rest

    start = (traversal.begin(draft, target_probs), target_probs)
    visit, probs = jax.lax.while_loop(lambda carry: ~carry[0].done.all(), turn, start)
    return traversal.finish(keys, draft, visit, probs)


def k_seq_with_a_small_rho(keys, draft, target_probs):
    """Divides by a rho below the smallest for which the residual is nowhere negative."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)

    def level(walk):
        some = k_seq.candidates(walk, draft)
        rho = 1 + 0.5 * (k_seq.solve(some.count, walk.probs, some.probs) - 1)
        return k_seq.try_all(walk, draft, target_probs, some, rho, coins)

    walk = jax.lax.while_loop(lambda w: w.open.any(), level, _walk.begin(draft, target_probs))
    return _verdict.along(draft, walk.path, keys.draw(rng.RESIDUAL, walk.probs))


def padding_is_a_token(keys, draft, target_probs):
    """Tests nodes that do not exist."""
    tokens = jnp.where(draft.valid, draft.tokens, 0)
    return recursive.recursive(
        keys, draft.replace(tokens=tokens, valid=jnp.ones_like(draft.valid)), target_probs
    )


def withdrawn_elders_are_subtracted(keys, draft, target_probs):
    """Takes the law of a sibling that does not exist off the target's, as if it had been tried and had failed."""
    exists = draft.valid
    ghost = recursive.residual(target_probs[:, 0], draft.probs[:, 0])
    first = jnp.where((exists[:, 0] | ~exists[:, 1])[:, None], target_probs[:, 0], ghost)
    return recursive.recursive(keys, draft, target_probs.at[:, 0].set(first))


def residual_with_the_drafters_noise(keys, draft, target_probs):
    """Draws what replaces a rejected token with the key that drew the first draft token."""
    kept = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
        *chain.masses(draft, target_probs)
    )
    accepted = _verdict.first_failure(kept & draft.valid)
    return _verdict.prefix(
        draft, accepted, keys.draw(rng.DRAFT, chain.leftover(accepted, draft, target_probs), 0)
    )


def one_number_for_coin_and_residual(keys, draft, target_probs):
    """Uses one uniform number twice: to reject, and to choose what replaces the rejected token."""
    u = jax.vmap(lambda k: jax.random.uniform(k, draft.tokens.shape[1:]))(keys.at_round(rng.ACCEPT))
    target_mass, draft_mass = chain.masses(draft, target_probs)
    accepted = _verdict.first_failure((u * draft_mass < target_mass) & draft.valid)
    reused = _verdict.at(u, jnp.minimum(accepted, u.shape[1] - 1))[:, None]
    total = jnp.cumsum(chain.leftover(accepted, draft, target_probs), -1)
    return _verdict.prefix(draft, accepted, jnp.argmax(total > reused * total[:, -1:], -1))


def noise_of_the_first_round(keys, draft, target_probs):
    """Draws its noise once per text (Sequoia's ``r`` and ``rand``): forgets to fold the round in."""
    return chain.chain(keys.replace(round=jnp.zeros_like(keys.round)), draft, target_probs)


def coins_twice(keys, draft, target_probs):
    """Asks for its coins again at the second token."""
    first = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
        *chain.masses(draft, target_probs)
    )
    again = keys.coins(draft.tokens.shape[1], target_probs.dtype).flip(
        *chain.masses(draft, target_probs)
    )
    accepted = _verdict.first_failure(
        jnp.concatenate([first[:, :1], again[:, :-1]], 1) & draft.valid
    )
    return _verdict.prefix(
        draft, accepted, keys.draw(rng.RESIDUAL, chain.leftover(accepted, draft, target_probs))
    )


# Drafters.


def _changed(change: Callable) -> Callable[[Drafter], Drafter]:
    """A drafter whose draft goes through ``change(draft, keys, context)``."""

    def mutate(drafter: Drafter) -> Drafter:
        def propose(params, keys, context, state):
            draft, state = drafter.propose(params, keys, context, state)
            return change(draft, keys, context), state

        return drafter._replace(propose=propose, name=change.__name__)

    return mutate


def argmax_claims_softmax(draft, keys, context):
    return draft.replace(tokens=jnp.argmax(draft.probs, -1).astype(jnp.int32))


def claims_another_law(draft, keys, context):
    """Claims the law without the temperature; here, a flatter one."""
    flat = jnp.sqrt(draft.probs)
    return draft.replace(probs=flat / flat.sum(-1, keepdims=True))


def drops_what_it_saw(draft, keys, context):
    mass = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
    return draft.replace(valid=draft.valid & (mass > 0.2))


def top_k_claims_draws(draft, keys, context):
    """The most probable tokens as siblings, with the law that i.i.d. draws would have."""
    ranks = _sibling_ranks(draft)
    best = jnp.argsort(-draft.probs, axis=-1)
    return draft.replace(
        tokens=jnp.take_along_axis(best, ranks[..., None], -1)[..., 0].astype(jnp.int32)
    )


def _sibling_ranks(draft):
    parents = _walk.parents(draft)
    elder = (parents[:, :, None] == parents[:, None]) & jnp.tril(
        jnp.ones((parents.shape[1],) * 2, bool), -1
    )
    return elder.sum(-1)


def keeps_the_best_draws(draft, keys, context):
    """Of i.i.d. draws it keeps the more probable half."""
    mass = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
    parents = _walk.parents(draft)
    sibling = (parents[:, :, None] == parents[:, None]) & ~jnp.eye(parents.shape[1], dtype=bool)
    return draft.replace(
        valid=draft.valid & ~(sibling & (mass[:, None] > mass[:, :, None])).any(-1)
    )


def forgets_the_elder_siblings(draft, keys, context):
    """Draws without replacement and claims the law with replacement."""
    parents = _walk.parents(draft)
    first = jnp.argmax(
        parents[:, :, None] == parents[:, None], -1
    )  # the eldest sibling: its law is the whole law
    return draft.replace(probs=jnp.take_along_axis(draft.probs, first[..., None], 1))


def argmax_beside_greedy_rows(draft, keys, context):
    """Drafts the argmax for sampled rows too, when greedy rows are in the batch."""
    greedy = context.sampling.greedy
    mixed = greedy.any() & ~greedy.all()
    best = jnp.argmax(draft.probs, -1).astype(jnp.int32)
    return draft.replace(tokens=jnp.where(mixed & ~greedy[:, None], best, draft.tokens))


def draws_with_the_coin(draft, keys, context):
    """Draws the first token with the very number that the rule will accept it with."""
    u = jax.vmap(lambda k: jax.random.uniform(k, draft.tokens.shape[1:]))(keys.at_round(rng.ACCEPT))
    total = jnp.cumsum(draft.probs, -1)
    first = jnp.argmax(total > u[..., None] * total[..., -1:], -1).astype(jnp.int32)
    return draft.replace(tokens=jnp.concatenate([first[:, :1], draft.tokens[:, 1:]], 1))


MUTANTS = (
    Mutant("resample_from_target", "a rejected token is replaced by a draw from the target, not from the residual",
           "card A2", "chain", _rule(resample_from_target)),
    Mutant("match_then_resample", "compares with a draw of the target, then draws another token to emit",
           "REST and Medusa nucleus sampling", "chain", _rule(match_then_resample)),
    Mutant("match_then_resample_on_a_tree", "the same on a tree", "REST and Medusa nucleus sampling", "without_replacement",
           _rule(match_then_resample)),
    Mutant("residual_after_everything", "the token after a full chain comes from the last residual", "a wrong index",
           "chain", _rule(residual_after_everything)),
    Mutant("go_on_after_a_rejection", "the last accepted token counts, not the first rejected one",
           "block verification's reading, with the token-wise test", "chain", _rule(go_on_after_a_rejection)),
    Mutant("unadjusted_last_token", "the bonus token is drawn without temperature and top-p",
           "EAGLE until 2025-04; HASS, Falcon, Spec-Bench still", "chain", _rule(unadjusted_last_token),
           settings={"temperature": 0.5}),
    Mutant("block_stops_at_the_first_failure", "block verification ends at its first failure", "a review bot's advice, A7",
           "chain", _rule(block_stops_at_the_first_failure)),
    Mutant("block_with_the_plain_residual", "block verification with the token-wise residual", "vllm-ascend #7807",
           "chain", _rule(block_with_the_plain_residual)),
    Mutant("twins_are_merged", "of equal i.i.d. siblings only one is tried and taken off", "card B2", "iid",
           _rule(twins_are_merged)),
    Mutant("best_child_first", "siblings are tried in the order of the target's favour", "card B2: any order that ignores "
           "the sampled values", "iid", _rule(best_child_first)),
    Mutant("longest_of_separate_chains", "each path is judged with noise of its own, the longest is kept",
           "ReDrafter's beams", "iid", _rule(longest_of_separate_chains)),
    Mutant("traversal_forgets_what_was_lost", "weight Z / (remaining draft mass) instead of Z / (Z + 1 - weight)",
           "a public re-implementation, card B7", "without_replacement", _rule(traversal_forgets_what_was_lost)),
    Mutant("k_seq_with_a_small_rho", "rho between 1 and the smallest valid one", "card B4", "iid",
           _rule(k_seq_with_a_small_rho)),
    Mutant("padding_is_a_token", "nodes that do not exist are tested as token 0", "Medusa's retrieve indices", "ragged",
           _rule(padding_is_a_token)),
    Mutant("coins_twice", "the coins of a round are asked for a second time", "Sequoia's copy in TriForce", "chain",
           _rule(coins_twice), killed_by=LEDGER),
    Mutant("one_number_for_coin_and_residual", "one uniform number rejects and then chooses", "noise reused in a round",
           "chain", _rule(one_number_for_coin_and_residual), killed_by=COUNTING),
    Mutant("noise_of_the_first_round", "the same noise in every round", "Sequoia, Tree/SpecTree.py", "chain",
           _rule(noise_of_the_first_round), killed_by=COUNTING),
    Mutant("argmax_claims_softmax", "drafts the argmax and claims the softmax", "keras-hub, toyllm", "chain",
           chain.make, _changed(argmax_claims_softmax)),
    Mutant("claims_another_law", "claims another law than it drew from", "transformers #47932, DeepSpec #31", "chain",
           chain.make, _changed(claims_another_law)),
    Mutant("drops_what_it_saw", "withdraws a token after looking at it", "card D4", "chain", chain.make,
           _changed(drops_what_it_saw)),
    Mutant("top_k_claims_draws", "top-k siblings fed to the rule for draws", "trained card 19", "iid", recursive.make,
           _changed(top_k_claims_draws)),
    Mutant("keeps_the_best_draws", "keeps the best of the siblings it drew", "card B5's key trap", "iid", recursive.make,
           _changed(keeps_the_best_draws)),
    Mutant("forgets_the_elder_siblings", "draws without replacement and claims the law with replacement",
           "card B3", "without_replacement", recursive.make, _changed(forgets_the_elder_siblings)),
    Mutant("draws_with_the_coin", "draft and acceptance share one number", "noise reused between draft and verify",
           "chain", chain.make, _changed(draws_with_the_coin), killed_by=COUNTING),
    Mutant("withdrawn_elders_are_subtracted", "a sibling that does not exist is taken off the target's law",
           "padding treated as a failed trial", "ragged", _rule(withdrawn_elders_are_subtracted)),
    Mutant("residual_with_the_drafters_noise", "the residual token is drawn with the key of a draft token",
           "noise reused between draft and verify", "chain", _rule(residual_with_the_drafters_noise), killed_by=LEDGER),
    Mutant("argmax_beside_greedy_rows", "sampled rows are drafted greedily when the batch has greedy rows",
           "one temperature for a whole batch", "chain", chain.make, _changed(argmax_beside_greedy_rows),
           killed_by=CONFORMANCE),
)  # fmt: skip
