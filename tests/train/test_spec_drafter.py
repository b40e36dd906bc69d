"""Training of a Spec-Drafter: it learns what the target writes, and a resumed run is the same."""

from __future__ import annotations

import json

import pytest
import t5_cases
from train_cases import equal, small_config

from configs import self_generate
from specjax import generation
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.train import recipes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with pairs, a random target, and its greedy outputs for few sources."""
    path = tmp_path_factory.mktemp("spec")
    pairs = t5_cases.write(path / "pairs.jsonl", t5_cases.lines(400))
    target = t5_cases.save(path / "target")
    config = self_generate.get_config()
    config.target, config.data.pairs = target, pairs
    sizes = {"num_prompts": 60, "prompt_tokens": 7, "new_tokens": 8, "temperatures": (0.0,)}
    config.generation.update(sizes)
    recipes.run(config, path / "written")
    return path


def small(folder, **changes):
    own = {"data__pairs": "", "data__generated": str(folder / "written")}
    own |= {"target": str(folder / "target"), "train__length": 20, "drafter__block": 4}
    own |= {"examine__prompts": 2, "examine__prompt_tokens": 8, "examine__new_tokens": 8}
    return small_config("spec_drafter", **own | changes)


@pytest.mark.slow
def test_a_run_learns_and_a_resumed_one_ends_with_the_same_bits(folder, tmp_path):
    whole = recipes.run(small(folder), tmp_path / "whole")
    lines = (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    first = next(r for r in map(json.loads, lines) if "heldout_loss" in r)
    assert whole["heldout_loss"] < first["heldout_loss"] and whole["heldout_decoded_tau_t0"] >= 1
    constant = {"optimiser__schedule": "constant", "optimiser__warmup": 0.0}
    fixed = {"train__checkpoint_every": 5, "loss__fall": 0.0, "examine__prompts": 0, **constant}
    recipes.run(small(folder, **fixed), tmp_path / "one")
    recipes.run(small(folder, train__steps=10, **fixed), tmp_path / "two")
    recipes.run(small(folder, **fixed), tmp_path / "two")
    one, two = (head_files.read(tmp_path / name, "spec_drafter") for name in ("one", "two"))
    assert equal(one.params, two.params)
    assert one.config["block_size"] == 4 and one.config["base_model_name_or_path"] == "target"


@pytest.mark.slow
def test_a_network_that_knows_the_outputs_drafts_them(folder, tmp_path):
    """More than two tokens per round on the sources that it was trained on, and the same text."""
    config = small(folder, train__steps=400, train__batch_size=8, loss__smoothing=0.0)
    recipes.run(config, tmp_path / "long")
    model = generation.load(str(folder / "target"))
    sources = t5_cases.lines(400)
    prompts = [each["source"] for each in sources[:60] if len(each["source"].split()) < 6][:8]
    keys = {"max_new_tokens": 8, "temperature": 0.0}
    plain = generation.generate_text(model, prompts, **keys)
    drafter = {"name": "spec_drafter", "model": str(tmp_path / "long")}
    drafted = generation.generate_text(model, prompts, drafter=drafter, **keys)
    assert drafted.texts == plain.texts
    assert drafted.tau > 2


def test_a_decoder_is_refused_in_one_line(folder, tmp_path, draft):
    with pytest.raises(UserError, match="spec_drafter drafts for encoder-decoder models") as error:
        recipes.run(small(folder, target=str(draft)), tmp_path / "work")
    assert "\n" not in str(error.value) and not (tmp_path / "work").exists()
