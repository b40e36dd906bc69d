"""A draft model with another vocabulary than the target's: the key ``vocabulary``.

Timor et al. 2025 (2502.05202).
"""

from __future__ import annotations

from specjax.drafters import growth, pairs
from specjax.drafters._limited import limited
from specjax.drafters.draft_models import _small_model
from specjax.drafters.draft_models._vocabularies import intersection, string_law, string_match
from specjax.drafters.draft_models._vocabularies import maps as vocabulary_maps
from specjax.drafters.growth.plans import Method
from specjax.drafters.shared_keys import DraftKeys, TreeKeys
from specjax.errors import UserError
from specjax.models.token_bytes import TokenBytes
from specjax.topology import shapes
from specjax.types import LM, Drafter, Params

# The values of the key: one tokenizer, or one of the paper's methods.
SAME, TLI, SLEM, SLRS = CHOICES = ("same", "tli", "slem", "slrs")
NAME = "draft_model"


def make(target: LM, model: LM, params: Params, how: str, keys: DraftKeys, usual: int) -> Drafter:
    """The drafter of one of the paper's methods. Raises UserError for what it does not take.

    ``usual`` is the length of a chain without keys. It follows the text in all rounds; ``gaps`` is
    for a pair with one vocabulary.
    """
    gamma = keys.gamma or usual
    pair = _tokens(target, "target"), _tokens(model, "draft model")
    if how == TLI and pair[0].name == pair[1].name:
        # All tokens are shared.
        pairs.check(target, model)
        loaded = pairs.in_size(model, target.vocab_size), params
        return _small_model.make(NAME, target, keys, shapes.chain(gamma), loaded=loaded)
    _check_models(target, model, how)
    sizes = target.vocab_size, model.vocab_size
    maps = vocabulary_maps.between(*pair, *sizes)
    known, what = (maps.shared, "token") if how == TLI else (maps.spelled, "token's text")
    if not known:
        raise UserError(
            f"no {what} of the target's {sizes[0]} can be written in the draft model's {sizes[1]} "
            "tokens; the vocabularies must overlap"
        )
    if how != TLI:
        _check_chain(how, keys)
    if how == SLEM:
        drafter = string_match.build(model, params, maps, pair, target.vocab_size, gamma)
        # Its controllers are those of drafters that propose their drafts whole.
        return limited(drafter, keys.control)
    ways = vocabulary_maps.spellings(*pair, *sizes, string_law.NODES) if how == SLRS else None
    if how == SLRS and ways is None:
        raise UserError(
            f"vocabulary='slrs' adds up all ways to write a token of the target in draft tokens, "
            f"and the {model.vocab_size} tokens of the draft model have more than "
            f"{string_law.NODES} beginnings of such ways; take 'tli' or 'slem'"
        )
    size = maps.shared if ways is None else target.vocab_size
    plan = growth.read(Method(NAME, shapes.chain(gamma), "iid", size), keys)
    if ways is None:
        return intersection.build(target, model, params, maps, plan)
    return string_law.build(size, model, params, maps, ways, plan)


def _tokens(model: LM, what: str) -> TokenBytes:
    """The bytes of the model's tokens. Raises UserError if it has no tokenizer."""
    if model.token_bytes is None:
        raise UserError(
            f"the {what} has no tokenizer (tokenizer.json), and the key vocabulary compares the "
            "texts of tokens; give a directory with one"
        )
    return model.token_bytes


def _check_models(target: LM, model: LM, how: str) -> None:
    """Raises UserError for models with an encoder, and for a draft model with short windows."""
    if target.encoder is not None or model.encoder is not None:
        raise UserError(
            f"vocabulary={how!r} is for decoders, and a model of the pair reads its prompt with an "
            "encoder; take a draft model with the target's tokenizer"
        )
    if model.window is not None:
        raise UserError(
            f"the draft model {model.name} has layers with a sliding window of {model.window} "
            f"positions, and vocabulary={how!r} needs layers that read the whole text; take "
            "another draft model"
        )


def _check_chain(how: str, keys: TreeKeys) -> None:
    """Raises UserError for keys of a tree, and for siblings of the most probable text."""
    where = f"with vocabulary={how!r}, which drafts a chain"
    right = "give gamma, or vocabulary='tli' for a tree"
    keys.refuse(("tree", "nodes", "depth", "top_k", "search"), where, right)
    if how == SLEM:
        keys.refuse(("siblings",), f"{where} of the draft model's most probable tokens")
