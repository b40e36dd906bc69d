"""Measures methods and checks their outputs.

``trace`` returns one continuation with the origin of each token. ``specjax.run.measure`` is a bench
of objects in Python, with results.json and the report.

What is run
    methods          methods by their keys, and a caller's own target, methods and prompts
    passes           jobs, and decoding all prompts of a job once, timed
    measuring        passes of all methods and of plain decoding, interleaved
    timing           the cost of a one-token pass, a draft, and the pass that verifies it

What is computed
    metrics          tokens per round, acceptance rates, outputs that loop, random prompts
    overlap          the acceptance rate by its definition, also by class of token
    lossless         target and draft probabilities at every token of a text, and checks of
                     the outputs against plain decoding and the output law
    token_traces     one continuation, round by round, also for objects in Python
    uncertainty      standard errors and intervals over prompts, and tau along the text
    proofs           whether a lossless class is proven or declared
    provenance       the target's weights, the commit of specjax

What is written
    summaries        rows of results.json from measured passes
    results          results.json and the other files of a workdir
    answers          answer files in the format of Spec-Bench

Replay of recorded conversations, without a model
    replay           counts of any drafter on a recording
"""

from specjax.bench.measuring import Measured, measure, warm
from specjax.bench.passes import Job, Method, Pass, batches, begin, run_pass, teach
from specjax.bench.token_traces import trace

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
