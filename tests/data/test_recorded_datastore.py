"""A recording as a datastore: the rollouts of one epoch are the drafts of the next one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from commandline import ROOT

from configs import rollouts
from specjax import drafters, files
from specjax.data import datastore, recordings
from specjax.errors import UserError
from specjax.testing.models import tiny

CONFIG = f"--config={ROOT}/configs/rollouts.py"


@pytest.mark.fast
def test_the_documents_are_the_conversations(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    recordings.record(path, [[1, 2], [3]], [[4, 5], [6]])
    model = tiny(vocab_size=8)[0]
    store = datastore.load(path, model)
    assert [d.tolist() for d in datastore.split(store.tokens)] == [[1, 2, 4, 5], [3, 6]]
    drafter = drafters.make("suffix", model, datastore=str(path))
    assert drafter.init_params(None)["tokens"].tolist() == store.tokens.tolist()
    with pytest.raises(UserError, match=r"drafter.datastore: .* line 1: output_ids has 5; ids are"):
        datastore.load(path, tiny(vocab_size=5)[0])
    path.write_text('{"prompt_ids": [1]}\n')
    with pytest.raises(UserError, match="output_ids is missing") as error:
        datastore.load(path, model)
    assert str(error.value).endswith("; correct it")  # and no key of mode replay
    with pytest.raises(UserError, match="drafter.datastore: .*none.jsonl cannot be read"):
        datastore.load(tmp_path / "none.jsonl", model)


@pytest.mark.slow
def test_the_next_epoch_drafts_the_last_answers(cli, target, tmp_path):
    """At the same keys the rule match repeats an unchanged target's answers, in fewer rounds."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text} for text in ("def add(a, b):", "return a", "def sub(")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = [f"--config.target={target}", f"--config.prompts={prompts}", "--config.accept=match"]
    keys += ["--config.seed=0"]
    keys += ["--config.max_new_tokens=24", "--config.drafter.nodes=8", "--config.batch_size=3"]
    first, second = tmp_path / "epoch0", tmp_path / "epoch1"
    for config, workdir in ((CONFIG, first), (f"{CONFIG}:{first}", second)):
        status, _, err, _ = cli(config, *keys, workdir=workdir)
        assert status == 0, err
    cold, warm = (files.read_json(folder / "results.json") for folder in (first, second))
    assert cold["token_ids"] == warm["token_ids"]
    assert (first / "rollouts.jsonl").read_text() == (second / "rollouts.jsonl").read_text()
    # Without the key, the next epoch would have another seed.
    assert rollouts.get_config().seed == 0 and rollouts.get_config(str(second)).seed == 1
    tau = [each["rows"][0]["block_efficiency"] for each in (cold, warm)]
    assert tau[1] > 2 * tau[0] and tau[1] > 4
    stored = json.loads((second / "config.json").read_text())["drafter"]["datastore"]
    assert stored == f"{first}/rollouts.jsonl"
    assert np.mean([len(ids) for ids in warm["token_ids"]]) > 8
