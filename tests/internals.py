"""Parts of specjax that are not public and that tests need, under names that stay.

No other file of the tests imports a private module: who moves one changes this file.
"""

from __future__ import annotations

from typing import Any

from specjax.decode import _beam_rounds as decode_beam_rounds
from specjax.decode import _hypotheses as decode_hypotheses
from specjax.drafters import _limited as drafters_limited
from specjax.drafters import growth as drafters_growth
from specjax.drafters import shared_keys as drafters_keys
from specjax.drafters.draft_models import _small_model as draft_models_small_model
from specjax.drafters.draft_models import _spec_network as draft_models_spec_network
from specjax.drafters.draft_models import _vocabularies as draft_models_vocabularies
from specjax.drafters.draft_models._vocabularies import intersection as draft_models_intersection
from specjax.drafters.draft_models._vocabularies import maps as draft_models_vocabulary_maps
from specjax.drafters.draft_models._vocabularies import string_law as draft_models_string_law
from specjax.drafters.draft_models._vocabularies import string_match as draft_models_string_match
from specjax.drafters.growth import plans as drafters_growth_plans
from specjax.drafters.growth import stepper as drafters_growth_stepper
from specjax.drafters.heads import _along_text as heads_along_text
from specjax.drafters.heads import _depth_loss as heads_depth_loss
from specjax.drafters.heads import _masked_text as heads_masked_text
from specjax.drafters.heads import _prefix as heads_prefix
from specjax.drafters.heads import _shape as heads_eagle_shape
from specjax.drafters.heads import _vocabulary as heads_vocabulary
from specjax.drafters.heads.block import _corrections as heads_block_corrections
from specjax.drafters.heads.block import _network as heads_block_network
from specjax.drafters.heads.block import block_head as heads_block
from specjax.drafters.heads.eagle import _drafter as heads_network_drafter
from specjax.drafters.heads.eagle import _loss as heads_rollout
from specjax.drafters.heads.eagle import _network as heads_network
from specjax.drafters.heads.falcon import _loss as heads_falcon_loss
from specjax.drafters.heads.falcon import _network as heads_falcon_network
from specjax.drafters.heads.multi import _heads as heads_heads
from specjax.drafters.lookup import _frequency as lookup_frequency
from specjax.drafters.lookup import _match as lookup_suffix_array
from specjax.drafters.lookup import sam as lookup_automaton
from specjax.drafters.nested import _stages as nested_stages
from specjax.drafters.nested import _system as nested_inner_rounds
from specjax.drafters.nested import _system as nested_system
from specjax.drafters.nested import cascade as nested_lengths
from specjax.drafters.parallel import jacobi as parallel_pieces
from specjax.drafters.self_speculation import _exit_adapter as self_speculation_exit_rounds
from specjax.drafters.self_speculation import _own_cache as self_speculation_own_cache
from specjax.drafters.self_speculation import _skip_sets as self_speculation_skip_sets
from specjax.drafters.self_speculation import _skip_sets as self_speculation_skip_text
from specjax.drafters.self_speculation import layer_skip as self_speculation_skip_choice


def setup_of(drafter: Any) -> Any:
    """The static settings of a drafter's ``propose``; of one that is grown a stepper and a plan."""
    return drafter.propose.args[0]


def network_of(drafter: Any) -> Any:
    """What the loss of a drafter is a loss of."""
    return drafter.training.loss.args[0]


__all__ = [
    "decode_beam_rounds",
    "decode_hypotheses",
    "draft_models_intersection",
    "draft_models_small_model",
    "draft_models_spec_network",
    "draft_models_string_law",
    "draft_models_string_match",
    "draft_models_vocabularies",
    "draft_models_vocabulary_maps",
    "drafters_growth",
    "drafters_growth_plans",
    "drafters_growth_stepper",
    "drafters_keys",
    "drafters_limited",
    "heads_along_text",
    "heads_block",
    "heads_block_corrections",
    "heads_block_network",
    "heads_depth_loss",
    "heads_eagle_shape",
    "heads_falcon_loss",
    "heads_falcon_network",
    "heads_heads",
    "heads_masked_text",
    "heads_network",
    "heads_network_drafter",
    "heads_prefix",
    "heads_rollout",
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
    "self_speculation_exit_rounds",
    "self_speculation_own_cache",
    "self_speculation_skip_choice",
    "self_speculation_skip_sets",
    "self_speculation_skip_text",
    "setup_of",
]
