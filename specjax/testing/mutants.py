"""Wrong rules and drafters, each of which a test must detect.

Most of these mistakes are from published code; the others differ from it by one step. A test kit
that does not detect them proves nothing. ``tests/testing/test_mutants.py`` applies to each mutant
the test named in ``caught_by``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.accept import _verdict, chain, recursive
from specjax.testing import mutant_drafters as drafters
from specjax.testing import mutant_rules as rules
from specjax.testing.mutant_drafters import with_draft
from specjax.types import SIBLINGS, Accept, Drafter

ENUMERATION, LEDGER, COUNTING, CONFORMANCE = "enumeration", "ledger", "counting", "conformance"


class Mutant(NamedTuple):
    """One mistake: a wrong rule, or a correct rule and a change of a correct drafter."""

    name: str
    mistake: str
    source: str  # the code or paper where it was made, or that is misread
    case: str  # one of ``cases.NAMES`` on which the mistake changes the output
    rule: Callable[[], Accept]
    change: Callable[[Drafter], Drafter] = lambda drafter: drafter
    caught_by: str = ENUMERATION
    settings: dict = {}  # noqa: RUF012


def _rule(
    sampled: Callable, case: str, mistake: str, source: str, caught_by=ENUMERATION, **settings: Any
) -> Mutant:
    """A wrong rule; ``settings`` of ``sampling.make_sampling`` with which it is tested."""
    name = sampled.__name__

    def make() -> Accept:
        return Accept(sampled, _verdict.greedy, name, "L3", SIBLINGS)

    return Mutant(name, mistake, source, case, make, caught_by=caught_by, settings=settings)


def _drafter(
    change: Callable,
    case: str,
    rule: Callable[[], Accept],
    mistake: str,
    source: str,
    caught_by=ENUMERATION,
) -> Mutant:
    """A wrong drafter with a correct rule."""
    return Mutant(change.__name__, mistake, source, case, rule, with_draft(change), caught_by)


MUTANTS = (
    _rule(
        rules.resample_from_target,
        "chain",
        "a rejected token is replaced by a draw from the target, not from the residual",
        "speculative sampling (2211.17192), misread",
    ),
    _rule(
        rules.match_then_resample,
        "chain",
        "compares with a draw of the target, then draws another token to emit",
        "REST and Medusa, nucleus sampling",
    ),
    _rule(
        rules.match_then_resample,
        "without_replacement",
        "the same on a tree",
        "REST and Medusa, nucleus sampling",
    )._replace(name="match_then_resample_on_a_tree"),
    _rule(
        rules.residual_after_full_chain,
        "chain",
        "the token after a fully accepted chain is drawn from the last residual",
        "a wrong index",
    ),
    _rule(
        rules.continues_after_rejection,
        "chain",
        "the last accepted token counts, not the first rejected one",
        "the reading of block verification, with the token-wise test",
    ),
    _rule(
        rules.unadjusted_bonus_token,
        "chain",
        "the bonus token is drawn without temperature and top-p",
        "EAGLE until 2025-04; HASS, Falcon and Spec-Bench",
        temperature=0.5,
    ),
    _rule(
        rules.block_stops_at_first_rejection,
        "chain",
        "block verification ends at its first rejection",
        "block verification (2403.10444), misread in a code review",
    ),
    _rule(
        rules.block_with_chain_residual,
        "chain",
        "block verification with the token-wise residual",
        "vllm-ascend #7807",
    ),
    _rule(
        rules.equal_siblings_are_merged,
        "iid",
        "of equal i.i.d. siblings only one is tested and subtracted",
        "SpecInfer (2305.09781), on a merged tree",
    ),
    _rule(
        rules.best_child_first,
        "iid",
        "siblings are tested in the order of the target's probs",
        "SpecInfer (2305.09781): the order must not depend on the drawn tokens",
    ),
    _rule(
        rules.longest_of_separate_chains,
        "iid",
        "each path is tested with its own noise, the longest is kept",
        "ReDrafter's beams (2403.09919)",
    ),
    _rule(
        rules.traversal_with_wrong_weight,
        "without_replacement",
        "weight Z / (remaining draft mass) instead of Z / (Z + 1 - weight)",
        "a public re-implementation of traversal verification (2505.12398)",
    ),
    _rule(
        rules.k_seq_with_small_rho,
        "iid",
        "rho between 1 and the smallest valid one",
        "SpecTr (2310.15141), a rounded rho",
    ),
    _rule(
        rules.padding_is_tested,
        "ragged",
        "nodes that do not exist are tested as token 0",
        "Medusa's retrieve indices",
    ),
    _rule(
        rules.invalid_siblings_are_subtracted,
        "ragged",
        "an invalid sibling is subtracted from the target's probs",
        "padding treated as a rejected token",
    ),
    _rule(
        rules.coins_requested_twice,
        "chain",
        "the coins of a round are requested a second time",
        "Sequoia's copy in TriForce",
        LEDGER,
    ),
    _rule(
        rules.residual_with_draft_noise,
        "chain",
        "the residual token is drawn with the key of a draft token",
        "noise reused between draft and verification",
        LEDGER,
    ),
    _rule(
        rules.one_number_for_coin_and_residual,
        "chain",
        "one uniform number rejects a token and draws its replacement",
        "noise reused in a round",
        COUNTING,
    ),
    _rule(
        rules.noise_of_first_round,
        "chain",
        "the same noise in every round",
        "Sequoia, Tree/SpecTree.py",
        COUNTING,
    ),
    _drafter(
        drafters.argmax_with_softmax_probs,
        "chain",
        chain.make,
        "drafts the argmax and declares the softmax",
        "keras-hub, toyllm",
    ),
    _drafter(
        drafters.declares_other_probs,
        "chain",
        chain.make,
        "declares other probs than it drew from",
        "transformers #47932, DeepSpec #31",
    ),
    _drafter(
        drafters.drops_after_drawing,
        "chain",
        chain.make,
        "drops a token because of its own value",
        "adaptive draft lengths; the counterexample in DSpark, appendix A",
    ),
    _drafter(
        drafters.top_k_with_iid_probs,
        "iid",
        recursive.make,
        "top-k siblings for a rule that takes draws",
        "SpecInfer (2305.09781) with deterministic expansion",
    ),
    _drafter(
        drafters.keeps_best_draws,
        "iid",
        recursive.make,
        "keeps the best of the siblings that it drew",
        "re-ranking as in EAGLE-2 (2406.16858), of sampled nodes",
    ),
    _drafter(
        drafters.forgets_earlier_siblings,
        "without_replacement",
        recursive.make,
        "draws without replacement and declares the probs with replacement",
        "recursive rejection sampling (2402.14160), misread",
    ),
    _drafter(
        drafters.draws_with_coin_noise,
        "chain",
        chain.make,
        "draft and acceptance share one uniform number",
        "noise reused between draft and verification",
        COUNTING,
    ),
    _drafter(
        drafters.argmax_next_to_greedy_rows,
        "chain",
        chain.make,
        "sampled rows are drafted greedily when the batch has greedy rows",
        "one temperature for a whole batch",
        CONFORMANCE,
    ),
)


def named(name: str) -> Mutant:
    """The mutant of that name. Raises KeyError for an unknown name."""
    return {mutant.name: mutant for mutant in MUTANTS}[name]
