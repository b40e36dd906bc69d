"""Decodes prompts and prints the text: plainly, or with any drafter.

    python -m specjax.run --config=configs/generate.py --config.target=DIR \\
        --config.prompt="Once upon a time"
    python -m specjax.run --config=configs/generate.py --config.target=DIR \\
        --config.prompts=prompts.jsonl --config.drafter.name=draft_model \\
        --config.drafter.model=DRAFT_DIR --config.sampling.temperature=0.8

A single prompt on a terminal is streamed. Takes seconds on a CPU for a small model, most of them
for compilation.
"""

from ml_collections import ConfigDict, config_dict

from specjax import drafters


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "generate"
    # A Hugging Face style directory, a name of the Hub, a .gguf file, or a trained run's workdir.
    config.target = ""
    # Of the target: float32, bfloat16, float16; empty: float32 on CPUs, else bfloat16.
    config.dtype = ""
    # The name of a drafter, or of a function of your own: my_module:make.
    # "none" is plain decoding.
    config.drafter = drafter("none")
    # A rule that fits the drafter, or a function of your own: my_module:make. Empty: chain for
    # chains, deterministic for deterministic trees, recursive for sampled ones.
    config.accept = ""
    config.accept_keys = accept_keys()
    config.sampling = sampling(0.0)
    config.prompt = ""  # one text
    # Or a file: .txt (one prompt per line), .jsonl with a "prompt" key, Spec-Bench, MT-bench,
    # HumanEval, GSM8K or MBPP as published (.gz and .xz too); or "stdlib".
    config.prompts = ""
    # Kind of the file, if its first line does not show it: see specjax/data/prompt_files.py.
    config.prompt_kind = "auto"
    # Chat template for prompts of files that are no texts to be continued: "auto", the model's own
    # if it has one; "own", the model's; others: see specjax/data/chat.py; empty: none.
    config.chat = "auto"
    # Longer prompts keep this many tokens: the beginning-of-text token, if the tokenizer has one,
    # and the last ones (of an encoder-decoder model the first ones of the source); 0 = no limit.
    config.max_prompt_tokens = 0
    # Largest number of prompts, evenly from the categories of a file; a conversation counts once,
    # and each of its turns is decoded. 0 = all, of "stdlib" 32.
    config.num_prompts = 0
    config.prompt_tokens = 64  # "stdlib": the length of each, with its beginning-of-text token
    # "stdlib": where the corpus was built; empty: the data folder of the target's run.
    config.data_dir = ""
    config.max_new_tokens = 128
    config.record = ""  # a .jsonl file to write the outputs to, for configs/replay.py
    config.ignore_eos = False
    # Texts that end an output, such as "('\\n\\n',)": it ends before the first of them. What was
    # decoded after it is dropped, but counted in tau and in tokens per second.
    config.stop = ()
    # Beam search: with config.drafter.name=none plain, with draft_model speculative.
    config.beams = beams()
    config.batch_size = 1
    # How many tokens a round verifies: "auto", the smallest of a few widths that covers the longest
    # draft of its rows; "full", always the whole draft; or widths such as "1,5,11". In a batch the
    # width depends on all rows, so the last bits of a row's logits may depend on the others.
    config.verify_widths = "auto"
    # Devices, such as "data:4,tensor:2": rows are divided among 4 parts, and matrices and caches
    # among 2 devices each; "data:-1" takes all devices for rows. Empty: one device.
    config.mesh = ""
    config.seed = 0
    return config


def drafter(name: str) -> ConfigDict:
    """The keys of all drafters; None: the default in the drafter's file in specjax/drafters."""
    keys = ConfigDict({"name": name})
    for key, kind in drafters.keys().items():
        keys[key] = config_dict.placeholder(kind)
    # escalate: label -> keys of a drafter; they are asked in alphabetical order of the labels.
    keys.drafters = ConfigDict()
    # bench: learn from config.warm_prompts first. True lets text pass from one prompt to another.
    keys.warm = config_dict.placeholder(bool)
    return keys


def accept_keys() -> ConfigDict:
    """The keys of ``config.accept``; None means the rule's default. Only lossy rules have keys."""
    keys = ConfigDict()
    # lenient: factor on the draft probability, in (0, 1]
    keys.lenience = config_dict.placeholder(float)
    # lenient: the same as an upper bound of the uniform number, in (0, 1]
    keys.upper = config_dict.placeholder(float)
    # typical: a token with a higher probability is always accepted; below delta
    keys.epsilon = config_dict.placeholder(float)
    # typical: factor on exp(-entropy)
    keys.delta = config_dict.placeholder(float)
    # tolerance: accept one of this many best tokens
    keys.top = config_dict.placeholder(int)
    # tolerance: and at most this many nats below the best one; with top above 1
    keys.gap = config_dict.placeholder(float)
    # tolerance: or an id at most this far from the best one's
    keys.distance = config_dict.placeholder(int)
    # tolerance: always accept this many tokens
    keys.least = config_dict.placeholder(int)
    # rollback: the largest loss of a token that is kept, in nats; 0: greedy decoding
    keys.threshold = config_dict.placeholder(float)
    return keys


def beams() -> ConfigDict:
    """Beam search; temperature 0, and no acceptance rule."""
    keys = ConfigDict()
    keys.count = 0  # beams; 0: no beam search
    keys.returned = 1  # hypotheses that are printed, the best ones
    # A hypothesis of n tokens is divided by n to this power: above 0 favours long ones.
    keys.length_penalty = 1.0
    # "false": a text ends when its best beam, if it ended now, would be worse than all finished
    # ones; "never": if it ended at the best length; "true": with as many finished ones as beams.
    keys.early_stopping = "false"
    keys.draft = 0  # beams of the draft model; 0: as many
    return keys


def sampling(temperature: float) -> ConfigDict:
    """Sampling settings."""
    keys = ConfigDict({"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    # Of prompt and output: positive logits are divided by it, negative ones multiplied; 1 = off.
    keys.repetition_penalty = 1.0
    keys.presence_penalty = 0.0  # subtracted once from the logits of tokens of the output
    keys.frequency_penalty = 0.0  # subtracted for each occurrence in the output
    keys.min_new_tokens = 0  # end-of-sequence tokens wait for so many new tokens
    keys.banned = ()  # ids of tokens that are never emitted
    keys.logit_bias = ""  # "12:-1.5,30:2": ids, and what is added to their logits
    return keys
