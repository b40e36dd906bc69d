"""Parts of specjax that are not public and that tests need, under names that stay.

No other file of the tests imports a private module: who moves one changes this file.
"""

from __future__ import annotations

from typing import Any

from specjax.accept import _verdict as accept_verdict
from specjax.accept import _walk as accept_walk
from specjax.decode import _beam_rounds as decode_beam_rounds
from specjax.decode import _hypotheses as decode_hypotheses
from specjax.drafters import _glancing as drafters_glancing
from specjax.drafters import _growth as drafters_growth
from specjax.drafters import _keys as drafters_keys
from specjax.drafters import _limited as drafters_limited
from specjax.drafters._growth import plans as drafters_growth_plans
from specjax.drafters._growth import stepper as drafters_growth_stepper
from specjax.drafters.draft_models import _intersection as draft_models_intersection
from specjax.drafters.draft_models import _pard_text as draft_models_pard_text
from specjax.drafters.draft_models import _small_model as draft_models_small_model
from specjax.drafters.draft_models import _spec_network as draft_models_spec_network
from specjax.drafters.draft_models import _spec_text as draft_models_spec_text
from specjax.drafters.draft_models import _string_law as draft_models_string_law
from specjax.drafters.draft_models import _string_match as draft_models_string_match
from specjax.drafters.draft_models import _vocabularies as draft_models_vocabularies
from specjax.drafters.heads import _block_corrections as heads_block_corrections
from specjax.drafters.heads import _block_network as heads_block_network
from specjax.drafters.heads import _block_text as heads_block_text
from specjax.drafters.heads import _columns as heads_columns
from specjax.drafters.heads import _drafter as heads_drafter
from specjax.drafters.heads import _eagle_shape as heads_eagle_shape
from specjax.drafters.heads import _falcon_layers as heads_falcon_layers
from specjax.drafters.heads import _falcon_loss as heads_falcon_loss
from specjax.drafters.heads import _falcon_network as heads_falcon_network
from specjax.drafters.heads import _falcon_text as heads_falcon_text
from specjax.drafters.heads import _family as heads_family
from specjax.drafters.heads import _features as heads_features
from specjax.drafters.heads import _given as heads_given
from specjax.drafters.heads import _masked_text as heads_masked_text
from specjax.drafters.heads import _network as heads_network
from specjax.drafters.heads import _parallel_text as heads_parallel_text
from specjax.drafters.heads import _prefix as heads_prefix
from specjax.drafters.heads import _rollout as heads_rollout
from specjax.drafters.heads import _rollout_loss as heads_rollout_loss
from specjax.drafters.heads import _text as heads_text
from specjax.drafters.heads import _vocabulary as heads_vocabulary
from specjax.drafters.lookup import _automaton as lookup_automaton
from specjax.drafters.lookup import _frequency as lookup_frequency
from specjax.drafters.lookup import _suffix_array as lookup_suffix_array
from specjax.drafters.nested import _inner_rounds as nested_inner_rounds
from specjax.drafters.nested import _lengths as nested_lengths
from specjax.drafters.nested import _stages as nested_stages
from specjax.drafters.nested import _system as nested_system
from specjax.drafters.parallel import _pieces as parallel_pieces
from specjax.drafters.self_speculation import _exit_rounds as self_speculation_exit_rounds
from specjax.drafters.self_speculation import _look_ahead as self_speculation_look_ahead
from specjax.drafters.self_speculation import _look_ahead_text as self_speculation_look_ahead_text
from specjax.drafters.self_speculation import _own_cache as self_speculation_own_cache
from specjax.drafters.self_speculation import _skip_choice as self_speculation_skip_choice
from specjax.drafters.self_speculation import _skip_sets as self_speculation_skip_sets
from specjax.drafters.self_speculation import _skip_text as self_speculation_skip_text
from specjax.report import _canvas as report_canvas
from specjax.report import _rows as report_rows
from specjax.report import _text as report_text
from specjax.theory import _piecewise as theory_piecewise


def setup_of(drafter: Any) -> Any:
    """The static settings of a drafter's ``propose``; of one that is grown a stepper and a plan."""
    return drafter.propose.args[0]


def network_of(drafter: Any) -> Any:
    """What the loss of a drafter is a loss of."""
    return drafter.training.loss.args[0]


__all__ = [
    "accept_verdict",
    "accept_walk",
    "decode_beam_rounds",
    "decode_hypotheses",
    "draft_models_intersection",
    "draft_models_pard_text",
    "draft_models_small_model",
    "draft_models_spec_network",
    "draft_models_spec_text",
    "draft_models_string_law",
    "draft_models_string_match",
    "draft_models_vocabularies",
    "drafters_glancing",
    "drafters_growth",
    "drafters_growth_plans",
    "drafters_growth_stepper",
    "drafters_keys",
    "drafters_limited",
    "heads_block_corrections",
    "heads_block_network",
    "heads_block_text",
    "heads_columns",
    "heads_drafter",
    "heads_eagle_shape",
    "heads_falcon_layers",
    "heads_falcon_loss",
    "heads_falcon_network",
    "heads_falcon_text",
    "heads_family",
    "heads_features",
    "heads_given",
    "heads_masked_text",
    "heads_network",
    "heads_parallel_text",
    "heads_prefix",
    "heads_rollout",
    "heads_rollout_loss",
    "heads_text",
    "heads_vocabulary",
    "lookup_automaton",
    "lookup_frequency",
    "lookup_suffix_array",
    "nested_inner_rounds",
    "nested_lengths",
    "nested_stages",
    "nested_system",
    "network_of",
    "parallel_pieces",
    "report_canvas",
    "report_rows",
    "report_text",
    "self_speculation_exit_rounds",
    "self_speculation_look_ahead",
    "self_speculation_look_ahead_text",
    "self_speculation_own_cache",
    "self_speculation_skip_choice",
    "self_speculation_skip_sets",
    "self_speculation_skip_text",
    "setup_of",
    "theory_piecewise",
]
