"""Every drafter that needs no training, on one target: held-out Python code.

    python -m specjax.run --config=configs/training_free.py
    python -m specjax.run --config=configs/training_free.py:assets   # with the shipped target

First builds a datastore and n-gram tables from the corpus's training split (rest, ngram_lm). Cold
drafters use only the text of their own row. Those with "warm" in their name have also learnt from
``config.warm_prompts`` other prompts before measuring, and do not change afterwards. Trees are
small, because two CPU cores pay for every node. Ten minutes after the
training; experiments/training_free has the numbers.
"""

from ml_collections import ConfigDict

from configs import datastore, ngram_tables, quickstart
from specjax.run.settings import drafter

TREE = {"nodes": 16, "accept": "deterministic"}
METHODS = {
    # A single equal token is a match, as in the publications; it is not by default.
    "prompt_lookup": {"gamma": 5, "min_ngram": 1},
    "llma": {"gamma": 5},
    "ngram_lm": {"gamma": 4, "tables": "{workdir}/tables"},
    "ngram_lm sampled": {"gamma": 4, "tables": "{workdir}/tables", "mode": "sample"},
    "jacobi": {"gamma": 4, "accept": "match"},  # seeded: the rule that draws with the same noise
    "lookahead": {"window": 5, "ngram": 3, "candidates": 4, "accept": "deterministic"},
    "token_recycling": {"tree": "4x2x1", "accept": "deterministic"},
    "trie": TREE | {"depth": 6},
    "suffix": TREE | {"depth": 8},
    "sam": {"gamma": 5, "min_match": 1},
    "rest": TREE | {"depth": 6, "datastore": "{workdir}/store"},
    "escalate": {"least": 0.2},
}
WARM = ("token_recycling", "trie", "suffix", "sam")


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is a folder with a trained target, empty: train one."""
    config = quickstart.pair(models)
    config.prepare = ("store", "tables") if models else ("target", "store", "tables")
    if not models:
        del config.stages.draft
    for name, stage in (("store", datastore.get_config()), ("tables", ngram_tables.get_config())):
        stage.target = config.target
        stage.data.dir = quickstart.text_of(models)
        config.stages[name] = stage
    methods = config.grid.methods = ConfigDict()
    for name, keys in METHODS.items():
        for warm in (False, True) if name in WARM else (False,):
            label = f"{name} warm" if warm else name
            own = {"accept": "chain"} | keys | ({"warm": True} if warm else {})
            methods[label] = drafter(name.split()[0], **own)
    nested = methods.escalate.drafters
    for label, name in (("first", "prompt_lookup"), ("second", "ngram_lm")):
        nested[label] = drafter(name, **METHODS[name])
    nested.first.min_ngram = 2
    config.warm_prompts = 16
    config.max_new_tokens = 64
    config.show_trace = False
    # Traces of seventeen methods take longer to compile than the bench takes to run.
    config.trace_prompts = 0
    return config


def only(name: str, models: str = "") -> ConfigDict:
    """The configuration of one method, cold and warm; used by configs/<method>.py."""
    config = get_config(models)
    for label in list(config.grid.methods):
        if label.split()[0] != name:
            del config.grid.methods[label]
    if name not in WARM:
        config.warm_prompts = 0
    needed = {"rest": ("store",), "ngram_lm": ("tables",), "escalate": ("tables",)}.get(name, ())
    config.prepare = tuple(
        stage for stage in config.prepare if stage == "target" or stage in needed
    )
    return config
