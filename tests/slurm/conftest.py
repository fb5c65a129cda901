"""The SLURM that the tests in this folder share: started once, emptied before every test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from slurm.groups import Background, start, write_agents, write_cluster_file
from slurm.lab import SEARCH, Lab, missing_daemons, running_lab

IN_THE_BACKGROUND = "longer_than_a_walltime"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Begin the rollout that takes minutes with the first test of its file, which is the first file, and ask for its
    result in the last test.

    Where files run beside each other, a file is in one process from its first test to its last.
    """
    asking = [item for item in items if IN_THE_BACKGROUND in getattr(item, "fixturenames", ())]
    files = {item.path for item in asking}
    meanwhile = [item for item in items if item.path in files and item not in asking]
    items[:] = [*meanwhile, *(item for item in items if item.path not in files), *asking]
    first = next((item for item in meanwhile if item.get_closest_marker("slurm")), None)
    if first is not None:
        first.fixturenames.insert(0, IN_THE_BACKGROUND)


@pytest.fixture(scope="session")
def slurm_daemons() -> Iterator[Lab]:
    """A SLURM on this machine; `SLURM_CONF` points at it, in this process and in those that it starts."""
    if missing := missing_daemons():
        pytest.skip(f"{', '.join(missing)} not installed: scripts/install_slurm.sh")
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    with running_lab(accounting=True) as lab:
        os.environ.update(SLURM_CONF=str(lab.conf), PATH=SEARCH)
        yield lab
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture
def slurm(slurm_daemons: Lab) -> Iterator[Lab]:
    """The SLURM of this session without any job in it, before and after the test."""
    slurm_daemons.clear()
    yield slurm_daemons
    slurm_daemons.clear()


@pytest.fixture(scope="session")
def longer_than_a_walltime(slurm_daemons: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    """Engines in jobs of two minutes, and two and a half minutes of work for them; on a SLURM of their own.

    Three trajectories take steps and call tools, the agent of a fourth one asks its gateway.
    """
    directory = tmp_path_factory.mktemp("walltime")
    short = 'role = "rollout"\npartition = "short"\ngres = "gpu:1"\ncpus = 2\nwalltime = "2min"\ndrain = "25s"\n'
    with ExitStack() as stack:
        lab = stack.enter_context(running_lab())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-scratch-")))
        scratch.chmod(0o711)
        write_cluster_file(directory, scratch=scratch, short=short + 'start-timeout = "30s"\n', cpu="")
        write_agents(directory, seconds_per_token=0.1)
        process = start(
            directory,
            "--tasks",
            "4",
            "--samples",
            "1",
            "--max-steps",
            "100",
            STEPS="65",
            AGENT_S="130",
            TOKENS="20",
            SLURM_CONF=str(lab.conf),
        )
        # Left out, the test that reads what it says does not close its pipes.
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                stack.callback(pipe.close)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        yield Background(lab, process, directory)
