"""The shape of a SPIRe draft model."""

from __future__ import annotations

import dataclasses

from specjax import checks
from specjax.errors import UserError
from specjax.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class SpireConfig:
    """A decoder of few layers whose attention is sparse and reads a feedback memory.

    A token at position p attends to position s <= p if s < ``sinks`` or p - s < ``window``. The
    paper states none of these numbers, nor how its feedback memory treats the token itself.

    Attributes:
        decoder: the shape of its layers; those of a target in the pruned initialisation.
        sinks: the first positions, which all tokens attend to (StreamingLLM, 2309.17453).
        window: the newest positions, the token's own included.
        feedback: keys and values of earlier tokens are projected from their memory, a mixture of
            the outputs of all layers (2002.09402). False: a plain decoder with sparse attention,
            whose blocks are computed in parallel.
        own: with ``feedback``: a token also attends to itself, with the keys and values of each
            layer's input, as in the target's layers. False: to earlier tokens alone, as in the
            Feedback Transformer; the first token of a text then attends to nothing.
    """

    decoder: TransformerConfig
    sinks: int
    window: int
    feedback: bool = True
    own: bool = True

    @property
    def slots(self) -> int:
        """The most slots of the cache of a row."""
        return self.sinks + self.window


def check(config: SpireConfig, prefix: str = "") -> None:
    """Raises UserError for wrong values; ``prefix`` is put before the names of the keys."""
    checks.whole(f"{prefix}sinks", config.sinks, 0)
    checks.whole(f"{prefix}window", config.window, 1)
    checks.yes_or_no(f"{prefix}feedback", config.feedback)
    checks.yes_or_no(f"{prefix}own", config.own)
    if not config.feedback and not config.own:
        raise UserError(
            f"{prefix}own is False and {prefix}feedback too; own belongs to feedback memory, "
            "leave it True"
        )
    narrow = min((size for size in config.decoder.windows if size is not None), default=None)
    if narrow is not None and config.window > narrow:
        raise UserError(
            f"{prefix}window is {config.window}, and a layer of the target has a sliding window of "
            f"{narrow} positions; give at most {narrow}"
        )
