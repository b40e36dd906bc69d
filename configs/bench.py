"""Measures one method, or a grid of methods, against plain decoding of the same model.

    python -m specjax.run --config=configs/bench.py --config.target=DIR \\
        --config.prompts=prompts.txt --config.drafter.name=draft_model \\
        --config.drafter.model=DRAFT_DIR --config.batch_size=8

Writes results.json, trace.jsonl, answers in Spec-Bench's format, plots and report.html. The
speed-up in the table is the median of interleaved passes. The same command resumes a bench that
was killed. Takes a minute on a CPU for a small model.
"""

from ml_collections import ConfigDict, config_dict

from configs import generate


def get_config() -> ConfigDict:
    """The configuration."""
    config = generate.get_config()
    del config.beams
    config.mode = "bench"
    config.drafter = generate.drafter("prompt_lookup")
    config.repeats = 3
    config.ignore_eos = False
    # Further prompts that drafters with warm=True learn from before they are measured.
    config.warm_prompts = 0
    config.show_trace = False  # print one continuation, coloured by the origin of each token
    # Number of prompts traced for the report, with every method and temperature; None: one with a
    # report, none without.
    config.trace_prompts = config_dict.placeholder(int)
    # New tokens of a traced continuation; at least config.max_new_tokens.
    config.trace_tokens = 96
    config.report = True  # report.html and plots/; without it no overlap is computed either
    config.again = False  # measure again although the same bench is finished
    # Files that specjax.bench.proofs.write made of reports of testing.check_drafter and
    # check_accept: a drafter or a rule of one's own is then "L1 proven" in the tables.
    config.proof = ()
    config.grid = ConfigDict()  # values set here replace the single value
    # Label -> drafter keys, instead of config.drafter. A method may have its own accept and
    # accept_keys. --methods=suffix,prompt_lookup makes it.
    config.grid.methods = ConfigDict()
    config.grid.temperatures = ()  # instead of config.sampling.temperature
    config.grid.batch_sizes = ()  # instead of config.batch_size
    config.grid.prompts = ()  # instead of config.prompts
    # Lengths in tokens: prompts are cut to their first tokens; shorter prompts are left out.
    config.grid.contexts = ()
    config.grid.gammas = ()  # every method that takes gamma is measured once with each
    # Directories of draft models: every method that takes a model is measured once with each.
    config.grid.models = ()
    return config
