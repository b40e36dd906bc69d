"""What specjax does is what was recorded. ``record.py --write`` stores an intended change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("record.py")


@pytest.mark.second
@pytest.mark.parametrize("groups", ["texts", "programs,losses", "files,commands"])
def test_nothing_has_changed(groups):
    done = subprocess.run(
        [sys.executable, RECORD, "--compare", f"--only={groups}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.fast
def test_a_change_is_reported():
    sys.path.insert(0, str(RECORD.parent))
    import record

    stored = json.loads(record.STORED.read_text())["record"]
    assert record.changes(stored, stored) == []
    assert set(stored) == set(record.GROUPS)
    assert all(len(entries) > 30 for entries in stored.values())
    name = next(iter(stored["texts"]))
    wrong = stored | {"texts": stored["texts"] | {name: "another"}}
    assert record.changes(stored, wrong) == [f"texts, {name}: {stored['texts'][name]} -> another"]
    near = {"losses": {"a": "1.000e+00 2.000e-01"}}
    assert record.changes(near, {"losses": {"a": "1.001e+00 2.000e-01"}}) == []
    assert len(record.changes(near, {"losses": {"a": "1.010e+00 2.000e-01"}})) == 1
    assert len(record.changes(near, {"losses": {}})) == 1
