"""A small Llama (7.7 million parameters) trained on the Python standard library: the target of the quickstart.

    python -m specjax.run --config=configs/pretrain.py --workdir=runs/target

Two minutes on two CPU cores, corpus and tokenizer included: 154,000 tokens, a fraction of the corpus. Held-out loss 4.49
nats a token, 2.06 bits a byte (Python 3.11.7; another interpreter has another library). The same command resumes a killed run.
Other text: --config.data.files=book.txt,more.jsonl.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "train"
    config.objective = "pretrain"
    config.seed = 0
    config.target = ""  # a draft for this target: it gets the target's vocabulary
    config.tokenizer = ""  # a tokenizer.json, or a directory with one; empty: train one
    config.init = ""  # a model directory to begin with; empty: random parameters
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
    config.examine.prompts = 0  # there is nothing to draft for, unless config.target is given
    return config


def data() -> ConfigDict:
    """Where text comes from: at most one of files, tfds, dialogues and generated; none of them: the embedded corpus."""
    data = ConfigDict()
    data.dir = ""  # where datasets are built or lie; empty: <workdir>/data for the embedded corpus
    data.files = ""  # .txt and .jsonl files, separated by commas
    data.tfds = ""  # name or directory of a TFDS dataset
    data.text_key = "text"  # its feature that holds the text
    data.dialogues = (
        ""  # .jsonl files of conversations, separated by commas; the assistant's turns are learnt
    )
    data.template = (
        ""  # chat template: chatml, vicuna, llama2, plain, a .jinja file; empty: the target's own
    )
    data.generated = ""  # workdir of configs/self_generate.py: text that the target wrote
    data.temperature = config_dict.placeholder(float)  # of generated text; None: all that there is
    data.labels = (
        "output"  # what is learnt of dialogues and generated text: "output", or "all" of it
    )
    data.packing = (
        "crops"  # other text: "crops" of one stream, or whole "documents", packed and kept apart
    )
    data.on_policy = 0.0  # distill: share of the rows that the draft writes on by itself
    data.on_policy_prompt = 32  # tokens of the text before it does
    return data


def train() -> ConfigDict:
    """What the loop does, and how often."""
    train = ConfigDict()
    train.log_every = 10
    train.eval_every = 100
    train.eval_batches = 12
    train.checkpoint_every = 100
    train.accumulate = 1  # parts of a batch that go through one after the other
    train.ema = 0.0  # decay of averaged parameters; 0: none
    train.precision = "float32"  # or "bfloat16": of the losses; parameters stay float32
    train.remat = False  # recompute layers in the backward pass: less memory, more time
    train.keep = "last"  # or "best": which parameters are the result
    train.best = "heldout_loss"  # the logged value that says which are the best
    train.resume_changed = False  # go on with a run although its configuration was another
    return train


def optimiser(name: str, learning_rate: float) -> ConfigDict:
    """The keys of specjax/train/optimise.py; None leaves its own default."""
    optimiser = ConfigDict()
    optimiser.name = name  # adamw, muon, sgd, lion
    optimiser.learning_rate = learning_rate
    optimiser.adam_learning_rate = config_dict.placeholder(float)  # muon: of what is no matrix
    optimiser.schedule = "cosine"  # linear, constant, rsqrt
    optimiser.warmup = 0.05  # of the steps
    optimiser.final = 0.1  # of the learning rate
    optimiser.weight_decay = 0.01
    optimiser.clip = 1.0  # global norm of the gradient; 0: off
    optimiser.clip_value = 0.0  # each entry of it; 0: off
    optimiser.b1 = config_dict.placeholder(float)
    optimiser.b2 = config_dict.placeholder(float)
    optimiser.eps = config_dict.placeholder(float)
    return optimiser


def examine() -> ConfigDict:
    """Block efficiency at every evaluation: foreseen from the target's text, and decoded."""
    examine = ConfigDict()
    examine.prompts = 16  # held-out prompts; 0: do not
    examine.prompt_tokens = 32
    examine.new_tokens = 64
    examine.temperatures = (0.0, 1.0)
    examine.gamma = 4  # draft models: tokens a round; heads draft as many as there are
    return examine
