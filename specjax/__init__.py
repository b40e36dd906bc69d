"""specjax: speculative decoding in JAX, every method behind one small interface, exact by test."""

from typing import TYPE_CHECKING, Any

from specjax.decode import (
    BeamDraft,
    Beams,
    autoregressive,
    beam_search,
    check,
    generate,
    logprobs,
    outputs,
    pack_prompts,
    prefill,
    speculative_step,
    stream,
)
from specjax.errors import NonFiniteLogits, UserError
from specjax.references import cite
from specjax.rng import RowKeys, row_keys, sample_keys
from specjax.sampling import Sampling, make_sampling, to_probs
from specjax.types import (
    LM,
    Accept,
    Context,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Records,
    StepInfo,
    Verdict,
)

if TYPE_CHECKING:
    from specjax.generation import Model, generate_text, load, stream_text, tune

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Accept",
    "BeamDraft",
    "Beams",
    "Context",
    "DecodeState",
    "Draft",
    "Drafter",
    "Model",
    "ModelParams",
    "NonFiniteLogits",
    "Output",
    "Records",
    "RowKeys",
    "Sampling",
    "StepInfo",
    "UserError",
    "Verdict",
    "autoregressive",
    "beam_search",
    "check",
    "cite",
    "generate",
    "generate_text",
    "load",
    "logprobs",
    "make_sampling",
    "outputs",
    "pack_prompts",
    "prefill",
    "row_keys",
    "sample_keys",
    "speculative_step",
    "stream",
    "stream_text",
    "to_probs",
    "tune",
]


def __dir__() -> list[str]:
    """Also the names that are imported when they are used."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Names of ``generation``: it reads files and makes drafters, so it is imported when used."""
    if name in __all__:
        from specjax import generation

        return getattr(generation, name)
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")
