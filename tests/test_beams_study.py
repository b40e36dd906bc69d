"""The study of speculative beams on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.beams import run as beams_study

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]


def test_beams(target, draft, tmp_path, monkeypatch):
    for name, value in (("BEAMS", (2,)), ("GAMMAS", (2,)), ("WIDER", (2,))):
        monkeypatch.setattr(beams_study, name, value)
    folder, texts = tmp_path / "pair", tmp_path / "texts.txt"
    folder.mkdir()
    for name, path in (("target", target), ("draft", draft)):
        (folder / name).symlink_to(Path(path).resolve())
    texts.write_text("def add(a\nreturn a\n")
    out = tmp_path / "results.json"
    argv = [f"tiny={folder}", f"--out={out}", "--count=2", "--new=6", "--repeats=1"]
    beams_study.main([*argv, "--prompts", f"tiny={texts}"])
    result = json.loads(out.read_text())
    [row] = result["rows"]
    assert (row["steps"], row["nodes"], row["identical"], row["prompts"]) == (12, 10, 2, 2)
    assert 4 <= row["passes"] <= 12
    assert str(tmp_path) not in json.dumps(result)
