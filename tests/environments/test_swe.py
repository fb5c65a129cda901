"""SWE-style rows: their images, commands and tests, judged as SWE-bench's own package judges them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.agent_tasks import load_agent_tasks
from heddle_dask.environments.task_sets.swe import SweTasks, image_of
from heddle_dask.environments.task_sets.swe_tests import NoTests, files_of_patch, named_tests, shares, statuses_of

PEERS = Path(__file__).parents[2] / "build" / "peers" / "site"
PATCH = "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n"
ROW: dict[str, Any] = {
    "instance_id": "org__project-7",
    "repo": "org/project",
    "base_commit": "abc",
    "problem_statement": "It is broken.",
    "test_patch": PATCH,
    "FAIL_TO_PASS": json.dumps(["tests/test_a.py::test_one"]),
    "PASS_TO_PASS": ["tests/test_b.py::test_two[a b]", "tests/test_b.py::test_three"],
}
KEPT = ["tests/test_b.py::test_three", "tests/test_b.py::test_two[a", "tests/test_b.py::test_skipped"]
LOG = """+ pytest -rA
>>>>> Start Test Output
tests/test_a.py .F
==== short test summary info ====
\x1b[32mPASSED\x1b[0m tests/test_a.py::\x1b[1mtest_one\x1b[0m
PASSED tests/test_b.py::test_two[a b]
XFAIL tests/test_b.py::test_three
SKIPPED [1] tests/test_d.py:3: no such machine
SKIPPED tests/test_b.py::test_skipped
FAILED tests/test_b.py::test_other - assert 1 == 2
>>>>> End Test Output
PASSED tests/test_c.py::of_another_run
"""


def rows_in(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_are_tasks_with_images_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "swebench_sweb.eval.x86_64.org_1776_project-7.tar").touch()
    loaded = load_agent_tasks(rows_in(tmp_path / "set.jsonl", ROW), options={"images": str(tmp_path / "images")})
    assert isinstance(loaded, SweTasks)
    (task,) = loaded.tasks(1, 0)
    assert (task.task_id, task.domain, loaded.work_directory(task)) == ("org__project-7", "org/project", "/testbed")
    assert task.prompt.endswith("It is broken.") and "problem_statement" not in task.payload
    assert loaded.sandbox(task)["image"].endswith("org_1776_project-7.tar")
    assert image_of({**ROW, "image_name": "own:1"}) == "own:1"


def test_rows_without_an_image_are_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = rows_in(tmp_path / "set.jsonl", ROW)
    with pytest.raises(BadInput, match=r"none can be run here: org__project-7: its image swebench/.* is not here"):
        load_agent_tasks(path)
    (tmp_path / "images.toml").write_text('"swebench/*" = "{name}.tar"\n')
    other = {**ROW, "instance_id": "org__other", "FAIL_TO_PASS": ["test_a (app.Tests)"], "PASS_TO_PASS": []}
    tasks = SweTasks(rows_in(tmp_path / "set.jsonl", ROW, other))
    assert "set.jsonl: 1 cannot be run here and are left out: org__other: its tests are not" in caplog.text
    assert tasks.size == 1 and "neither eval_script nor test_cmd" in tasks.refused["org__other"]


def test_commands_come_from_the_row() -> None:
    assert named_tests(ROW).script.endswith("python -m pytest -rA -p no:cacheprovider tests/test_a.py tests/test_b.py")
    given = named_tests({**ROW, "install_config": {"test_cmd": "pytest -x", "log_parser": "parse_log_pytest"}})
    assert given.script.endswith("\npytest -x tests/test_a.py") and not given.applies_patch
    ready = named_tests({**ROW, "eval_script": "#!/bin/bash\nrun"})
    assert (ready.script, ready.applies_patch) == ("#!/bin/bash\nrun", True)
    assert files_of_patch(PATCH) == ["tests/test_a.py"]
    with pytest.raises(NoTests, match="no FAIL_TO_PASS"):
        named_tests({**ROW, "FAIL_TO_PASS": "[]"})
    with pytest.raises(NoTests, match="is read by parse_log_django of SWE-bench: pip install swebench"):
        named_tests({**ROW, "log_parser": "parse_log_django"})
    with pytest.raises(BadInput, match="PASS_TO_PASS is no list of names"):
        named_tests({**ROW, "PASS_TO_PASS": "tests/test_a.py"})


@pytest.fixture
def swebench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its grading, without what it needs for Docker and for Modal."""
    if not (PEERS / "swebench").is_dir():
        pytest.skip("SWE-bench's wheel is not in build/peers: `make test` brings it")
    monkeypatch.syspath_prepend(PEERS)
    harness = ModuleType("swebench.harness")
    harness.__path__ = [str(PEERS / "swebench" / "harness")]
    monkeypatch.setitem(sys.modules, "swebench.harness", harness)
    from swebench.harness import grading

    yield grading
    for name in [each for each in sys.modules if each.partition(".")[0] == "swebench"]:
        del sys.modules[name]


@pytest.mark.parametrize("parser", ["parse_log_pytest_v2", "parse_log_django"])
@pytest.mark.parametrize("fails", ["", "tests/test_a.py::test_one", "tests/test_b.py::test_three"])
def test_verdicts_are_those_of_swe_bench(parser: str, fails: str, swebench: Any, tmp_path: Path) -> None:
    log, row = LOG, {**ROW, "log_parser": parser, "PASS_TO_PASS": KEPT}
    if parser == "parse_log_django":
        names = {"tests/test_a.py::test_one": "test_one (app.A)", "tests/test_b.py::test_three": "test_three (app.B)"}
        told = "".join(f"{name} ... {'FAIL' if old == fails else 'ok'}\n" for old, name in names.items())
        log = f">>>>> Start Test Output\n{told}>>>>> End Test Output\n"
        row |= {
            "FAIL_TO_PASS": ["test_one (app.A)"],
            "PASS_TO_PASS": ["test_three (app.B)"],
            "test_cmd": "./runtests.py",
        }
    elif fails:
        log = log.replace(
            "\x1b[32mPASSED\x1b[0m tests/test_a.py::\x1b[1mtest_one\x1b[0m", "PASSED tests/test_a.py::test_one"
        )
        log = "\n".join(f"FAILED {fails} - no" if fails in line else line for line in log.splitlines())
    (tmp_path / "log").write_text(log)
    tests = named_tests(row)
    spec = swebench.TestSpec(
        *("org__project-7", "image", [], "org/project", "1"),
        list(tests.fail_to_pass),
        list(tests.pass_to_pass),
        log_parser=parser,
        eval_type="pass_and_fail",
    )
    prediction = {"instance_id": "org__project-7", "model_patch": "x"}
    report = swebench.get_eval_report(spec, prediction, str(tmp_path / "log"), True)["org__project-7"]
    parts = shares(tests, statuses_of(tests, log))
    assert report["resolved"] == all(part == 1.0 for part in parts.values()) == (not fails)
    status = report["tests_status"]
    for name, part in (("FAIL_TO_PASS", "fail_to_pass"), ("PASS_TO_PASS", "pass_to_pass")):
        assert parts[part] == len(status[name]["success"]) / (
            len(status[name]["success"]) + len(status[name]["failure"])
        )
