"""Measures methods and checks their outputs.

``trace`` returns one continuation with the origin of each token. ``specjax.run.measure`` is a bench
of objects in Python, with results.json and the report.

What is run
    methods          what defines a method, and how it is built
    objects          a caller's own target, methods and prompts
    passes           jobs, and decoding all prompts of a job once, timed
    measuring        passes of all methods and of plain decoding, interleaved
    timing           the cost of a one-token pass, a draft, and the pass that verifies it
    progress         passes on disk, so that a killed bench can continue

What is computed
    metrics          tokens per round and acceptance rates
    token_probs      target and draft probabilities at every token of a text
    overlap          the acceptance rate by its definition
    text_checks      outputs that loop, prompts of random tokens
    lossless         checks of the outputs against plain decoding and the output law
    token_classes    kinds of words, to split the overlap by
    token_traces     one continuation, round by round
    tracing          the same for objects in Python
    uncertainty      standard errors and confidence intervals over prompts
    proofs           whether a lossless class is proven or declared
    provenance       the target's weights, the commit of specjax

What is written
    summaries        rows of results.json from measured passes
    results          results.json and the other files of a workdir
    answers          answer files in the format of Spec-Bench

Replay of recorded conversations, without a model
    recorded_target  a recorded text as a target
    replay           counts of any drafter on a recording
"""

from specjax.bench.measuring import Measured, measure, warm
from specjax.bench.passes import Job, Method, Pass, batches, begin, run_pass, teach
from specjax.bench.tracing import trace

__all__ = [
    "Job",
    "Measured",
    "Method",
    "Pass",
    "batches",
    "begin",
    "measure",
    "run_pass",
    "teach",
    "trace",
    "warm",
]
