"""The SLURM that the tests in this folder share: started once, emptied before every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from slurm.lab import SEARCH, Lab, missing_daemons, running_lab


@pytest.fixture(scope="session")
def slurm_daemons() -> Iterator[Lab]:
    """A SLURM on this machine; `SLURM_CONF` points at it, in this process and in those that it starts."""
    if missing := missing_daemons():
        pytest.skip(f"{', '.join(missing)} not installed: scripts/install_slurm.sh")
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    with running_lab() as lab:
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
