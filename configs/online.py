"""Decodes a stream of requests while the drafter learns from the target's corrections (OSD).

    python -m specjax.run --config=configs/online.py --workdir=runs/online \\
        --config.target=runs/target --config.drafter.model=runs/draft --config.prompts=prompts.jsonl

Online speculative decoding (Liu et al. 2023, 2310.07177): after every ``config.online.every``
requests one optimiser step, at a constant learning rate, at the places where the target rejected
the draft. The output law stays the target's. The requests are decoded in the order of the file.
Another drafter: --config.drafter.name=medusa; --config.online.learn=False is the same stream
without updates.
"""

from ml_collections import ConfigDict, config_dict

from configs import generate, pretrain


def get_config() -> ConfigDict:
    """The configuration."""
    config = generate.get_config()
    # Not for a stream: devices, stop strings, a recording, beam search.
    del config.mesh, config.stop, config.record, config.beams
    config.mode = "online"
    # A drafter with trained parameters, and where they are: a draft model, or heads.
    config.drafter = generate.drafter("draft_model")
    config.drafter.model = "runs/draft"
    config.report = True  # report.html and plots/
    config.online = ConfigDict()
    config.online.every = 8  # requests from one update to the next; a multiple of the batch size
    # Texts of which an update learns, the last ones; 0: those since the last update.
    config.online.buffer = 0
    # Where it learns: "wrong", the first rejected place of each round, or all "emitted" tokens.
    config.online.positions = "wrong"
    config.online.accumulate = 1  # parts of the ring, processed one after the other
    config.online.learn = True  # False: no updates, to compare with
    config.online.window = 25  # requests of a window of the results
    config.online.checkpoint_every = 64  # requests
    config.loss = loss()
    config.optimiser = pretrain.optimiser("adamw", 1e-4)
    config.optimiser.schedule = "constant"
    config.optimiser.warmup = 0.0
    return config


def loss() -> ConfigDict:
    """The keys of the drafter's loss; None: see specjax/train/online.py, ``loss_of``."""
    loss = ConfigDict()
    # forward_kl, reverse_kl, jeffreys, jensen_shannon, total_variation, lk, lk_hybrid
    loss.divergence = "forward_kl"
    loss.beta = config_dict.placeholder(float)  # jensen_shannon, of draft models
    # Draft models: divides both models' logits; None: that of decoding, at 0 it is 1.
    loss.temperature = config_dict.placeholder(float)
    loss.ce = config_dict.placeholder(float)  # heads: cross-entropy with the text
    loss.teacher = config_dict.placeholder(float)  # heads: weight of the divergence
    loss.decay = config_dict.placeholder(float)  # heads: factor from each depth to the next
    loss.steps = config_dict.placeholder(int)  # eagle, eagle3: depths that learn
    loss.feature = config_dict.placeholder(float)  # eagle: smooth L1 of the features
    # Drafters with masks: the share of places with masks per depth, and its least value.
    loss.keep = config_dict.placeholder(float)
    loss.floor = config_dict.placeholder(float)
    loss.places = config_dict.placeholder(int)  # block_head: blocks of each text
    loss.pace = config_dict.placeholder(float)  # smoothing of D-PACE's weights of depths
    loss.confidence = config_dict.placeholder(float)  # block_head: weight of the confidence
    loss.weight = config_dict.placeholder(float)  # eagle, eagle3: weight of the divergence
    return loss
