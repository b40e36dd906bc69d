"""What a run records: metrics.jsonl and TensorBoard events, also on a full disk."""

from __future__ import annotations

import errno
import os

import pytest
from train_cases import metrics, train

from specjax.errors import UserError
from specjax.train import records

fast = pytest.mark.fast


@fast
def test_an_error_of_the_system_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(
        UserError, match=r"metrics\.jsonl cannot be written .Not a directory"
    ) as error:
        records.Log(tmp_path / "file", 0)
    assert "\n" not in str(error.value)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written .No space left"):
        records.Log(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "metrics.jsonl"]


@fast
def test_a_full_disk_while_writing(tmp_path):
    with (
        records.Log(tmp_path, 20) as log,
        pytest.raises(UserError, match="of step 21 .*No space left on device"),
    ):
        log._lines.close()
        # The log closes it; closing fails too.
        log._lines._file = open("/dev/full", "w")  # noqa: SIM115
        log.write({"step": 21})


@fast
def test_a_log_drops_records_after_the_checkpoint(tmp_path):
    lines = [
        b'{"step": 2, "loss": 1.0}',
        b"\xff\xff",
        b"3",
        b'{"loss": 1}',
        b'{"step": 6}',
        b'{"step": 4}',
        b'{"st',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    with records.Log(tmp_path, 4) as log:
        log.write({"step": 5})
    kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert kept == [lines[0], lines[5], b'{"step": 5}']


def test_events_for_tensorboard(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    train(tmp_path, 8)
    train(tmp_path, 12)
    values = {}
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        raw, at = path.read_bytes(), 0
        # A length in 8 bytes, its checksum in 4, the event, its checksum in 4.
        while at < len(raw):
            size = int.from_bytes(raw[at : at + 8], "little")
            event = Event.FromString(raw[at + 12 : at + 12 + size])
            values |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            at += 16 + size
    for record in metrics(tmp_path):
        step = record["step"]
        assert values["loss", step] == pytest.approx(record["loss"], rel=1e-5)
        assert values["time_step", step] == pytest.approx(record["time_share"]["step"], rel=1e-5)
    assert {step for _, step in values} == {4, 6, 8, 10, 12} and ("heldout_loss", 12) in values
