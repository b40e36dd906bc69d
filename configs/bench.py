"""Measure one method, or a grid of them, against plain decoding of the same model.

    python -m specjax.run --config=configs/bench.py --config.target=DIR --config.prompts=prompts.txt \\
        --config.drafter.name=draft_model --config.drafter.model=DRAFT_DIR --config.batch_size=8

Writes results.json, trace.jsonl, answers in Spec-Bench's format, plots and report.html; the table's speed-up is the median of
interleaved passes. A bench that was killed goes on with the same command. A minute on a CPU for a small model.
"""

from ml_collections import ConfigDict

from configs import generate


def get_config() -> ConfigDict:
    """The configuration."""
    config = generate.get_config()
    config.mode = "bench"
    config.repeats = 3
    config.ignore_eos = False
    config.warm_prompts = (
        0  # further prompts, decoded and learnt from before measuring by drafters with warm=True
    )
    config.show_trace = False  # print one continuation, coloured by who wrote each token
    config.trace_prompts = (
        1  # the first so many prompts are traced for the report, with every method and temperature
    )
    config.report = True  # report.html and plots/
    config.grid = ConfigDict()  # what is set here replaces the single value
    # Label -> drafter keys, instead of config.drafter. A method may bring its own rule: accept, and accept_keys for it.
    config.grid.methods = ConfigDict()
    config.grid.temperatures = ()  # instead of config.sampling.temperature
    config.grid.batch_sizes = ()  # instead of config.batch_size
    config.grid.prompts = ()  # instead of config.prompts
    config.grid.contexts = ()  # prompts cut to their first so many tokens; shorter ones are left out
    config.grid.gammas = ()  # every method that takes gamma, once for each
    config.grid.models = ()  # every method that takes a model, once for each: directories of draft models
    return config
