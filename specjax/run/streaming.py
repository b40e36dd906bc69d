"""Decodes one text round by round, and prints it as it is written."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from rich.text import Text

from specjax import decode
from specjax.bench import metrics, passes
from specjax.generation import stops


def stream(
    job: passes.Job,
    method: passes.Method,
    ids: list[int],
    row: stops.Row,
    console,
    *,
    number: int = 0,
) -> tuple[metrics.Counts, list[int]]:
    """Prints the continuation of a prompt; its counts and its tokens. Raises NonFiniteLogits.

    Args:
        job: its batch size is 1; its longest prompt sizes the buffers.
        method: what decodes.
        ids: the prompt.
        row: the text, made with the prompt; it ends at a stop string.
        console: where the text is printed.
        number: of the prompt among those of the run; chooses its noise.
    """
    state = passes.begin(job, method.drafter, method.params, [number], [ids])
    shown, output, records = 0, [], []
    for _, info in decode.stream(
        job.target,
        method.drafter,
        method.accept,
        method.params,
        state,
        eos_id=job.eos_id,
        verify_widths=job.verify_widths,
    ):
        records.append([np.asarray(x) for x in decode.counts_of(info)])
        new = [int(t) for t in info.tokens[0][: int(info.emitted[0])]]
        output += new
        ended = row.add(new)
        console.print(Text(row.settled[shown:]), end="")
        shown = max(shown, len(row.settled))
        if ended:
            break
    row.add((), last=True)
    console.print(Text(row.cut().text[shown:]))
    stacked = decode.Records(*(jnp.stack(x) for x in zip(*records, strict=True)))
    return metrics.count(stacked, [True], method.drafter.longest), output


def said(cut: stops.Cut, ids: list[int], spell: stops.Decode) -> str:
    """An answer as the next turn of its conversation has it: without a stop string.

    ``ids`` are its tokens, up to the one that completes the stop string.
    """
    return spell(ids) if cut.stop is None else cut.text
