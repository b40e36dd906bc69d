"""Mistakes of published code, and some that differ from it by one step."""

from __future__ import annotations

from specjax.accept import chain, recursive
from specjax.testing import mutant_drafters as drafters
from specjax.testing import mutant_rules as rules
from specjax.testing import mutant_tree_rules as tree_rules
from specjax.testing.mutant_entry import (
    CONFORMANCE,
    COUNTING,
    LEDGER,
    PATHS,
    drafter_mutant,
    rule_mutant,
)

PUBLISHED = (
    rule_mutant(
        rules.resample_from_target,
        "chain",
        "a rejected token is replaced by a draw from the target, not from the residual",
        "speculative sampling (2211.17192), misread",
    ),
    rule_mutant(
        rules.match_then_resample,
        "chain",
        "compares with a draw of the target, then draws another token to emit",
        "REST and Medusa, nucleus sampling",
    ),
    rule_mutant(
        rules.match_then_resample,
        "without_replacement",
        "the same on a tree",
        "REST and Medusa, nucleus sampling",
    )._replace(name="match_then_resample_on_a_tree"),
    rule_mutant(
        rules.residual_after_full_chain,
        "chain",
        "the token after a fully accepted chain is drawn from the last residual",
        "a wrong index",
    ),
    rule_mutant(
        rules.continues_after_rejection,
        "chain",
        "the last accepted token counts, not the first rejected one",
        "the reading of block verification, with the token-wise test",
    ),
    rule_mutant(
        rules.unadjusted_bonus_token,
        "chain",
        "the bonus token is drawn without temperature and top-p",
        "EAGLE until 2025-04; HASS, Falcon and Spec-Bench",
        temperature=0.5,
    ),
    rule_mutant(
        rules.block_stops_at_first_rejection,
        "chain",
        "block verification ends at its first rejection",
        "block verification (2403.10444), misread in a code review",
    ),
    rule_mutant(
        rules.block_with_chain_residual,
        "chain",
        "block verification with the token-wise residual",
        "vllm-ascend #7807",
    ),
    rule_mutant(
        tree_rules.equal_siblings_are_merged,
        "iid",
        "of equal i.i.d. siblings only one is tested and subtracted",
        "SpecInfer (2305.09781), on a merged tree",
    ),
    rule_mutant(
        tree_rules.best_child_first,
        "iid",
        "siblings are tested in the order of the target's probs",
        "SpecInfer (2305.09781): the order must not depend on the drawn tokens",
    ),
    rule_mutant(
        tree_rules.longest_of_separate_chains,
        "iid",
        "each path is tested with its own noise, the longest is kept",
        "ReDrafter's beams (2403.09919)",
    ),
    rule_mutant(
        tree_rules.traversal_with_wrong_weight,
        "without_replacement",
        "weight Z / (remaining draft mass) instead of Z / (Z + 1 - weight)",
        "a public re-implementation of traversal verification (2505.12398)",
    ),
    rule_mutant(
        tree_rules.k_seq_with_small_rho,
        "iid",
        "rho between 1 and the smallest valid one",
        "SpecTr (2310.15141), a rounded rho",
    ),
    rule_mutant(
        tree_rules.padding_is_tested,
        "ragged",
        "nodes that do not exist are tested as token 0",
        "Medusa's retrieve indices",
        PATHS,
    ),
    rule_mutant(
        tree_rules.invalid_siblings_are_subtracted,
        "ragged",
        "an invalid sibling is subtracted from the target's probs",
        "padding treated as a rejected token",
    ),
    rule_mutant(
        rules.coins_requested_twice,
        "chain",
        "the coins of a round are requested a second time",
        "Sequoia's copy in TriForce",
        LEDGER,
    ),
    rule_mutant(
        rules.residual_with_draft_noise,
        "chain",
        "the residual token is drawn with the key of a draft token",
        "noise reused between draft and verification",
        LEDGER,
    ),
    rule_mutant(
        rules.one_number_for_coin_and_residual,
        "chain",
        "one uniform number rejects a token and draws its replacement",
        "noise reused in a round",
        COUNTING,
    ),
    rule_mutant(
        rules.noise_of_first_round,
        "chain",
        "the same noise in every round",
        "Sequoia, Tree/SpecTree.py",
        COUNTING,
    ),
    drafter_mutant(
        drafters.argmax_with_softmax_probs,
        "chain",
        chain.make,
        "drafts the argmax and declares the softmax",
        "keras-hub, toyllm; self_speculative_sample of Draft & Verify (2309.08168) by default",
    ),
    drafter_mutant(
        drafters.declares_other_probs,
        "chain",
        chain.make,
        "declares other probs than it drew from",
        "transformers #47932, DeepSpec #31",
    ),
    drafter_mutant(
        drafters.drops_after_drawing,
        "chain",
        chain.make,
        "drops a token because of its own value",
        "adaptive draft lengths, such as Draft & Verify's without the unsure token; DSpark, app. A",
    ),
    drafter_mutant(
        drafters.top_k_with_iid_probs,
        "iid",
        recursive.make,
        "top-k siblings for a rule that takes draws",
        "SpecInfer (2305.09781) with deterministic expansion",
    ),
    drafter_mutant(
        drafters.keeps_best_draws,
        "iid",
        recursive.make,
        "keeps the best of the siblings that it drew",
        "re-ranking as in EAGLE-2 (2406.16858), of sampled nodes",
    ),
    drafter_mutant(
        drafters.forgets_earlier_siblings,
        "without_replacement",
        recursive.make,
        "draws without replacement and declares the probs with replacement",
        "recursive rejection sampling (2402.14160), misread",
    ),
    drafter_mutant(
        drafters.draws_with_coin_noise,
        "chain",
        chain.make,
        "draft and acceptance share one uniform number",
        "noise reused between draft and verification",
        COUNTING,
    ),
    drafter_mutant(
        drafters.argmax_next_to_greedy_rows,
        "chain",
        chain.make,
        "sampled rows are drafted greedily when the batch has greedy rows",
        "one temperature for a whole batch",
        CONFORMANCE,
    ),
)
