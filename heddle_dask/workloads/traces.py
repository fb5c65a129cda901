"""Reads recorded trajectories: JSON lines (plain or gzip), one trajectory per line, numbers and labels only.

A missing field or one of the wrong type raises `BadInput`, which names file, line and field. A token count of null is
valid (the recorder did not know it) and becomes None.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import joined_domain
from heddle_dask.core.plain_files import open_plain, plain_lines
from heddle_dask.workloads.recorded import trace_file

# A trajectory of 10,000 steps has two megabytes.
_MOST_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One LLM step and the tool call after it.

    Attributes
    ----------
    generated_tokens, observation_tokens
        Tokens sampled in the step, and tokens of the observation after it; None: not known.
    input_tokens
        Full input of the step; None: not known.
    tool
        Label of the tool; None if none ran.
    tool_s, llm_s
        Seconds of the tool and of the step; None: not known.
    human
        True if `tool_s` is a wait for a person, not for a tool.
    """

    generated_tokens: int | None
    observation_tokens: int | None
    input_tokens: int | None
    tool: str | None
    tool_s: float | None
    llm_s: float | None
    human: bool


@dataclass(frozen=True, slots=True)
class TracedTrajectory:
    """One recorded trajectory.

    Attributes
    ----------
    trajectory_id, group_id
        Unique in the file; group of attempts at one prompt (or of turns of one conversation).
    prompt_tokens
        Tokens before the first step; None: not known.
    complete
        False if the recording was cut off.
    success
        Whether the task was solved; None: not known.
    domain
        Kind of task, known before the first step: origin, environment, kind of thread and permission mode.
    policy
        Model and agent of the recording.
    message_tokens
        Length of the task itself, without the part of the prompt that all tasks share; 0: not known.
    max_steps
        Limit of the number of steps; 0: none known.
    """

    trajectory_id: str
    group_id: str
    prompt_tokens: int | None
    complete: bool
    success: bool | None
    steps: tuple[TracedStep, ...]
    domain: str = ""
    policy: str = ""
    message_tokens: int = 0
    max_steps: int = 0

    @property
    def kind(self) -> str:
        """The kind of trajectory for predictors: its domain and its policy."""
        return joined_domain(self.domain, self.policy)


def read_traces(path: Path | str) -> Iterator[TracedTrajectory]:
    """Yield the trajectories of a trace in order.

    Parameters
    ----------
    path
        A ``.jsonl`` or ``.jsonl.gz`` file, or the name of a recorded trace (`recorded.trace_file`).

    Raises
    ------
    BadInput
        There is no such file or name, it cannot be read, or a line lacks a field; the message names file, line and
        field.
    """
    path = trace_file(path)
    try:
        file = open_plain(path)
    except OSError as error:
        raise BadInput(f"trace file {str(path)!r}: {error.strerror or error}") from error
    number = 0
    with file, _unpacked(file, path) as unpacked:
        try:
            for number, line in enumerate(plain_lines(unpacked, _MOST_LINE_BYTES), 1):
                if line.strip():
                    yield _trajectory(line, f"trace file {str(path)!r}, line {number}")
        except (OSError, EOFError, zlib.error) as error:
            raise BadInput(f"trace file {str(path)!r}, line {number + 1}: cannot be read: {error}") from error


def _unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file


def _trajectory(line: bytes, where: str) -> TracedTrajectory:
    try:
        data = json.loads(line)
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadInput(f"{where}: not a JSON object")
    fields = _Fields(data, where)
    steps = fields.needed("steps", list)
    if not steps:
        raise BadInput(f"{where}: field 'steps' is empty")
    return TracedTrajectory(
        trajectory_id=fields.needed("id", str),
        group_id=fields.needed("group", str),
        prompt_tokens=fields.count("prompt_tokens", needed=True),
        complete=fields.needed("complete", bool),
        success=fields.optional("success", bool),
        steps=tuple(_step(step, f"{where}, step {i + 1}") for i, step in enumerate(steps)),
        domain=_joined(fields, "source", "domain", "kind", "perm"),
        policy=_joined(fields, "model", "agent"),
        message_tokens=_message_tokens(fields, _Fields(steps[0], f"{where}, step 1")),
        max_steps=fields.count("max_turns", needed=False) or 0,
    )


def _joined(fields: _Fields, *names: str) -> str:
    return joined_domain(*(fields.optional(name, str) or "" for name in names))


def _message_tokens(fields: _Fields, first_step: _Fields) -> int:
    """The recorded value; if absent, the tokens of the prompt that no earlier request contained."""
    told = fields.count("user_tokens", needed=False)
    prompt = fields.count("prompt_tokens", needed=False)
    seen = first_step.count("cached_tokens", needed=False)
    if told or prompt is None or seen is None:
        return told or 0
    return max(1, prompt - seen)


def _step(data: Any, where: str) -> TracedStep:
    if not isinstance(data, dict):
        raise BadInput(f"{where}: not a JSON object")
    fields = _Fields(data, where)
    fields.present("tool")
    return TracedStep(
        generated_tokens=fields.count("gen_tokens", needed=True),
        observation_tokens=fields.count("obs_tokens", needed=True),
        input_tokens=fields.count("in_tokens", needed=False),
        tool=fields.optional("tool", str),
        tool_s=fields.seconds("tool_s", needed=True),
        llm_s=fields.seconds("llm_s", needed=False),
        human=bool(fields.count("human", needed=False)),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to one JSON object; errors name its file and line."""

    data: Mapping[str, Any]
    where: str

    def present(self, name: str) -> None:
        if name not in self.data:
            raise BadInput(f"{self.where}: field {name!r} is missing")

    def needed(self, name: str, kind: type) -> Any:
        self.present(name)
        value = self.data[name]
        if not isinstance(value, kind):
            raise BadInput(f"{self.where}: field {name!r} is {value!r:.60}, not a {kind.__name__}")
        return value

    def optional(self, name: str, kind: type) -> Any:
        return None if self.data.get(name) is None else self.needed(name, kind)

    def count(self, name: str, *, needed: bool) -> int | None:
        value = self._number(name, needed=needed)
        if value is not None and not isinstance(value, int):
            raise BadInput(f"{self.where}: field {name!r} is {value!r}, not a whole number")
        return value

    def seconds(self, name: str, *, needed: bool) -> float | None:
        value = self._number(name, needed=needed)
        return None if value is None else float(value)

    def _number(self, name: str, *, needed: bool) -> int | float | None:
        if needed:
            self.present(name)
        value: Any = self.data.get(name)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value < 0:
            raise BadInput(f"{self.where}: field {name!r} is {value!r:.60}, not a number from 0 up")
        return value  # type: ignore[no-any-return]
