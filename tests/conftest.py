"""Fixtures that several test files share."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).parents[1]

# A busy machine is slow and not wrong: neither an example nor its generation is timed. `make test` has the same verdict
# every time: examples follow from the test itself, and none are kept. `make explore` draws new examples and keeps
# those that fail in `.hypothesis`.
_untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("deterministic", _untimed, derandomize=True, database=None)
settings.register_profile("explore", _untimed, max_examples=500, print_blob=True)
# `--hypothesis-profile` is read later and loads another one.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


_RECORDED = REPOSITORY / "tests" / "file_seconds.tsv"
# Of a file that no run has recorded, by its tests' markers.
_GUESSED_S = {"vllm": 60.0, "cluster": 20.0, "slow": 10.0}
_LOST = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: `--dist loadfile` hands out files in this order, and the last one must not be a long one."""
    lines = _RECORDED.read_text(encoding="utf-8").splitlines() if _RECORDED.exists() else []
    recorded = {name: float(seconds) for seconds, name in (line.split("\t") for line in lines)}
    weights: dict[Path, float] = {}
    for item in items:
        guessed = max((_GUESSED_S.get(mark.name, 0.0) for mark in item.iter_markers()), default=0.0)
        weights[item.path] = max(weights.get(item.path, 0.0), guessed)
        if guessed and _is_live(item) and not _names_a_live_marker(item.path):
            raise pytest.UsageError(f"{item.nodeid} is live by a marker of another file: `make test` would miss it")
    for path in weights:
        name = path.relative_to(REPOSITORY).as_posix()
        weights[path] = recorded.get(name, weights[path])
    items.sort(key=lambda item: -weights[item.path])


def _is_live(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("cluster", "vllm"))


@functools.cache
def _names_a_live_marker(path: Path) -> bool:
    """Whether `make test` finds the file for its live stage."""
    return re.search(r"mark\.(cluster|vllm)", path.read_text(encoding="utf-8")) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Where `make test` collects the seconds of tests: only here, not in the processes of xdist."""
    if "HEDDLE_TEST_TIMES" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Times(Path(os.environ["HEDDLE_TEST_TIMES"])), "times")


class _Times:
    """Appends a line with the seconds of each test, its fixtures included (see scripts/test_times.py)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        stage = os.environ.get("HEDDLE_TEST_STAGE", "")
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{seconds:.2f}\t{stage}\t{test}\n" for test, seconds in self.seconds.items())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A process of xdist that ends takes tests with it that have not run, which no second run heals."""
    node.config.stash[_LOST] = node.config.stash.get(_LOST, False) or bool(error)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(_LOST, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key that signs journalled results is made here and not in the home of the user who runs the tests."""
    home = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(home)
    return home


@pytest.fixture(scope="session", autouse=True)
def shared_clusters_end(state_home: Path) -> Iterator[None]:
    """Those that tests of this process have shared, if any has asked for one."""
    yield
    shared = sys.modules.get("worlds.shared_cluster")
    if shared is not None:
        shared.close_shared_clusters()


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores do not wait for the disk: no test crashes the machine, and waiting takes half a second per append."""
    monkeypatch.setattr("heddle_dask.records.synced_store.sync_path", lambda path: None)


@pytest.fixture(scope="session")
def model_dir() -> str:
    """The shipped model directory: its tokenizer and template are real whatever engine runs."""
    return str(REPOSITORY / "pipelines" / "tiny_agent" / "checkpoint")


@pytest.fixture
def sandbox_directory() -> Iterator[Path]:
    """A directory for sandboxes: other users may pass through it, which pytest's own directories do not allow."""
    path = Path(tempfile.mkdtemp(prefix="heddle-test-boxes-"))
    path.chmod(0o711)
    yield path
    left = sorted(each.name for each in path.iterdir())
    shutil.rmtree(path)
    assert left == [], "sandboxes are left"
