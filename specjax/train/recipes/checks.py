"""Checks of a configuration before a model is loaded or a file is written. All raise UserError."""

from __future__ import annotations

from collections.abc import Sequence

from specjax import accept, drafters, sampling
from specjax import config as config_lib
from specjax.checks import one_of
from specjax.config import Config, given
from specjax.data.pairs import DOCSTRINGS
from specjax.errors import UserError
from specjax.train import optimise
from specjax.train.placement import place
from specjax.train.recipes import shapes
from specjax.train.settings import KEYS, DataKeys, Training, TrainKeys

# ``train.length`` of texts that are read as a whole, and of others.
WHOLE, ROW = 512, 128
# Keys of config.data that belong to one source only: key -> source.
_OWNED = {
    "template": "dialogues",
    "temperature": "generated",
    "text_key": "tfds",
    "long_pairs": "pairs",
}
# Keys of config.data that the objective generate does not read.
_NOT_FOR_GENERATE = (
    *("generated", "features", "template", "temperature", "on_policy", "on_policy_prompt"),
    *("packing", "labels"),
)


def complete(config: Config) -> Config:
    """The configuration with every key of its objective, each of the declared type and range.

    Raises UserError for keys of other objectives too.
    """
    own = {name: config[name] for name in config if name not in ("prepare", "stages")}
    objective = config_lib.read(Training, own).objective
    one_of("config.objective", objective, tuple(KEYS))
    known = {name.partition(".")[0] for name in KEYS[objective]}
    for name, value in own.items():
        if name not in known and (given(value) if hasattr(value, "items") else value):
            raise UserError(f"config.{name} is not a key of objective {objective}; leave it out")
    config = config_lib.group(Training, KEYS[objective], **own)
    if "train" in config and config.train.get("length") == 0:
        whole = objective != "features" and (config.data.dialogues or config.data.generated)
        # Of a pair the source is never without its output, and rows are padded to the longest.
        whole = whole and not ("model" in config and shapes.has_encoder(config.model))
        config.train.length = WHOLE if whole else ROW
    return config


def check_target(config: Config, right: str) -> None:
    """Raises UserError if there is no target; ``right`` is what to give."""
    if not config.target:
        raise UserError(f"config.target is empty; give {right}")


def loop_keys(config: Config) -> TrainKeys:
    """The schedule and the settings of ``config.train``, on ``config.mesh``."""
    more = {"seed": config.seed, "mesh": config.mesh, "examine_every": config.examine.every}
    return config_lib.read(TrainKeys, config.train, **more)


def check(config: Config) -> None:
    """Checks the values of a complete configuration for its objective."""
    if config.objective not in ("distill", "generate") and config.data.get("on_policy"):
        raise UserError("config.data.on_policy is for objective distill only; leave it 0")
    _OF_OBJECTIVE.get(config.objective, check_training)(config)


def check_training(config: Config) -> None:
    """Checks the values for the objectives pretrain, distill and heads."""
    for temperature in config.examine.temperatures if config.examine.prompts else ():
        sampling.make_sampling(1, temperature)
    mesh = config.mesh
    parts = config.train.accumulate * place(mesh).parts
    if config.train.batch_size % parts:
        raise UserError(
            f"config.train.batch_size is {config.train.batch_size}; it must be a multiple of "
            f"accumulate * {'data * fsdp of config.mesh' if mesh else 'devices'} = {parts}"
        )
    if config.data.features and (config.objective != "heads" or config.joint):
        raise UserError(
            "config.data.features are those of a fixed target, which only objective heads reads, "
            "without config.joint; leave it out"
        )
    keys = config.optimiser
    if not config.get("joint") and (keys.target_rate != 1 or keys.target_from):
        raise UserError(optimise.FOR_JOINT)
    if config.objective == "pretrain":
        _check_pretrain(config)
    if config.objective != "heads" and shapes.has_encoder(config.model):
        _check_with_encoder(config)
    optimise.optimiser(**config.optimiser, steps=config.train.steps)  # raises for its values
    text_kind(config.data)  # raises for keys of two sources


def _check_features(config: Config) -> None:
    """Checks the values for the objective features."""
    if text_kind(config.data) == "features":
        raise UserError("config.data.features is what this objective writes; leave it out")


