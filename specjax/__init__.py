"""specjax: speculative decoding in JAX, every method behind one small interface, exact by test."""

from specjax import _moved
from specjax.decode import (
    autoregressive,
    check,
    generate,
    outputs,
    pack_prompts,
    prefill,
    speculative_step,
    stream,
)
from specjax.errors import NonFiniteLogits, UserError
from specjax.references import cite
from specjax.rng import RowKeys, row_keys
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

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Accept",
    "Context",
    "DecodeState",
    "Draft",
    "Drafter",
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
    "check",
    "cite",
    "generate",
    "make_sampling",
    "outputs",
    "pack_prompts",
    "prefill",
    "row_keys",
    "speculative_step",
    "stream",
    "to_probs",
]


def __getattr__(name: str):
    """Modules under their old names."""
    return _moved.module(name)
