"""What `make test` says of its seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_times.py"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A copy, which writes beside itself."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tests").mkdir()
    return Path(shutil.copy(SCRIPT, tmp_path / "scripts"))


def call(script: Path, *words: str, limit_s: float = 600.0) -> tuple[int, str]:
    env = {**os.environ, "HEDDLE_STAGE_LIMIT_S": str(limit_s)}
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, env=env)
    assert done.stderr == ""
    return done.returncode, done.stdout


TELLS = 'printf "2.5\\t$HEDDLE_TEST_STAGE\\ttests/test_{0}.py::test_x\\n" >> "$HEDDLE_TEST_TIMES"; echo {0} ran'


def test_stages_beside_each_other_are_told_with_their_slowest_tests(script: Path) -> None:
    call(script, "begin")
    one, two = (["sh", "-c", TELLS.format(name)] for name in ("one", "two"))
    code, said = call(script, "stage", "first", *one, "+", "second", *two)
    assert code == 0 and "stage first: 0 s" in said and said.index("stage second") < said.index("two ran")
    _, said = call(script, "summary")
    rows = [line.split() for line in said.splitlines()]
    assert ["0", "first"] in rows and ["0", "second"] in rows
    assert "    2.5  tests/test_one.py::test_x (first)" in said and "tests/test_two.py::test_x (second)" in said


def test_a_stage_that_fails_ends_the_run_with_what_there_is(script: Path) -> None:
    call(script, "begin")
    code, said = call(script, "stage", "first", "true", "+", "second", "sh", "-c", "echo why; exit 3")
    assert code == 3 and "why" in said and "second (exit code 3)" in said
    assert call(script, "stage", "killed", "sh", "-c", "kill -9 $$")[0] == 137


def test_a_stage_that_stands_still_is_ended_and_its_processes_are_told(script: Path) -> None:
    call(script, "begin")
    code, said = call(script, "stage", "first", "sh", "-c", "sleep 601 & wait", limit_s=0.5)
    assert code == 137 and "sleep 601" in said and "first (exit code 137)" in said


def test_the_seconds_of_files_are_recorded_and_those_of_other_runs_stay(script: Path) -> None:
    call(script, "begin")
    tests = script.parents[1] / "tests"
    for name in ("one", "other"):
        (tests / f"test_{name}.py").touch()
    (tests / "file_seconds.tsv").write_text("9\ttests/test_other.py\n8\ttests/test_gone.py\n7\ttests/test_one.py\n")
    for _ in range(2):
        call(script, "stage", "first", "sh", "-c", TELLS.format("one"))
    call(script, "record")
    recorded = (tests / "file_seconds.tsv").read_text()
    assert recorded == "5\ttests/test_one.py\n9\ttests/test_other.py\n"


def test_what_fails_once_runs_again_and_a_process_that_ends_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_sessionfinish, pytest_testnodedown\n")
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib\n"
        "def test_once():\n"
        "    seen = pathlib.Path('seen'); before = seen.exists(); seen.touch(); assert before\n"
        "def test_it():\n"
        "    assert os.environ.get('END') != 'fails'\n"
        "    if os.environ.get('END') == 'ends': os._exit(1)\n"
        "def test_behind(): pass\n"
    )

    # Nothing else that is installed takes part: to import its plugins takes pytest seconds at each start.
    options = ["-p", "xdist.plugin", "-n", "1", "--max-worker-restart", "0", "test_it.py"]
    without = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHON": sys.executable, "PYTHONPATH": str(SCRIPT.parents[1])}

    def code(end: str) -> int:
        (tmp_path / "seen").unlink(missing_ok=True)
        env = {**os.environ, **without, "END": end}
        command = ["sh", str(SCRIPT.with_name("pytest_twice.sh")), "it", *options]
        return subprocess.run(command, cwd=tmp_path, env=env, check=False).returncode

    assert [code("well"), code("fails"), code("ends")] == [0, 1, 3]
