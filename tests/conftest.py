"""Fixtures that several test files share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key that signs journalled results is made here and not in the home of the user who runs the tests."""
    home = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(home)
    return home


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
