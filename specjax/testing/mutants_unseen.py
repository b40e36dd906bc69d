"""Mistakes that comparing the text of one round does not show, or only on deep drafts."""

from __future__ import annotations

from specjax import accept
from specjax.accept import chain, deterministic, recursive
from specjax.testing import mutant_drafters as drafters
from specjax.testing import mutant_rules as rules
from specjax.testing import mutant_tree_rules as tree_rules
from specjax.testing.mutant_entry import (
    CLAIMS,
    CONFORMANCE,
    COUNTING,
    FORECAST,
    PATHS,
    STATE,
    USE,
    WIDTHS,
    drafter_mutant,
    rule_mutant,
)

_RULES = (
    rule_mutant(
        tree_rules.wrong_interior_path,
        "irregular",
        "right tokens along a path that is none: other cache entries are committed",
        "a path from a table of another tree",
        PATHS,
    ),
    rule_mutant(
        rules.third_token_against_second_probs,
        "deep chain",
        "the third token is tested against the target's probs of the second",
        "a wrong index that a draft of two tokens does not reach",
    ),
    rule_mutant(
        rules.residual_of_the_node_before_at_the_end,
        "deep chain",
        "the residual of the last token is that of the token before it",
        "a wrong index at the last depth",
    ),
    rule_mutant(
        rules.coins_keyed_by_position,
        "chain",
        "coins are keyed by text position, so rejected positions get them again",
        "the noise of sample-then-match, used for rejection",
        COUNTING,
    ),
    rule_mutant(
        rules.coins_of_the_first_row,
        "chain",
        "all rows use the coins of the first row",
        "one generator for a batch",
        CONFORMANCE,
    ),
    rule_mutant(
        tree_rules.siblings_in_reverse_below_the_top,
        "deep without_replacement",
        "siblings below the first level are tested in reverse order",
        "a loop over a stack",
    ),
    rule_mutant(
        tree_rules.target_row_of_first_sibling,
        "deep iid",
        "after a later sibling the target's probs after the first one are read",
        "rows of the target's output numbered by level",
    ),
    rule_mutant(
        tree_rules.valid_ignored_below_the_top,
        "deep iid, holes",
        "nodes that do not exist are tested, except at the first level",
        "a mask applied to the roots only",
        PATHS,
    ),
    rule_mutant(
        tree_rules.residual_not_normalised,
        "iid",
        "the second sibling is tested against a residual that does not sum to 1",
        "SpecInfer (2305.09781), the normalisation left out",
    ),
    rule_mutant(
        tree_rules.next_sibling_replaces_a_rejected_one,
        "without_replacement",
        "where all children are rejected, the second one is emitted",
        "a draft token used as a residual draw",
    ),
    rule_mutant(
        tree_rules.never_accepts,
        "chain",
        "no token is ever accepted: the law is right and the rule useless",
        "a comparison the wrong way round",
        USE,
    ),
    rule_mutant(
        tree_rules.accepts_one_token_only,
        "chain",
        "no token after the first is ever accepted",
        "a loop that ends too early",
        USE,
    ),
    rule_mutant(
        rules.fails_on_empty_drafts,
        "chain",
        "a draft of 0 nodes raises IndexError",
        "an index without a test of the size",
        USE,
    ),
    rule_mutant(
        chain.chain,
        "chain",
        "at temperature 0 every token is accepted that ties with the best",
        "a comparison of logits instead of ids",
        CONFORMANCE,
    )._replace(
        name="greedy_accepts_ties",
        rule=lambda: accept.load("chain")._replace(greedy=rules.greedy_accepts_ties),
    ),
)
_DRAFTS = (
    drafter_mutant(
        drafters.length_after_looking,
        "chain",
        chain.make,
        "the length of the draft is chosen after looking at the drawn tokens",
        "DSpark, appendix A: (.7, .3) becomes (.85, .15)",
        CLAIMS,
    ),
    drafter_mutant(
        drafters.length_from_a_later_token,
        "chain",
        chain.make,
        "whether the first token is proposed depends on the second",
        "a confidence that is computed from the whole draft",
        CLAIMS,
    ),
    drafter_mutant(
        drafters.never_drafts_eos,
        "chain",
        chain.make,
        "a drawn end-of-sequence token is dropped",
        "a draft that is cut at its end-of-sequence token",
        CLAIMS,
    ),
    drafter_mutant(
        drafters.claims_another_temperature,
        "chain",
        chain.make,
        "declares the probs of temperature 1",
        "draft logits stored before the temperature",
        CLAIMS,
    ),
    drafter_mutant(
        drafters.flattering_probs,
        "chain",
        chain.make,
        "declares the distribution in which the drawn token is less probable",
        "a choice among several draft distributions after the draw",
        CLAIMS,
    ),
    drafter_mutant(
        drafters.probs_of_the_next_sibling,
        "independent",
        recursive.make,
        "the probs of two drafters are swapped",
        "stacked in another order than the tokens",
        CLAIMS,
    ),
    drafter_mutant(
        drafters.wrong_in_later_rounds,
        "chain",
        chain.make,
        "declares other probs from the second round on",
        "a stale buffer",
        CLAIMS,
    ),
    drafter_mutant(
        drafters.drafts_from_the_next_row,
        "prompt_lookup",
        deterministic.make,
        "a row drafts the tokens of another row",
        "a state that is not per row",
        CONFORMANCE,
    ),
)
_SELF = (
    drafter_mutant(
        drafters.probs_of_the_depth_before,
        "pass",
        chain.make,
        "declares the marginal of the depth before",
        "look-ahead embeddings counted from the pending token's own output",
        CLAIMS,
    ),
    drafter_mutant(
        drafters.embeddings_behind_the_pending_token,
        "pass merged",
        recursive.make,
        "the next draft continues from the pending token of the last round",
        "PaSS in one call, with the embeddings of the first place of the block",
        STATE,
    ),
    drafter_mutant(
        drafters.one_threshold_for_the_batch,
        "layer_skip matchness",
        chain.make,
        "the adaptive threshold of all rows is that of the first",
        "Draft & Verify's threshold (2309.08168), which is one number, in a batch",
        CONFORMANCE,
    ),
)
_STATES = (
    drafter_mutant(
        drafters.corrupt_below_the_newest,
        "chain",
        chain.make,
        "the draft cache is corrupt below its newest three entries",
        "a ring buffer that is too short",
        STATE,
    ),
    drafter_mutant(
        drafters.commits_another_node,
        "iid",
        recursive.make,
        "the draft cache keeps the first sibling, also where another one was accepted",
        "a path in another numbering",
        STATE,
    ),
    drafter_mutant(
        drafters.forgets_the_last_round,
        "dynamic",
        deterministic.make,
        "the accepted nodes are not committed to the draft cache",
        "an update that reads the wrong verdict",
        STATE,
    ),
    drafter_mutant(
        drafters.needless_history,
        "chain",
        chain.make,
        "declares that its drafts depend on earlier rounds, so that its state is not compared",
        "an exemption for a method that needs none",
        STATE,
    ),
    drafter_mutant(
        drafters.optimistic_forecast,
        "chain",
        chain.make,
        "forecasts a tenth more acceptance",
        "a forecast that is not compared with decoding",
        FORECAST,
    ),
    drafter_mutant(
        drafters.believes_every_node,
        "token_recycling",
        deterministic.make,
        "the state takes what the target computed for nodes that do not exist",
        "an update without the mask of the draft",
        WIDTHS,
    ),
)
UNSEEN = (*_RULES, *_DRAFTS, *_SELF, *_STATES)
