"""A small Llama (7.7 million parameters) for Python code: the target of the quickstart.

    python -m specjax.run --config=configs/pretrain.py --workdir=runs/target

Two minutes on two CPU cores, including corpus and tokenizer: 154,000 tokens, a fraction of the
corpus. Held-out loss 4.49 nats per token, 2.06 bits per byte (Python 3.11.7; other interpreters
have another library). The same command resumes a killed run. Other text:
--config.data.files=book.txt,more.jsonl.

    python -m specjax.run --config=configs/pretrain.py:large --workdir=runs/large

A better target of 10.2 million parameters: four million tokens in 57 minutes on one core (AMD EPYC,
other work on the other core, jax 0.10.2, 2026-11-25), 1.205 held-out bits per byte. Its weights are
in assets/target. A checkpoint is written every ten minutes. It has few and wide layers, because on
CPUs a pass over several tokens then costs little more than one.
"""

from ml_collections import ConfigDict, config_dict


def get_config(size: str = "small") -> ConfigDict:
    """The configuration; ``size`` is small or large."""
    config = small()
    return large(config) if size == "large" else config


def large(config: ConfigDict) -> ConfigDict:
    """What differs in the large model."""
    config.model.hidden_size = 640
    config.model.intermediate_size = 1024
    config.model.num_layers = 3
    config.model.num_heads = 10
    config.model.max_positions = 1024
    config.train.steps = 2000
    config.train.length = 256
    config.train.checkpoint_every = 330
    config.train.eval_every = 330
    config.train.eval_batches = 24
    config.optimiser.adam_learning_rate = 0.01
    config.optimiser.weight_decay = 0.1
    return config


def small() -> ConfigDict:
    """The configuration of the quickstart's target."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "pretrain"
    config.seed = 0
    # Devices: "" (rows divided among all), or axes with sizes, such as "data:2,fsdp:4,tensor:2":
    # "data" and "fsdp" divide the rows, "fsdp" and "tensor" the parameters and optimiser state.
    config.mesh = ""
    config.target = ""  # train a draft for this target, with its vocabulary
    # A tokenizer.json, or a model that has one; empty: train one.
    config.tokenizer = ""
    config.init = ""  # a model directory to start from; empty: random parameters
    config.data = data()
    config.model = ConfigDict()
    config.model.family = "llama"
    config.model.vocab_size = 2048
    config.model.hidden_size = 384
    config.model.intermediate_size = 1152
    config.model.num_layers = 4
    config.model.num_heads = 6
    config.model.num_kv_heads = 2
    config.model.max_positions = 512
    config.model.tie_embeddings = True
    config.loss = ConfigDict()
    config.train = train()
    config.train.steps = 150
    config.train.batch_size = 8
    config.train.length = 128
    config.optimiser = optimiser("muon", 0.02)
    config.optimiser.adam_learning_rate = 0.03  # embeddings, head, norms
    config.examine = examine()
    config.examine.prompts = 0  # without config.target there is no target to draft for
    return config


def data() -> ConfigDict:
    """The source of text: at most one of files, tfds, dialogues, pairs, generated and features.

    None of them: the embedded corpus.
    """
    data = ConfigDict()
    # Folder of datasets, built there if needed; empty: <workdir>/data for the embedded corpus.
    data.dir = ""
    data.files = ""  # .txt and .jsonl files, separated by commas
    data.tfds = ""  # name or directory of a TFDS dataset
    data.text_key = "text"  # its feature that holds the text
    # .jsonl files of conversations, separated by commas; the assistant's turns are the labels.
    data.dialogues = ""
    # Chat template: chatml, vicuna, llama2, plain, a .jinja file; empty: the target's own.
    data.template = ""
    # Encoder-decoder models (configs/t5.py): .jsonl files of {"source", "output"}, separated by
    # commas, or "docstrings": functions of the embedded corpus.
    data.pairs = ""
    data.long_pairs = "refuse"  # or "leave_out": pairs of files that are longer than a row
    data.generated = ""  # workdir of configs/self_generate.py: text written by the target
    # Workdir of configs/features.py: stored text and features of the target, for heads.
    data.features = ""
    data.temperature = config_dict.placeholder(float)  # of generated text; None: all of it
    data.labels = "output"  # labels of dialogues and generated text: "output", or "all"
    # Other text: "crops" of one stream, or whole "documents", packed with document masks.
    data.packing = "crops"
    data.on_policy = 0.0  # distill: share of the rows that the draft continues itself
    # Tokens of the text before its continuation; of pairs it is always the source.
    data.on_policy_prompt = 32
    return data


def train() -> ConfigDict:
    """Settings of the training loop."""
    train = ConfigDict()
    train.log_every = 10
    train.eval_every = 0  # 0: every 100 steps, or a twentieth of the steps if that is more
    train.eval_batches = 12  # of the held-out text
    train.checkpoint_every = 100
    train.accumulate = 1  # parts of a batch, processed one after the other
    train.ema = 0.0  # decay of averaged parameters; 0: none
    train.precision = "float32"  # or "bfloat16": precision of the loss; parameters stay float32
    train.remat = False  # recompute layers in the backward pass: less memory, more time
    train.keep = "last"  # or "best": the parameters that are written
    train.best = "heldout_loss"  # the logged value that defines "best"
    train.resume_changed = False  # resume although the configuration has changed
    return train


def optimiser(name: str, learning_rate: float) -> ConfigDict:
    """The keys of specjax/train/optimise.py; None leaves its own default."""
    optimiser = ConfigDict()
    optimiser.name = name  # adamw, muon, sgd, lion
    optimiser.learning_rate = learning_rate
    optimiser.adam_learning_rate = config_dict.placeholder(
        float
    )  # muon: for parameters that are not matrices
    optimiser.schedule = "cosine"  # linear, constant, rsqrt
    optimiser.warmup = 0.05  # share of the steps
    optimiser.final = 0.1  # final share of the learning rate
    optimiser.weight_decay = 0.01
    optimiser.clip = 1.0  # global norm of the gradient; 0: off
    optimiser.clip_value = 0.0  # each entry of it; 0: off
    optimiser.b1 = config_dict.placeholder(float)
    optimiser.b2 = config_dict.placeholder(float)
    optimiser.eps = config_dict.placeholder(float)
    return optimiser


def examine() -> ConfigDict:
    """Tokens per round (tau): forecast from the target's text, and decoded."""
    examine = ConfigDict()
    examine.every = 100  # steps, at least, from one measurement to the next; and after the last
    examine.prompts = 16  # held-out prompts; 0: off
    examine.prompt_tokens = 32
    examine.new_tokens = 64
    examine.temperatures = (0.0, 1.0)
    examine.gamma = 4  # draft models: tokens per round; other drafters have keys for it
    return examine