def check_on_policy_prompt(config: Config) -> None:
    """Checks how much of a row stays before a decoder writes; an encoder's source stays whole."""
    prompt, length = config.data.on_policy_prompt, config.train.length
    if not 0 < prompt < length:
        raise UserError(
            f"config.data.on_policy_prompt is {prompt}; "
            f"it must be at least 1 and below config.train.length {length}"
        )


def _check_pretrain(config: Config) -> None:
    if config.target and config.tokenizer:
        raise UserError(
            "config.tokenizer and config.target are both given; "
            "a draft model has its target's tokenizer, leave config.tokenizer out"
        )
    if config.examine.prompts and not config.target and not given(config.drafter):
        raise UserError(
            "config.examine.prompts needs a target to draft for; give config.target, or leave it 0"
        )
    shapes.check(config.model)
    shapes.check_positions(config)


def _check_with_encoder(config: Config) -> None:
    """Keys of training that decoders alone have."""
    if given(config.drafter):
        raise UserError("config.drafter trains decoders; with config.model.family=t5 leave it out")
    if config.objective == "pretrain" and config.loss:
        raise UserError(
            f"config.loss.{next(iter(config.loss))} is for decoders that exit at every layer; with "
            "config.model.family=t5 leave it out"
        )


def text_kind(data: Config) -> str:
    """The source that ``config.data`` names ("files" for the embedded corpus too).

    Raises UserError for two sources, and for keys that this source does not read.
    """
    named = [name for name in DataKeys.KINDS if data[name]]
    if len(named) > 1:
        raise UserError(f"config.data names {' and '.join(named)}; give one of them")
    kind = named[0] if named else "files"
    for key, owner in _OWNED.items():
        if kind != owner and _is_set(data, key):
            raise UserError(
                f"config.data.{key} belongs to config.data.{owner}, which is not given; "
                "leave it out"
            )
    # The embedded corpus is also the source of docstrings.
    built = data.dir and data.pairs != DOCSTRINGS
    if kind not in ("files", "tfds") and (data.packing != "crops" or built):
        rows = {"features": "stored rows", "pairs": "rows of their own"}
        what = rows.get(kind, "packed documents")
        raise UserError(
            f"config.data.{'dir' if built else 'packing'} belongs to plain text, "
            f"and {kind} are {what}; leave it out"
        )
    if kind not in ("dialogues", "generated") and data.labels != "output":
        raise UserError("config.data.labels belongs to dialogues and generated text; leave it out")
    return kind


def _check_generate(config: Config) -> None:
    """Checks the values for the objective generate."""
    check_target(config, "the model directory of the target")
    sizes = config.generation
    sources = "which takes prompts from files, tfds, pairs or the embedded corpus"
    refuse_for_generate(config, _NOT_FOR_GENERATE, f", {sources}")
    text_kind(config.data)
    for key in ("files", "tfds", "pairs", "dialogues"):
        if sizes.prompts and config.data[key]:
            raise UserError(
                f"config.generation.prompts has questions, and config.data.{key} other prompts; "
                "give one of them"
            )
    if not sizes.temperatures:
        raise UserError("config.generation.temperatures is empty; give one number or more")
    for temperature in sizes.temperatures:
        sampling.make_sampling(1, temperature, sizes.top_k, sizes.top_p)
    keys = given(config.drafter)
    if "name" not in keys:
        raise UserError("config.drafter.name is empty; name a drafter, such as prompt_lookup")
    drafters.check(**keys)
    # An empty name is the recommended rule, which is L1.
    rule = accept.load(config.accept or "chain")
    if rule.lossless_class != "L1":
        raise UserError(
            f"config.accept={rule.name} has lossless class {rule.lossless_class}: the law of the "
            "text would not be the target's; choose an L1 rule"
        )


def refuse_for_generate(config: Config, names: Sequence[str], why: str) -> None:
    """Raises UserError if one of these keys of config.data is set."""
    for name in names:
        if _is_set(config.data, name):
            raise UserError(
                f"config.data.{name} is not a key of objective generate{why}; leave it out"
            )


def _is_set(data: Config, name: str) -> bool:
    """Whether a key of config.data has another value than the declared default."""
    return data[name] != getattr(DataKeys, name)


def _check_lookup_data(config: Config) -> None:
    """Checks the values for the objectives datastore and ngram."""
    check_target(config, "the model directory whose tokenizer is to be used")


# Objective -> its check, of those that write data.
_OF_OBJECTIVE = {
    "generate": _check_generate,
    "features": _check_features,
    "datastore": _check_lookup_data,
    "ngram": _check_lookup_data,
}
