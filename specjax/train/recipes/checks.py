"""Checks of a configuration before a model is loaded or a file is written. All raise UserError."""

from __future__ import annotations

from specjax import accept, checks, drafters, sampling
from specjax.config import Config, given
from specjax.data.feature_records import DTYPES
from specjax.data.pairs import DOCSTRINGS
from specjax.errors import UserError
from specjax.train.placement import place
from specjax.train.recipes import shapes
from specjax.train.settings import PRECISIONS, Schedule, Settings

# Keys of config.data that name a source of text.
KINDS = ("files", "tfds", "dialogues", "pairs", "generated", "features")
# What is done with pairs of more tokens than a row has.
LONG_PAIRS = ("refuse", "leave_out")
# Keys of config.data that belong to one source only: key -> (source, value that means unset).
_OWNED = {
    "template": ("dialogues", ""),
    "temperature": ("generated", None),
    "text_key": ("tfds", "text"),
    "long_pairs": ("pairs", "refuse"),
}
# Keys of config.data that the objective generate does not read, and their unset values.
_NOT_FOR_GENERATE = {
    "generated": "",
    "features": "",
    "template": "",
    "temperature": None,
    "on_policy": 0.0,
}
# Keys of config.generation, and their least values.
_GENERATION = {
    "num_prompts": 2,
    "prompt_tokens": 1,
    "new_tokens": 1,
    "batch_size": 1,
    "shard_prompts": 1,
}


def schedule(config: Config) -> Schedule:
    """The schedule of ``config.train``."""
    train = config.train
    every = config.examine.get("every", Schedule.examine_every)
    return Schedule(train.steps, train.log_every, train.eval_every, train.checkpoint_every, every)


def settings(config: Config) -> Settings:
    """The settings of ``config.train``, on ``config.mesh``."""
    train = config.train
    return Settings(
        seed=config.seed,
        accumulate=train.accumulate,
        ema=train.ema,
        precision=train.precision,
        keep=train.keep,
        best=train.best,
        resume_changed=train.resume_changed,
        mesh=config.get("mesh", ""),
    )


def check_training(config: Config) -> None:
    """Checks the values for the objectives pretrain, distill and heads."""
    for group, optional in (("train", ("ema", "eval_every")), ("examine", ("prompts",))):
        for name, value in config[group].items():
            if isinstance(value, int) and not isinstance(value, bool):
                checks.whole(f"config.{group}.{name}", value, 0 if name in optional else 1)
    check_seed(config.seed)
    schedule(config)
    settings(config)
    _check_examine(config)
    mesh = config.get("mesh", "")
    parts = config.train.accumulate * place(mesh).parts
    if config.train.batch_size % parts:
        raise UserError(
            f"config.train.batch_size is {config.train.batch_size}; it must be a multiple of "
            f"accumulate * {'data * fsdp of config.mesh' if mesh else 'devices'} = {parts}"
        )
    _check_on_policy(config)
    of_distill = dict.fromkeys(("pruned", "spire", "pard"), "distill")
    for name, objective in {**of_distill, "joint": "heads", "mtp": "pretrain"}.items():
        if config.get(name) and config.objective != objective:
            raise UserError(
                f"config.{name} is not a key of objective {config.objective}; leave it out"
            )
    if config.data.get("features") and (config.objective != "heads" or config.joint):
        raise UserError(
            "config.data.features are those of a fixed target, which only objective heads reads, "
            "without config.joint; leave it out"
        )
    if config.objective == "pretrain":
        _check_pretrain(config)
    if config.get("model") and shapes.has_encoder(config.model):
        _check_with_encoder(config)


def check_features(config: Config) -> None:
    """Checks the values for the objective features."""
    features, train = config.features, config.train
    for name in ("batch_size", "length", "eval_batches"):
        checks.whole(f"config.train.{name}", train[name], 1)
    for name, least in (("rows", 0), ("shard_megabytes", 1)):
        checks.whole(f"config.features.{name}", features[name], least)
    for name, least in (("prompts", 0), ("prompt_tokens", 1)):
        checks.whole(f"config.examine.{name}", config.examine[name], least)
    checks.one_of("config.features.dtype", features.dtype, tuple(DTYPES))
    checks.one_of("config.train.precision", train.precision, PRECISIONS)
    taps = tuple(features.taps)
    if not all(isinstance(tap, int) and not isinstance(tap, bool) for tap in taps):
        raise UserError(f"config.features.taps is {taps}; give layer numbers, such as (1, 5, 8)")
    if len(set(taps)) < len(taps):
        raise UserError(f"config.features.taps is {taps}; give each layer once")
    check_seed(config.seed)
    if text_kind(config.data) == "features":
        raise UserError("config.data.features is what this objective writes; leave it out")
    if config.data.on_policy:
        raise UserError("config.data.on_policy is for objective distill only; leave it 0")


def check_seed(seed: int) -> None:
    """Checks that the seed is in 0..2^32-1."""
    if not 0 <= seed < 2**32:
        raise UserError(f"config.seed is {seed}; it must be in 0..{2**32 - 1}")


