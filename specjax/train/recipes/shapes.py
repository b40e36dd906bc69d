"""The shape of a new model: ``config.model``, of a decoder or of an encoder-decoder model."""

from __future__ import annotations

from specjax import checks
from specjax import config as config_lib
from specjax.config import Config
from specjax.data.pairs import OutputEnds
from specjax.errors import UserError
from specjax.models import families, hf, t5_config
from specjax.models.hf_config import config_to_hf, translated
from specjax.models.transformer_config import TransformerConfig
from specjax.train.settings import T5_KEYS, ModelKeys

T5 = "t5"


def has_encoder(model: Config) -> bool:
    """Whether ``config.model`` is an encoder-decoder model."""
    return model.family == T5


def check(model: Config) -> None:
    """Checks that ``config.model`` is a model of its family. Raises UserError."""
    checks.one_of("config.model.family", model.family, (*families.FAMILIES, T5))
    config_lib.read(ModelKeys, model)
    if has_encoder(model):
        _check_t5(model)
        return
    # Rotary positions rotate pairs of dimensions: the width of a head must be even.
    for whole, part, unit in (("hidden_size", "num_heads", 2), ("num_heads", "num_kv_heads", 1)):
        if model[whole] % (model[part] * unit):
            raise UserError(
                f"config.model.{whole} {model[whole]} is no {'even ' * (unit - 1)}multiple of "
                f"{part} {model[part]}; change one of them"
            )
    sizes = {"vocab_size": 1, "head_dim": model.hidden_size // model.num_heads}
    # A model that its family cannot store would be refused at the end of the training.
    shape = translated("config.model", model.to_dict() | sizes, lambda own: families.shape(**own))
    translated("config.model", shape, config_to_hf)


def _check_t5(model: Config) -> None:
    for key in model:
        if key not in T5_KEYS:
            raise UserError(
                f"config.model.{key} is not a key of family {T5}; start from configs/t5.py or "
                "configs/t5_distill.py, which have its keys"
            )
    if missing := [key for key in T5_KEYS if key not in model]:
        raise UserError(f"config.model.{missing[0]} is missing; start from configs/t5.py")
    translated("config.model", model, lambda own: _t5(own, 1, OutputEnds(0, 0)))


def check_positions(config: Config) -> None:
    """Checks that ``config.model`` can read the length of the training text. Raises UserError."""
    if not has_encoder(config.model) and config.train.length > config.model.max_positions:
        raise UserError(
            f"config.train.length {config.train.length} is beyond config.model.max_positions "
            f"{config.model.max_positions}"
        )


def check_kind(config: Config, target: hf.Loaded) -> None:
    """Raises UserError for a decoder that is to draft for an encoder-decoder model, and reverse."""
    theirs = target.lm.encoder is not None
    if theirs != has_encoder(config.model):
        kind = "an encoder-decoder model" if theirs else "a decoder"
        raise UserError(
            f"{target.directory} is {kind}, and config.model.family is {config.model.family}; a "
            f"draft model is {kind} too, "
            + ("as in configs/t5_distill.py" if theirs else "such as family llama")
        )


def new(
    model: Config, vocab_size: int, bos: int | None, eos: tuple[int, ...], ends: OutputEnds | None
) -> TransformerConfig:
    """The model of ``config.model`` with this vocabulary; ``ends`` are of an encoder-decoder."""
    if has_encoder(model):
        assert ends is not None
        return _t5(model, vocab_size, ends, eos)
    fields = {**model.to_dict(), "vocab_size": vocab_size}
    width = model.hidden_size // model.num_heads
    return families.shape(**fields, head_dim=width, bos_token_id=bos, eos_token_id=eos)


def ends_of(target: hf.Loaded) -> OutputEnds | None:
    """The tokens around the outputs of an encoder-decoder model; None for a decoder."""
    if target.lm.encoder is None:
        return None
    return OutputEnds(target.lm.encoder.start, next(iter(target.config.eos_token_id), None))


def _t5(
    model: Config, vocab_size: int, ends: OutputEnds, eos: tuple[int, ...] = ()
) -> t5_config.T5Config:
    fields = {**model.to_dict(), "vocab_size": vocab_size}
    return t5_config.t5(
        **fields,
        activation="gelu_tanh" if model.gated else "relu",
        # Tied embeddings and divided hidden states: T5 1.0. A head of its own: T5 1.1.
        scale_logits=model.tie_embeddings,
        start_token_id=ends.start,
        pad_token_id=ends.start,
        eos_token_id=eos or (() if ends.end is None else (ends.end,)),
    )
