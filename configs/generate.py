"""Decode prompts with any drafter and print the text.

    python -m specjax.run --config=configs/generate.py --config.target=DIR --config.prompt="Once upon a time"
    python -m specjax.run --config=configs/generate.py --config.target=DIR --config.prompts=prompts.jsonl \\
        --config.drafter.name=draft_model --config.drafter.model=DRAFT_DIR --config.sampling.temperature=0.8

A single prompt on a terminal is streamed. Seconds on a CPU for a small model, most of them compilation.
"""

from ml_collections import ConfigDict, config_dict

from specjax import drafters


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "generate"
    config.target = ""  # a Hugging Face style directory, or a trained run's workdir
    config.drafter = drafter("prompt_lookup")
    config.accept = "chain"  # a rule that fits the drafter; for trees "recursive", "traversal", "deterministic", "match"
    config.accept_keys = accept_keys()
    config.sampling = sampling(0.0)
    config.prompt = ""  # one text
    # Or a file: .txt (a prompt per line), .jsonl with a "prompt" key, Spec-Bench, MT-bench, HumanEval, GSM8K or MBPP as
    # published (.gz too); or "stdlib".
    config.prompts = ""
    config.prompt_kind = (
        "auto"  # of the file, where its first line does not tell: see specjax/prompt_sets.py
    )
    config.chat = ""  # the chat template for conversations: "own" is the model's, or a name that specjax/train/chat.py knows
    config.max_prompt_tokens = 0  # longer prompts keep their last so many tokens; 0 = no limit
    config.num_prompts = 0  # at most so many of them; 0 = all, of "stdlib" 32
    config.prompt_tokens = 64  # "stdlib": the length of each
    config.data_dir = (
        ""  # "stdlib": where the corpus was built; empty: the data folder of the target's run
    )
    config.max_new_tokens = 128
    config.record = ""  # a .jsonl file to keep the outputs in, for configs/replay.py
    config.ignore_eos = False
    config.batch_size = 1
    config.seed = 0
    return config


def drafter(name: str) -> ConfigDict:
    """The keys of all drafters; None leaves a drafter's own default. What they mean stands where a drafter is made:
    specjax/drafters/<name>.py."""
    keys = ConfigDict({"name": name})
    for key, kind in drafters.keys().items():
        keys[key] = config_dict.placeholder(kind)
    keys.drafters = (
        ConfigDict()
    )  # escalate: label -> keys of a drafter, asked in alphabetical order of the labels
    keys.warm = config_dict.placeholder(
        bool
    )  # bench: learn from config.warm_prompts first; True lets text pass between rows
    return keys


def accept_keys() -> ConfigDict:
    """The keys of ``config.accept``; None leaves the rule's own default. Only the lossy rules have any."""
    keys = ConfigDict()
    keys.lenience = config_dict.placeholder(float)  # lenient: factor on the draft's law, in (0, 1]
    keys.upper = config_dict.placeholder(
        float
    )  # lenient: the same as a bound on the uniform number, in (0, 1]
    keys.epsilon = config_dict.placeholder(float)  # typical: a probability above it always stands
    keys.delta = config_dict.placeholder(float)  # typical: factor on exp(-entropy)
    keys.top = config_dict.placeholder(int)  # tolerance: a token of the best so many stands
    keys.gap = config_dict.placeholder(
        float
    )  # tolerance: and at most so many nats below the best one
    keys.distance = config_dict.placeholder(
        int
    )  # tolerance: or an id at most so far from the best one's
    keys.least = config_dict.placeholder(int)  # tolerance: so many tokens stand in any case
    return keys


def sampling(temperature: float) -> ConfigDict:
    """Sampling settings."""
    return ConfigDict({"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