def _check_examine(config: Config) -> None:
    examine = config.examine
    if not examine.prompts:
        return
    if not examine.temperatures:
        raise UserError(
            "config.examine.temperatures is empty; "
            "give one or more, or set config.examine.prompts=0"
        )
    for temperature in examine.temperatures:
        _check_temperature("config.examine.temperatures", temperature)
        sampling.make_sampling(1, temperature)


def _check_temperature(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} has {value!r}; give numbers, such as (0.0, 1.0)")


def _check_on_policy(config: Config) -> None:
    share = config.data.on_policy
    if not 0 <= share <= 1:
        raise UserError(
            f"config.data.on_policy is {share}; it must be a share of the rows, in [0, 1]"
        )
    if share and config.objective != "distill":
        raise UserError("config.data.on_policy is for objective distill only; leave it 0")


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
    if config.examine.prompts and not config.target and not config.get("mtp"):
        raise UserError(
            "config.examine.prompts needs a target to draft for; give config.target, or leave it 0"
        )
    shapes.check(config.model)
    shapes.check_positions(config)


def _check_with_encoder(config: Config) -> None:
    """Keys of training that decoders alone have."""
    for key in ("spire", "pard", "mtp"):
        if config.get(key):
            raise UserError(
                f"config.{key} trains decoders; with config.model.family=t5 leave it out"
            )
    if config.objective == "pretrain" and config.loss:
        raise UserError(
            f"config.loss.{next(iter(config.loss))} is for decoders that exit at every layer; with "
            "config.model.family=t5 leave it out"
        )


def text_kind(data: Config) -> str:
    """The source that ``config.data`` names ("files" for the embedded corpus too).

    Raises UserError for two sources, and for keys that this source does not read.
    """
    named = [name for name in KINDS if data.get(name)]
    if len(named) > 1:
        raise UserError(f"config.data names {' and '.join(named)}; give one of them")
    kind = named[0] if named else "files"
    checks.one_of("config.data.packing", data.packing, ("crops", "documents"))
    for key, (owner, unset) in _OWNED.items():
        if data.get(key, unset) != unset and kind != owner:
            raise UserError(
                f"config.data.{key} belongs to config.data.{owner}, which is not given; "
                "leave it out"
            )
    checks.one_of("config.data.labels", data.labels, ("output", "all"))
    checks.one_of("config.data.long_pairs", data.get("long_pairs", "refuse"), LONG_PAIRS)
    # The embedded corpus is also the source of docstrings.
    built = data.dir and data.get("pairs") != DOCSTRINGS
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


def check_generate(config: Config) -> list[float]:
    """Checks the values for the objective generate; returns the temperatures."""
    if not config.target:
        raise UserError("config.target is empty; give the model directory of the target")
    check_seed(config.seed)
    for name, unset in _NOT_FOR_GENERATE.items():
        if config.data.get(name, unset) != unset:
            raise UserError(
                f"config.data.{name} is not a key of objective generate, which takes prompts from "
                "files, tfds, pairs or the embedded corpus; leave it out"
            )
    sizes = config.generation
    for name, least in _GENERATION.items():
        checks.whole(f"config.generation.{name}", sizes[name], least)
    _check_questions(config)
    temperatures = list(sizes.temperatures)
    if not temperatures:
        raise UserError("config.generation.temperatures is empty; give one number or more")
    for temperature in temperatures:
        _check_temperature("config.generation.temperatures", temperature)
    if len(set(temperatures)) < len(temperatures):
        raise UserError(f"config.generation.temperatures is {tuple(temperatures)}; give each once")
    for temperature in temperatures:
        sampling.make_sampling(1, temperature, sizes.top_k, sizes.top_p)
    keys = given(config.drafter)
    if "name" not in keys:
        raise UserError("config.drafter.name is empty; name a drafter, such as prompt_lookup")
    drafters.check(**keys)
    # An empty name is the recommended rule, which is L1.
    rule = accept.load(config.get("accept") or "chain")
    if rule.lossless_class != "L1":
        raise UserError(
            f"config.accept={rule.name} has lossless class {rule.lossless_class}: the law of the "
            "text would not be the target's; choose an L1 rule"
        )
    return [float(temperature) for temperature in temperatures]


def _check_questions(config: Config) -> None:
    """The keys of ``questions.read``."""
    questions, chat = (config.generation.get(key) or "" for key in ("prompts", "chat"))
    if chat and not questions:
        raise UserError(
            f"config.generation.chat is {chat!r}, the template of questions, and there are none; "
            "give config.generation.prompts, or leave chat out"
        )
    for key in ("files", "tfds", "pairs", "dialogues"):
        if questions and config.data.get(key):
            raise UserError(
                f"config.generation.prompts has questions, and config.data.{key} other prompts; "
                "give one of them"
            )


def check_lookup_data(config: Config) -> None:
    """Checks the values for the objectives datastore and ngram."""
    if config.objective == "datastore":
        checks.whole("config.reach", config.reach, 1)
    else:
        for name, least in (("successors", 1), ("contexts", 1), ("from_target", 0)):
            checks.whole(f"config.{name}", config[name], least)
        checks.number("config.smoothing", config.smoothing, "> 0", lambda x: x > 0)
        for name, value in config.generation.items():
            checks.whole(f"config.generation.{name}", value, 1)
    if not config.target:
        raise UserError(
            "config.target is empty; give the model directory whose tokenizer is to be used"
        )
