"""Traces: what is written comes back, a kill loses a batch at most, damage is named."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvd.errors import TraceError
from hvd.traces.reader import read_traces
from hvd.traces.schema import VERSION_KEY, Trace, to_table
from hvd.traces.writer import TraceWriter
from hvd.types import Arm, CycleTimes, FinishReason, StepRecord

CLASSES = (np.arange(300) % 7).astype(np.uint8)


def make_trace(name: str, prompt: int = 5, response: int = 4) -> Trace:
    steps = (
        StepRecord(0, prompt, Arm.CACHE, 3, 2, 3, 4, 9, 5, 2.5, 1.75, "pays", CycleTimes(0.1, 0.2, 0.3, 0.4)),
        StepRecord(3, prompt + 3, Arm.PLAIN, 0, 0, 1, 1),
    )
    return Trace(
        id=name,
        prompt=np.arange(prompt, dtype=np.int32),
        response=np.arange(100, 100 + response, dtype=np.int32),
        token_classes=CLASSES,
        finish_reason=FinishReason.LENGTH,
        model="m",
        model_fingerprint="f",
        tokenizer_fingerprint="t",
        dataset="d",
        category="c",
        split="dev",
        sampling='{"seed": 1}',
        policy="hvd",
        created=123.5,
        steps=steps,
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_comes_back(tmp_path: Path) -> None:
    wanted = make_trace("a#1")
    with TraceWriter(tmp_path / "t", CLASSES) as writer:
        writer.add(wanted)
        writer.add(make_trace("empty", prompt=1, response=0))
    got, empty = read_traces(tmp_path / "t")
    for name in Trace.__slots__:
        if name not in ("prompt", "response", "token_classes", "steps"):
            assert getattr(got, name) == getattr(wanted, name)
    assert got.prompt.dtype == got.response.dtype == np.int32
    assert got.prompt.tolist() == wanted.prompt.tolist()
    assert got.response.tolist() == wanted.response.tolist()
    assert got.token_classes.dtype == np.uint8
    assert got.token_classes.tolist() == CLASSES.tolist()
    assert got.steps[0] == wanted.steps[0]
    assert np.isnan(got.steps[1].expected)
    assert got.steps[1].arm is Arm.PLAIN
    assert (got.group, got.cut) == ("a", True)
    assert empty.response.shape == (0,)


def test_parts_are_private_and_named_in_order(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with TraceWriter(tmp_path / "t", CLASSES, every=2) as writer:
            for i in range(5):
                writer.add(make_trace(str(i)))
            assert len(list(writer.directory.iterdir())) == 2
    finally:
        os.umask(old)
    parts = sorted((tmp_path / "t").iterdir())
    assert len(parts) == 3
    assert mode(tmp_path / "t") == 0o700
    assert {mode(part) for part in parts} == {0o600}
    assert [trace.id for trace in read_traces(tmp_path / "t")] == ["0", "1", "2", "3", "4"]


def test_a_part_is_written_when_time_is_up(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", CLASSES, every=1000, seconds=0.0)
    writer.add(make_trace("a"))
    assert writer.written == 1


def test_paths_may_be_files_directories_and_globs(tmp_path: Path) -> None:
    for name in "ab":
        with TraceWriter(tmp_path / name, CLASSES, every=1) as writer:
            writer.add(make_trace(name))
    part = next((tmp_path / "a").iterdir())
    assert [t.id for t in read_traces(part)] == ["a"]
    assert [t.id for t in read_traces([tmp_path / "b", part, tmp_path / "b"])] == ["b", "a"]
    assert [t.id for t in read_traces(str(tmp_path / "*"))] == ["a", "b"]
    with pytest.raises(TraceError, match=r"no trace files at .*nothing"):
        list(read_traces(tmp_path / "nothing"))
    with pytest.raises(TraceError, match="an empty text"):
        list(read_traces(""))


def test_ctrl_c_writes_the_rest(tmp_path: Path) -> None:
    def interrupted() -> None:
        with TraceWriter(tmp_path / "t", CLASSES) as writer:
            writer.add(make_trace("a"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [t.id for t in read_traces(tmp_path / "t")] == ["a"]


def test_an_interrupted_write_leaves_no_half_part_and_no_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(tmp_path / "t", CLASSES)
    writer.add(make_trace("a"))

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    assert list(writer.directory.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr("hvd.traces.writer._sync_directory", refuse)  # after the rename
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    writer.close()
    assert [t.id for t in read_traces(tmp_path / "t")] == ["a"]


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = TraceWriter(tmp_path / "t", CLASSES)
    writer.add(make_trace("a"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TraceError, match=r"part-.*parquet: No space left"):
            writer.flush()
    writer.close()
    assert writer.written == 1


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from test_traces import CLASSES, make_trace
from hvd.traces.writer import TraceWriter
writer = TraceWriter({directory!r}, CLASSES, every=3)
for i in range(8):
    writer.add(make_trace(str(i)))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_kill_loses_the_last_batch_only(tmp_path: Path) -> None:
    script = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), directory=str(tmp_path / "t"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [t.id for t in read_traces(tmp_path / "t", strict=True)] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "noise"])
def test_a_corrupt_part_is_named_and_skipped(tmp_path: Path, damage: str) -> None:
    with TraceWriter(tmp_path / "t", CLASSES, every=1) as writer:
        for i in range(3):
            writer.add(make_trace(str(i), prompt=200))
    victim = sorted(writer.directory.iterdir())[1]
    data = bytearray(victim.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":  # a column chunk of the first row group
        offset = pq.ParquetFile(victim).metadata.row_group(0).column(7).data_page_offset
        data[offset + 40] ^= 0xFF
    else:
        data = bytearray(b"" if damage == "empty" else os.urandom(500))
    victim.write_bytes(data)
    lines: list[str] = []
    assert [t.id for t in read_traces(tmp_path / "t", warn=lines.append)] == ["0", "2"]
    assert str(victim) in lines[0]
    assert lines[1] == "1 of 3 trace parts skipped"
    assert all("\n" not in line for line in lines)
    with pytest.raises(TraceError, match=victim.name):
        list(read_traces(tmp_path / "t", strict=True))


@pytest.mark.parametrize("sampling", ["{", "[]", None, "[" * 100_000])
def test_a_trace_with_odd_sampling_parameters_is_named_and_skipped(tmp_path: Path, sampling: str) -> None:
    odd = dataclasses.replace(make_trace("odd"), sampling=sampling)
    pq.write_table(to_table([make_trace("a"), odd, make_trace("b")], CLASSES), tmp_path / "t.parquet")
    lines: list[str] = []
    assert [t.id for t in read_traces(tmp_path / "t.parquet", warn=lines.append)] == ["a", "b"]
    assert len(lines) == 1
    assert "trace odd: its sampling parameters are not a JSON object; skipped" in lines[0]
    with pytest.raises(TraceError, match="trace odd"):
        list(read_traces(tmp_path / "t.parquet", strict=True))


def test_a_part_with_a_missing_list_of_tokens_is_skipped(tmp_path: Path) -> None:
    table = to_table([make_trace("a")], CLASSES)
    at = table.column_names.index("prompt")
    broken = table.set_column(at, table.schema.field(at), pa.array([None], table.schema.field(at).type))
    pq.write_table(broken, tmp_path / "t.parquet")
    lines: list[str] = []
    assert list(read_traces(tmp_path / "t.parquet", warn=lines.append)) == []
    assert "without tokens" in lines[0]


def test_a_foreign_schema_is_refused(tmp_path: Path) -> None:
    table = to_table([make_trace("a")], CLASSES)
    newer = {**table.schema.metadata, VERSION_KEY: b"99"}
    pq.write_table(table.replace_schema_metadata(newer), tmp_path / "newer.parquet")
    pq.write_table(table.replace_schema_metadata(None), tmp_path / "other.parquet")
    with pytest.raises(TraceError, match="version 99, this hvd reads 1"):
        list(read_traces(tmp_path / "newer.parquet"))
    with pytest.raises(TraceError, match="is not a trace file"):
        list(read_traces(tmp_path / "other.parquet"))


def test_negative_tokens_are_refused(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", CLASSES)
    with pytest.raises(TraceError, match="trace a: its prompt has a negative token id"):
        writer.add(dataclasses.replace(make_trace("a"), prompt=np.array([1, -1], np.int32)))


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("")
    with pytest.raises(TraceError, match="can't make the trace directory"):
        TraceWriter(tmp_path / "t", CLASSES)
