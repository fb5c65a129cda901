from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.journal_records import read_journal
from worlds.record_builders import steady

from heddle_dask.core.errors import BadInput
from heddle_dask.records.journal import (
    Compaction,
    Journal,
    JournalReader,
)
from heddle_dask.records.journal_lines import FORMAT, HEADER
from heddle_dask.records.locks import WriterLock

RECORDS = [
    ("step", {"trajectory": "t0", "tokens": [1, 2, 3]}),
    ("note", {}),
    ("text", {"detail": "zwei\nZeilen, ü, €, 😀, \ud800, \x00"}),
    ("action", {"label": "python", "run_s": 0.1, "ok": True, "cause": None}),
    ("step", {"trajectory": "t1", "tokens": []}),
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(st.text(), json_values, max_size=4)


def write(path: Path, records) -> None:
    with Journal.create(path) as journal:
        for kind, body in records:
            journal.append(kind, body)


@settings(steady, max_examples=30)
@given(records=st.lists(st.tuples(st.text(), bodies), max_size=6), cut=st.integers(0, 6))
def test_reads_back_what_was_appended_in_two_sessions(tmp_path_factory, records, cut):
    path = tmp_path_factory.mktemp("journal") / "j"
    write(path, records[:cut])
    with Journal.open_append(path) as journal:
        for kind, body in records[cut:]:
            journal.append(kind, body)
    found = read_journal(path)
    assert found == records
    assert found.dropped_bytes == 0


def test_nothing_is_in_the_file_before_flush_and_everything_after(tmp_path):
    with Journal.create(tmp_path / "j") as journal:
        journal.append("a", {"n": 1})
        assert read_journal(tmp_path / "j") == []
        journal.flush()
        assert read_journal(tmp_path / "j") == [("a", {"n": 1})]
        journal.append("b", {})
        journal.sync()
        assert len(read_journal(tmp_path / "j")) == 2


def test_body_that_is_no_json_leaves_the_journal_as_it_was(tmp_path):
    with Journal.create(tmp_path / "j") as journal:
        journal.append("a", {})
        with pytest.raises(TypeError):
            journal.append("b", {"x": object()})
        journal.append("c", {})
    assert [kind for kind, _ in read_journal(tmp_path / "j")] == ["a", "c"]


def test_survives_a_cut_at_every_byte(tmp_path):
    whole = tmp_path / "whole"
    write(whole, RECORDS)
    data = whole.read_bytes()
    ends = [len(HEADER)]
    for line in data[len(HEADER) :].splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    assert ends[-1] == len(data)

    path = tmp_path / "cut"
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        kept = [end for end in ends if end <= length]
        survivors = RECORDS[: max(len(kept) - 1, 0)]
        found = read_journal(path)
        assert found == survivors, length
        assert found.dropped_bytes == length - (kept[-1] if kept else 0), length
        with Journal.open_append(path) as journal:
            journal.append("after", {"cut": length})
        again = read_journal(path)
        assert again == [*survivors, ("after", {"cut": length})], length
        assert again.dropped_bytes == 0


def test_a_changed_byte_before_the_last_line_is_reported_with_its_line(tmp_path):
    path = tmp_path / "j"
    write(path, RECORDS)
    data = path.read_bytes()
    last_line = data.rstrip(b"\n").rindex(b"\n")
    for position in range(len(HEADER), last_line):
        damaged = bytearray(data)
        damaged[position] ^= 0x04
        path.write_bytes(damaged)
        number = data[:position].count(b"\n") + 1
        for reading in (read_journal, Journal.open_append):
            with pytest.raises(BadInput, match=f"damaged at line {number}:"):
                reading(path)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("change", ["lost", "doubled", "swapped"])
def test_a_lost_doubled_or_swapped_line_is_damage(tmp_path, change):
    path = tmp_path / "j"
    write(path, RECORDS)
    header, *lines = path.read_bytes().splitlines(keepends=True)
    if change == "lost":
        del lines[1]
    elif change == "doubled":
        lines.insert(1, lines[1])
    else:
        lines[1], lines[2] = lines[2], lines[1]
    path.write_bytes(header + b"".join(lines))
    with pytest.raises(BadInput, match=r"damaged at line [34]:"):
        read_journal(path)


def test_a_tail_of_zeros_is_dropped(tmp_path):
    path = tmp_path / "j"
    write(path, RECORDS)
    with open(path, "ab") as file:
        file.write(bytes(4096))
    assert read_journal(path) == RECORDS
    assert read_journal(path).dropped_bytes == 4096


@pytest.mark.parametrize("content", [b"hello", b"x" * 500, HEADER.replace(b"heddle", b"other")])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    for reading in (read_journal, Journal.open_append):
        with pytest.raises(BadInput, match="no journal"):
            reading(path)
    with pytest.raises(BadInput, match="no journal"):
        Journal.create(path, overwrite=True)
    assert path.read_bytes() == content


def test_paths_that_cannot_be(tmp_path):
    write(tmp_path / "j", RECORDS)
    with pytest.raises(BadInput, match="exists"):
        Journal.create(tmp_path / "j")
    with pytest.raises(BadInput, match="cannot write"):
        Journal.create(tmp_path / "j" / "below")
    with pytest.raises(BadInput, match="No such file"):
        Journal.open_append(tmp_path / "missing")
    with pytest.raises(BadInput, match="No such file"):
        read_journal(tmp_path / "missing")
    with pytest.raises(BadInput, match="cannot read"):
        read_journal(tmp_path)
    with Journal.create(tmp_path / "j", overwrite=True):
        assert read_journal(tmp_path / "j") == []
    with Journal.create(tmp_path / "new" / "folder" / "j"):
        pass


def test_second_writer_is_refused_until_the_first_closes(tmp_path):
    path = tmp_path / "j"
    first = Journal.create(path)
    for opening in (Journal.open_append, lambda p: Journal.create(p, overwrite=True)):
        with pytest.raises(BadInput, match="another process"):
            opening(path)
    first.append("a", {})
    first.close()
    first.close()
    Journal.open_append(path).close()
    assert read_journal(path) == [("a", {})]


def test_full_disk_keeps_what_is_not_written(tmp_path):
    """A pipe that takes no more stands for the disk: part of the buffer goes, the rest stays."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    journal = Journal(tmp_path / "pipe", WriterLock(writing, None), zlib.crc32(HEADER))
    for number in range(3000):
        journal.append("fill", {"n": number, "text": "x" * 50})
    with pytest.raises(BlockingIOError):
        journal.flush()
    received = bytearray()
    while True:
        received += os.read(reading, 1 << 20)
        try:
            journal.flush()
            break
        except BlockingIOError:
            continue
    journal.close()
    while piece := os.read(reading, 1 << 20):
        received += piece
    os.close(reading)
    copy = tmp_path / "copy"
    copy.write_bytes(HEADER + received)
    assert [body["n"] for _, body in read_journal(copy)] == list(range(3000))


WRITER = """
import os, random, sys
from heddle_dask.records.journal import Journal

random.seed(int(sys.argv[2]))
journal = Journal.open_append(sys.argv[1])
number = int(sys.argv[3])
while True:
    for _ in range(random.randint(1, 5)):
        journal.append("record", {"n": number, "text": "x" * random.choice([0, 10, 100_000])})
        number += 1
    journal.flush()
    os.write(1, b"%d\\n" % number)
"""
IN_FLIGHT = 5


def test_sigkill_of_a_busy_writer_loses_nothing_that_was_flushed(tmp_path):
    path = tmp_path / "j"
    Journal.create(path).close()
    chance = random.Random(20)
    expected_at_least = 0
    for attempt in range(8):
        before = len(read_journal(path))
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(attempt), str(before)],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(chance.uniform(0, 0.03))
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read()
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        acknowledged = max(int(line) for line in (first + rest).split(b"\n")[:-1])

        found = read_journal(path)
        assert [body["n"] for _, body in found] == list(range(len(found)))
        assert acknowledged <= len(found) <= acknowledged + IN_FLIGHT
        assert acknowledged > expected_at_least
        expected_at_least = acknowledged


def test_format_is_what_the_docstring_says(tmp_path):
    write(tmp_path / "j", [("a", {"b": 1}), ("c", {})])
    header, first, second = (tmp_path / "j").read_bytes().splitlines()
    assert json.loads(header) == {"heddle": "journal", "format": FORMAT}
    assert first[9:] == b'["a",{"b":1}]'
    assert int(first[:8], 16) == zlib.crc32(first[9:], zlib.crc32(HEADER))
    assert int(second[:8], 16) == zlib.crc32(second[9:], int(first[:8], 16))


# -- compaction ------------------------------------------------------------------------------------

LINES = [
    ("control", {"lines": [1, 2]}),
    ("step", {"trajectory_id": "a", "n": 0}),
    ("step", {"trajectory_id": "b", "n": 1}),
    ("finished", {"trajectory_id": "a"}),
    ("control", {"lines": [3]}),
]
KEPT = [line for line in LINES if line[1].get("trajectory_id") != "a"]
MEANWHILE = [("step", {"trajectory_id": "a", "n": 2}), ("step", {"trajectory_id": "b", "n": 3})]


def without_a(journal: Journal) -> Compaction:
    return Compaction(journal, {"step", "finished"}, lambda record: record.body["trajectory_id"] != "a")


def test_a_compacted_journal_keeps_what_is_needed_and_what_came_meanwhile(tmp_path):
    path = tmp_path / "j"
    write(path, LINES)
    path.chmod(0o600)
    reader = JournalReader(path)
    with Journal.open_append(path) as journal:
        compaction = without_a(journal)
        journal.append(*MEANWHILE[0])
        journal.flush()
        compaction.copy()
        journal.append(*MEANWHILE[1])
        compaction.finish()
        assert journal.size_bytes == path.stat().st_size
        with pytest.raises(BadInput, match="another process"):
            Journal.open_append(path)
        journal.append("after", {})
    assert read_journal(path) == [*KEPT, *MEANWHILE, ("after", {})]
    assert [(kind, body) for kind, body, _ in reader] == LINES, "a reader that was there before reads the old file"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_of_some_kinds_and_the_length_of_their_lines(tmp_path):
    path = tmp_path / "j"
    write(path, [*LINES, ("stepping", {}), ('st"ep', {})])
    records = list(JournalReader(path, {"step", 'st"ep'}))
    assert [record[:2] for record in records] == [LINES[1], LINES[2], ('st"ep', {})]
    whole = JournalReader(path)
    assert sum(record.size_bytes for record in whole) + len(HEADER) == path.stat().st_size
    assert whole.dropped_bytes == 0


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_compaction_that_fails_leaves_the_journal_as_it_was(tmp_path, monkeypatch, call, number):
    path = tmp_path / "j"
    write(path, LINES)
    with Journal.open_append(path) as journal:
        done = 0
        real = getattr(os, call)

        def failing(*arguments):
            nonlocal done
            done += 1
            if done > number:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, failing)
            try:
                compaction = without_a(journal)
                compaction.copy()
                compaction.finish()
            except OSError:
                assert done > number
        journal.append(*MEANWHILE[0])
    expected = LINES if done > number and not (call == "fsync" and number == 2) else KEPT
    assert read_journal(path) == [*expected, MEANWHILE[0]]
    assert list(tmp_path.iterdir()) == [path]


def test_the_rest_of_a_compaction_that_was_killed_is_removed(tmp_path):
    path = tmp_path / "j"
    write(path, LINES)
    (tmp_path / "j.partial").write_bytes(HEADER + b"half")
    with Journal.open_append(path) as journal:
        compaction = without_a(journal)
        compaction.copy()
        compaction.finish()
    assert read_journal(path) == KEPT and list(tmp_path.iterdir()) == [path]


def test_a_line_with_a_right_checksum_that_is_no_record_is_refused(tmp_path):
    for text in (b"7", b'["a"]', b'["a",[]]', b"[1,{}]", b"{", b"[" * 100_000):
        path = tmp_path / "j"
        path.write_bytes(HEADER + b"%08x %b\n" % (zlib.crc32(text, zlib.crc32(HEADER)), text))
        with pytest.raises(BadInput, match="a line that heddle did not write"):
            read_journal(path)


def test_a_file_system_without_locks_is_told_apart_from_one_that_refuses(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(answer, os.strerror(answer))

    monkeypatch.setattr("fcntl.flock", flock)
    answer = errno.EOPNOTSUPP
    with Journal.create(tmp_path / "j"), pytest.raises(BadInput, match="is being written by process"):
        Journal.open_append(tmp_path / "j")
    Journal.open_append(tmp_path / "j").close()
    answer = errno.EIO
    with pytest.raises(BadInput, match=r"cannot lock .*: Input/output error"):
        Journal.open_append(tmp_path / "j")
