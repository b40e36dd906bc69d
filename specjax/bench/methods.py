"""What is measured: methods by the keys of a configuration, and a caller's own objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import accept, drafters
from specjax.bench.passes import Method
from specjax.data.prompts import Prompt, PromptSet
from specjax.errors import UserError
from specjax.models import hf
from specjax.prompt import of_text
from specjax.types import LM, Accept, Drafter, ModelParams


class MethodChoice(NamedTuple):
    """The keys of one method, as a configuration gives them."""

    drafter: Any  # its keys, "name" among them; or a ``Drafter``
    rule: str  # "": the recommended rule for the drafter
    rule_keys: dict
    warm: bool = False  # whether it learns from other prompts before it is measured
    of_gammas: bool = False  # whether a gamma that it does not have is left out


def objects(
    target: LM, choice: MethodChoice, temperatures: Sequence[float]
) -> tuple[Drafter, Accept]:
    """The drafter and its rule, without parameters. Raises UserError: see ``build``."""
    ready = isinstance(choice.drafter, Drafter)
    drafter = choice.drafter if ready else drafters.make(target=target, **choice.drafter)
    rule = accept.load(choice.rule or accept.default_rule(drafter), **choice.rule_keys)
    accept.check_pair(drafter, rule)
    if drafter.greedy_only and any(temperatures):
        raise UserError(
            f"drafter {drafter.name} is for temperature 0 only; set config.sampling.temperature=0"
        )
    if choice.warm and drafter.rare.learn is None:
        raise UserError(f"drafter {drafter.name} does not learn from other prompts; leave warm out")
    if not (choice.warm or ready) and "memory" in choice.drafter:
        raise UserError(
            f"memory is {choice.drafter['memory']}: it limits what a warm drafter learns, and this "
            "one is not warm; set warm=True in a bench, or leave memory out"
        )
    return drafter, rule


def build(
    target: LM,
    target_params: Any,
    choice: MethodChoice,
    *,
    label: str,
    seed: int,
    temperatures: Sequence[float],
) -> Method:
    """The drafter with its rule and its parameters.

    Args:
        target, target_params: the model that the drafter is made for.
        choice: the keys of the method.
        label: the name of the method; "" = the name of its drafter.
        seed: for parameters that are drawn at random.
        temperatures: every temperature at which the method will run.

    Raises:
        UserError: unknown names and keys, a rule or a temperature that does not fit the drafter, a
            warm run of a drafter that does not learn, ``memory`` for a run that is not warm.
    """
    drafter, rule = objects(target, choice, temperatures)
    params = ModelParams(target_params, drafter.init_params(jax.random.key(seed)))
    return Method(label or drafter.name, drafter, rule, params, choice.warm)


# A caller's objects -----------------------------------------------------------------------------

# A drafter, a rule, and the drafter's parameters or the pair's; without them those of
# ``Drafter.init_params``.
Given = tuple[Drafter, Accept] | tuple[Drafter, Accept, Any]
Text = str | Sequence[int] | Prompt


def model_of(target: hf.Loaded | tuple[LM, Any]) -> hf.Loaded:
    """What ``hf.load`` returns, or the same of an ``LM`` with its parameters: without a tokenizer.

    Raises UserError for other objects.
    """
    if isinstance(target, hf.Loaded):
        return target
    if isinstance(target, tuple) and len(target) == 2 and isinstance(target[0], LM):
        return hf.Loaded(*target, None, None, "")
    raise UserError(
        f"target is {_kind(target)}; it must be what hf.load returns, or (LM, its parameters)"
    )


def method_of(
    model: hf.Loaded, given: Given, *, name: str, seed: int, temperatures: Sequence[float]
) -> Method:
    """The method, with its parameters.

    Args:
        model: the target.
        given: see ``Given``.
        name: in tables.
        seed: for parameters that are drawn at random.
        temperatures: every temperature at which the method will run.

    Raises:
        UserError: other objects, a rule or a temperature that does not fit the drafter.
    """
    # Drafter and Accept are tuples too.
    if not isinstance(given, tuple) or len(given) not in (2, 3) or isinstance(given, Accept):
        raise UserError(f"method {name} is {_kind(given)}; it must be (drafter, rule[, params])")
    drafter, rule = given[:2]
    for value, kind in ((drafter, Drafter), (rule, Accept)):
        if not isinstance(value, kind):
            raise UserError(
                f"method {name} has {_kind(value)} where a {kind.__name__} belongs; "
                "it must be (drafter, rule[, params])"
            )
    accept.check_pair(drafter, rule)
    if drafter.greedy_only and any(temperatures):
        raise UserError(f"method {name} is for temperature 0 only; leave other temperatures out")
    own = given[2] if len(given) == 3 else drafter.init_params(jax.random.key(seed))
    draft = own.draft if isinstance(own, ModelParams) else own
    return Method(name, drafter, rule, ModelParams(model.params, draft))


def prompts_of(
    model: hf.Loaded,
    prompts: Sequence[Text] | Mapping[str, Sequence[Text]],
    name: str | None = None,
) -> PromptSet:
    """The prompts: texts, token ids or ``Prompt``; a mapping has them by category.

    Raises UserError for none, an empty one, text without a tokenizer, ids outside the vocabulary.
    """
    by_category = prompts if isinstance(prompts, Mapping) else {None: prompts}
    result = []
    for category, some in by_category.items():
        if isinstance(some, str):
            raise UserError("prompts is one text; it must be a list of texts or of token ids")
        result += [_prompt(model, each, category, len(result) + n) for n, each in enumerate(some)]
    if not result:
        raise UserError("there are no prompts; give at least one")
    return PromptSet(name, result, [])


def _prompt(model: hf.Loaded, given: Text, category: str | None, number: int) -> Prompt:
    if isinstance(given, Prompt):
        prompt = given if category is None else given._replace(category=category)
    elif isinstance(given, str):
        if model.tokenizer is None:
            raise UserError("the target has no tokenizer; give the prompts as token ids")
        ids = of_text(model.lm, model.tokenizer.encode(given).ids, "a prompt")
        prompt = Prompt(given, ids, category, number)
    else:
        ids = [int(token) for token in np.asarray(given).reshape(-1)]
        prompt = Prompt(model.spell(ids), ids, category, number)
    size = model.lm.vocab_size
    if not prompt.ids or not all(0 <= token < size for token in prompt.ids):
        raise UserError(
            f"prompt {number + 1} is empty or has an id outside 0..{size - 1}; "
            "give token ids of the target's vocabulary"
        )
    return prompt


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
