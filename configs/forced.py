"""Text with a grammar: what it forces is drafted by itself.

    python -m specjax.run --config=configs/forced.py
    python -m specjax.run --config=configs/forced.py:lookups --config.target=DIR \\
        --config.prompts=FILE --config.sampling.grammar=schema.json

Decodes with the shipped pair and a regular expression for a method of a Python class: plainly, with
forced tokens, with a draft model (which drafts within the grammar), and with forced tokens where
there are any, else with the draft model. With "lookups", for any target, prompt lookup takes the
place of the draft model. Needs ``pip install 'specjax[grammar]'``.
"""

from ml_collections import ConfigDict

from configs import quickstart
from specjax.errors import UserError
from specjax.run.settings import drafter

GRAMMAR = (
    r"\s*def [a-z_]{1,12}\(self(, [a-z_]{1,8}){0,2}\):\n        return self\.[a-z_]{1,16}"
    r"\([a-z_]{1,8}(, [a-z_]{1,8}){0,2}\)\n"
)


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is "lookups", or empty: the shipped pair."""
    if models not in ("", "lookups"):
        raise UserError(f"configs/forced.py:{models} is unknown; it must be lookups, or left out")
    config = quickstart.get_config()
    config.sampling.grammar = GRAMMAR
    methods = config.grid.methods
    # Asked in the order of the labels.
    pair = methods.escalate = drafter("escalate")
    methods.forced = pair.drafters.first = drafter("forced")
    if models:
        del methods.draft_model
        pair.drafters.second = drafter("prompt_lookup", gamma=8)
    else:
        del methods.prompt_lookup
        own = {"model": methods.draft_model.model, "gamma": 3}
        pair.drafters.second = drafter("draft_model", **own)
    config.keep = False
    return config
