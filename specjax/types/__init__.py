"""The types of specjax: every array that crosses a module boundary, with its shape.

Shape legend
    B  rows of the batch            T  tokens of one block fed to a model
    V  vocabulary                   N  candidate nodes of a draft (a chain has N = gamma)
    E  hidden width                 M  longest accepted path (a chain has M = N)
    S  slots of a buffer            R  rounds

Invariants (every file may rely on them; tests/test_decode.py and tests/test_step.py check them)
    1. ``cache.length == length - 1``: the newest committed token is *pending*, not yet cached.
       Row 0 of the target's probs belongs to it.
    2. ``LM.apply`` reads the cache and changes nothing. ``LM.commit`` writes the accepted tokens,
       and only these.
    3. Every row advances by its own count.
    4. A draft token is drawn from exactly the distribution stored in ``Draft.probs`` (zeros when
       every row is greedy: rules then compare ids only).
    5. Randomness comes from ``RowKeys``: one key per row, folded with the round (or position) and
       the purpose.
    6. Probabilities and acceptance are float32 (float64 when given float64), independent of the
       model's dtype.
    7. End-of-sequence and length limits cut after the verdict and never change it. A finished row
       is frozen.
"""

from __future__ import annotations

from specjax.types.draft import (
    CHAIN,
    CLASSES,
    DETERMINISTIC,
    IID,
    INDEPENDENT,
    SIBLINGS,
    WITHOUT_REPLACEMENT,
    Accept,
    Draft,
    Verdict,
)
from specjax.types.drafter import Context, Drafter, Lasting, Rest, Training
from specjax.types.model import (
    LM,
    Array,
    Cache,
    Encoder,
    LowerLayers,
    ModelParams,
    Output,
    Params,
    Sublayers,
)
from specjax.types.state import DecodeState, Records, StepInfo
from specjax.types.text import Batch, Features

__all__ = [
    "CHAIN",
    "CLASSES",
    "DETERMINISTIC",
    "IID",
    "INDEPENDENT",
    "LM",
    "SIBLINGS",
    "WITHOUT_REPLACEMENT",
    "Accept",
    "Array",
    "Batch",
    "Cache",
    "Context",
    "DecodeState",
    "Draft",
    "Drafter",
    "Encoder",
    "Features",
    "Lasting",
    "LowerLayers",
    "ModelParams",
    "Output",
    "Params",
    "Records",
    "Rest",
    "StepInfo",
    "Sublayers",
    "Training",
    "Verdict",
]
