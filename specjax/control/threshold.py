"""Stops a draft where the draft model is unsure: its highest probability is below a threshold.

The idea of the confidence threshold of assisted generation (transformers' dynamic speculation) and
of SVIP and AdaEDL, asked before the token is drawn, so that the output law does not change. The
probability is the draft's own, without the row's temperature and cut-offs: it has the same meaning
at every temperature, and is not 1 under greedy decoding.

A tree stops as a whole: when the highest probability is below the threshold at all places of a
level, so at the best of them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import number
from specjax.control._types import Ahead, Controller

REFERENCE = """\
@inproceedings{mamou2024dynamic,
  title = {{Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language
            Models}},
  author = {Mamou, Jonathan and Pereg, Oren and Korat, Daniel and Berchansky, Moshe and
            Timor, Nadav and Wasserblat, Moshe and Schwartz, Roy},
  booktitle = {NeurIPS Efficient Natural Language and Speech Processing Workshop},
  year = {2024},
  eprint = {2405.04304},
  archiveprefix = {arXiv},
}

@inproceedings{zhang2025draft,
  title = {{Draft Model Knows When to Stop: Self-Verification Speculative Decoding for Long-Form
            Generation}},
  author = {Zhang, Ziyin and Xu, Jiahao and Liang, Tian and Chen, Xingyu and He, Zhiwei and
            Wang, Rui and Tu, Zhaopeng},
  booktitle = {Empirical Methods in Natural Language Processing},
  year = {2025},
  eprint = {2411.18462},
  archiveprefix = {arXiv},
}

@inproceedings{agrawal2024adaedl,
  title = {{AdaEDL: Early Draft Stopping for Speculative Decoding of Large Language Models via an
            Entropy-based Lower Bound on Token Acceptance Probability}},
  author = {Agrawal, Sudhanshu and Jeon, Wonseok and Lee, Mingu},
  booktitle = {NeurIPS Efficient Natural Language and Speech Processing Workshop},
  year = {2024},
  eprint = {2410.18351},
  archiveprefix = {arXiv},
}"""


def make(*, least: float) -> Controller:
    """Continues while the highest probability of the draft is at least ``least``, in [0, 1].

    Raises:
        UserError: ``least`` out of range.
    """
    number("the threshold", least, "between 0 and 1", lambda x: 0 <= x <= 1)
    return Controller(functools.partial(_ask, least), f"threshold:{least:g}")


def _ask(least: float, state: Any, ahead: Ahead) -> tuple[jax.Array, Any]:
    logits = ahead.logits.astype(jnp.promote_types(ahead.logits.dtype, jnp.float32))
    # The highest probability is 1 / sum(exp(logits - highest logit)).
    total = jnp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
    sure = (least * total <= 1) & ahead.valid
    return sure.any(-1), state
