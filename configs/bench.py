"""Measures one method, or a grid of methods, against plain decoding of the same model.

    python -m specjax.run --config=configs/bench.py --config.target=DIR \\
        --config.prompts=prompts.txt --config.drafter.name=draft_model \\
        --config.drafter.model=DRAFT_DIR --config.batch_size=8

Writes results.json, trace.jsonl, answers in Spec-Bench's format, plots and report.html. The
speed-up in the table is the median of interleaved passes. The same command resumes a bench that
was killed. Takes a minute on a CPU for a small model.
"""

from ml_collections import ConfigDict

from specjax.run.settings import decoding, drafter


def get_config() -> ConfigDict:
    """The configuration."""
    return decoding("bench", drafter=drafter("prompt_lookup"), repeats=3, trace_tokens=96)
