"""Output outlives its readers, and has a form in every locale."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from heddle_dask.isolation.output_streams import keep_output_alive

LINES = 5_000
PRINTS = f"""
import sys
from heddle_dask.isolation.output_streams import keep_output_alive
keep_output_alive()
keep_output_alive()
for number in range({LINES}):
    print("λέξη", number)
    print("λέξη", number, file=sys.stderr)
open(sys.argv[1], "w").close()
"""


def test_what_the_locale_lacks_is_escaped(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "end")]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout.splitlines()[0] == rb"\u03bb\u03ad\u03be\u03b7 0"
    assert len(done.stdout.splitlines()) == len(done.stderr.splitlines()) == LINES


def test_a_reader_that_goes_ends_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "end")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        process.stderr.close()
        assert process.wait(60) == 0
    assert (tmp_path / "end").exists(), "the program went on to its end"


def test_the_command_line_goes_on_without_a_reader() -> None:
    command = [sys.executable, "-c", "from heddle_dask.cli.main import main; main()", "rollout", "--help"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_stream_in_the_place_of_stdout_stays_and_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", mine)
    keep_output_alive()
    assert sys.stdout is mine
    print("é", flush=True)
    assert mine.buffer.getvalue() == b"\\xe9\n"  # type: ignore[attr-defined]
