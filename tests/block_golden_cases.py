"""Drafts of the speculators library, for a comparison without it.

``HF_HUB_OFFLINE=1 python tests/block_golden_cases.py`` (with torch and speculators 0.9.0, and
tests/ in PYTHONPATH) writes them to tests/drafters/heads/block_goldens.json. Parameters follow from
the names of their tensors, see ``golden_cases``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path

import golden_cases
import numpy as np
from safetensors.numpy import load_file

FILE = Path(__file__).parent / "drafters" / "heads" / "block_goldens.json"
VOCAB, WIDTH, BLOCK, MASK, TAPS = 23, 32, 4, 2, (0, 2)
PROMPTS, ROUNDS = [[1, 2, 3], [5, 6, 7, 8, 9, 10, 11], [3, 4]], 9
SIZES = {"hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "attn_implementation": "eager"}
# Method -> keys of its configuration.
METHODS = {
    "dflash2": {"conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5},
    "xpress": {"xpress_rank": 4},
}


def make_target(folder: Path):
    """(the model, its case: config.json and the shapes of the tensors)."""
    import torch
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=4, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    case = as_case(folder)
    golden_cases.write(folder, case["config"], case["shapes"])
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, attn_implementation="eager", dtype=torch.float32).eval(), case


def as_case(folder: Path) -> dict:
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: list(tensors[name].shape) for name in sorted(tensors)}
    return {"config": json.loads((folder / "config.json").read_text()), "shapes": shapes}


def make_head(method: str, folder: Path, target):
    """(the library's model, its case)."""
    import torch
    import transformers
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    classes = {
        "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
        "xpress": (XPressDraftModel, XPressSpeculatorConfig),
    }
    model_class, config_class = classes[method]
    layers = transformers.Qwen3Config(num_hidden_layers=2, head_dim=8, **SIZES)
    verifier = VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)
    config = config_class(
        transformer_layer_config=layers,
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[tap + 1 for tap in TAPS],
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm=method,
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
        **METHODS[method],
    )
    model = model_class(config)
    model.save_pretrained(folder)
    case = as_case(folder)
    golden_cases.write(folder, case["config"], case["shapes"])
    tensors = {
        name: torch.tensor(values)
        for name, values in load_file(folder / "model.safetensors").items()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and all("lm_head" in x or "embed" in x or "norm" in x for x in missing)
    model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    model.lm_head.weight.data.copy_(target.lm_head.weight)
    return model.eval(), case


def draft(method: str, model, target, text: list[int]) -> dict:
    """The greedy draft after a text, and the logits that its tokens are chosen from."""
    import torch

    # Anchors are among all tokens but the last ``BLOCK``.
    tokens = torch.tensor([[*text, *[0] * BLOCK]])
    states = target(tokens, output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap + 1] for tap in TAPS], -1)
    anchor = torch.zeros(tokens.shape)
    anchor[0, len(text) - 1] = 1
    hidden, logits, *_ = model._backbone_forward(
        taps, tokens, anchor, states[-1], torch.zeros_like(tokens), max_anchors=1
    )
    if method == "dflash2":
        return walked(model.candidate_selector, hidden, logits, text[-1])
    drafted = logits.argmax(-1)
    refined = logits
    for _ in range(model.config.num_jacobi_passes):
        before = torch.cat([torch.tensor([text[-2:]]), drafted[:, 1:-1]], 1)
        refined = logits + model.refiner_head.block_bias(before, hidden_states=hidden)
        drafted = refined.argmax(-1)
    return {"tokens": drafted[0, 1:].tolist(), "logits": rounded(refined[0, 1:])}


def walked(selector, hidden, logits, token: int) -> dict:
    """A draft of the most probable candidate of each depth."""
    import torch

    tokens, rows = [], []
    for place in range(1, BLOCK):
        ids, scores = selector.select(logits[0, place], hidden[0, place], torch.tensor(token))
        token = int(ids[scores.argmax()])
        row = torch.full((VOCAB,), -torch.inf)
        row[ids] = scores
        tokens.append(token)
        rows.append(row)
    return {"tokens": tokens, "logits": rounded(torch.stack(rows))}


def rounded(logits) -> list:
    """Rows of numbers; None for minus infinity."""
    rows = np.round(logits.double().numpy(), 5)
    return [[float(x) if np.isfinite(x) else None for x in row] for row in rows]


def main() -> None:
    import torch

    cases = {"speculators": importlib.metadata.version("speculators")}
    cases |= {"torch": torch.__version__}
    cases |= {"date": str(datetime.date.today()), "machine": platform.machine()}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        target, cases["target"] = make_target(Path(folder) / "target")
        texts = []
        for text in PROMPTS:
            for _ in range(ROUNDS + 1):
                text = [*text, int(target(torch.tensor([text])).logits[0, -1].argmax())]
            texts.append(text)
        cases["texts"] = texts
        for method in METHODS:
            model, case = make_head(method, Path(folder) / method, target)
            case["drafts"] = [
                {
                    length: draft(method, model, target, text[:length])
                    for length in range(len(prompt), len(prompt) + ROUNDS)
                }
                for prompt, text in zip(PROMPTS, texts, strict=True)
            ]
            cases[method] = case
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
        for key, value in cases.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
