"""A larger ``train.steps`` lengthens a run, finished or not."""

from __future__ import annotations

import pytest
from train_cases import equal, small_config

from specjax.errors import UserError
from specjax.models import hf
from specjax.train import checkpoint, recipes


def test_more_steps_lengthen_a_finished_run(target_run, text_file, capfd):
    """Without training: the slow test below also trains."""
    config = small_config("pretrain", data__files=text_file, model__vocab_size=320)

    def finished():
        return recipes._is_finished(config, recipes.common.as_json(config), target_run[0])

    assert finished() and not capfd.readouterr().err
    # The summary is written last: without it, or with that of fewer steps, the run goes on.
    summary = target_run[0] / "summary.json"
    before = summary.read_text()
    for text in (None, before.replace('"steps": 30', '"steps": 20')):
        summary.unlink()
        if text is not None:
            summary.write_text(text)
        assert not finished()
        summary.write_text(before)
    config.train.steps = 60
    assert not finished()
    assert capfd.readouterr().err == (
        f"the run of 30 steps in {target_run[0]} is lengthened to 60: the learning rate is that of "
        "the longer cosine schedule (0.0059 at step 31; the shorter one had come to 0.001)\n"
    )
    config.seed = 1
    with pytest.raises(UserError, match=r"another config \(seed was 0, is 1\)"):
        finished()


@pytest.mark.slow
def test_a_finished_run_is_lengthened(text_file, tmp_path, monkeypatch, capfd):
    """Also if it is killed while it goes on; the result is that of a run with more steps."""
    changes = {"data__files": text_file, "model__vocab_size": 300, "train__batch_size": 2}
    changes |= {"optimiser__schedule": "constant", "optimiser__warmup": 0.0}

    def run(workdir, steps):
        config = small_config("pretrain", **changes, train__checkpoint_every=3, train__steps=steps)
        return recipes.run(config, workdir) | {"seconds": None}

    straight = run(tmp_path / "a", 9)
    assert run(tmp_path / "b", 2)["steps"] == 2
    written = checkpoint.Checkpoints.save
    with monkeypatch.context() as patch:

        def killed(self, step, *rest):
            if step == 9:
                raise KeyboardInterrupt
            written(self, step, *rest)

        patch.setattr(checkpoint.Checkpoints, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "b", 9)
    assert "of 2 steps in" in (err := capfd.readouterr().err) and "is lengthened to 9" in err
    assert "longer constant schedule (0.01 at step 3; the shorter one had come to 0.01)" in err
    assert hf.load(tmp_path / "b").params  # of the shorter run, until the longer one is finished
    assert run(tmp_path / "b", 9) == straight
    assert "resuming from step 6 of 9" in capfd.readouterr().err
    same = [hf.load(tmp_path / name).params for name in "ab"]
    assert equal(*same)
    with pytest.raises(UserError, match=r"train\.steps was 9, is 2"):
        run(tmp_path / "b", 2)
