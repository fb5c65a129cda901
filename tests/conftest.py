"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

REPOSITORY = Path(__file__).parents[1]

# A busy machine is slow and not wrong: no example of a property test has a deadline.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def model_dir() -> str:
    """The shipped model directory: its tokenizer and template are real whatever engine runs."""
    return str(REPOSITORY / "pipelines" / "tiny_agent" / "checkpoint")
