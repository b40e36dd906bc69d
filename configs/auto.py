"""Is speculation worth it on a model, and with which drafter? The answer is kept for "auto".

    python -m specjax.run --config=configs/auto.py --config.target=DIR --config.prompts=FILE
    python -m specjax.run --config=configs/auto.py:DRAFT_DIR --config.target=DIR \\
        --config.prompts=FILE
    python -m specjax.run --config=configs/generate.py --config.target=DIR \\
        --config.drafter.name=auto --config.prompt="Once upon a time"   # takes it

The argument is a draft model, or nothing; where one was given, generate and chat take
``--config.drafter.model=DRAFT_DIR`` too. Measures what rounds cost, then lookups and the draft
model with the controller ``goodput`` against plain decoding, greedy and one row at a time, and ends
with a sentence. Give the batch sizes and temperatures that will be decoded, for example
``--config.grid.temperatures=(0,1) --config.grid.batch_sizes=(1,8)``. ``generate_text`` takes what
is kept too.
"""

from ml_collections import ConfigDict

from specjax.generation import auto
from specjax.run.settings import decoding, drafter


def get_config(draft: str = "") -> ConfigDict:
    """The configuration; ``draft`` is the directory of a draft model, empty: none."""
    config = decoding("bench", keep=True, num_prompts=16, max_new_tokens=64, trace_prompts=0)
    methods = config.grid.methods = ConfigDict()
    for label, keys in auto.candidates(bool(draft)).items():
        methods[label] = drafter(**keys, control=auto.CONTROL)
        if label == "draft_model":
            methods[label].model = draft
    return config
