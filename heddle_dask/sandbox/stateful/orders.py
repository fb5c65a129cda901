"""What a worker is asked to do in a sandbox, and what a replay compares. All values are plain and can be pickled."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from heddle_dask.sandbox.stateful.contract import ExecResult, SandboxSpec

Compared = Literal["output", "status"]


@dataclass(frozen=True, slots=True)
class ExecOperation:
    """Run a command.

    Attributes
    ----------
    compared
        What must be equal when it is run again to rebuild the sandbox: the outputs and the exit code, or the exit code.
    """

    text: str
    timeout_s: float
    service: str = ""
    compared: Compared = "output"


@dataclass(frozen=True, slots=True)
class PutOperation:
    """Write a file."""

    path: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GetOperation:
    """Read a file; changes nothing."""

    path: str
    most_bytes: int


@dataclass(frozen=True, slots=True)
class StartOperation:
    """Only make the sandbox, such as a copy of another; changes nothing further."""


Operation = ExecOperation | PutOperation | GetOperation | StartOperation


@dataclass(frozen=True, slots=True)
class PastOperation:
    """An operation that has changed the sandbox, the CPUs that it was granted, and the digest of what came of it."""

    operation: ExecOperation | PutOperation
    cpus: int
    digest: str


@dataclass(frozen=True, slots=True)
class SandboxOrder:
    """One operation in one sandbox.

    Attributes
    ----------
    done
        Number of operations that have changed the sandbox before this one.
    past
        These operations, from which a worker without the sandbox rebuilds it; None: they are sent only when a worker
        asks for them (`SandboxMissing`). Without any, the sandbox is new.
    parent, parent_done
        The sandbox of which this one is a copy, and the operations that it had had then; empty: of none.
    """

    sandbox: str
    spec: SandboxSpec
    operation: Operation
    done: int = 0
    past: tuple[PastOperation, ...] | None = None
    parent: str = ""
    parent_done: int = 0


# What two runs of the same command on the same files may print differently without meaning it.
_VARYING = (
    (re.compile(r"\b\d+(?:\.\d+)?\s?(?:ns|us|µs|ms|s|secs?|seconds?)\b"), "<seconds>"),
    (re.compile(r"\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?\b"), "<time>"),
    (re.compile(r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{1,2}\b"), "<day>"),
    (re.compile(r"\b\d{4}-\d{2}-\d{2}\b"), "<day>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "<address>"),
)
_GAP = "\n[... "


def digest_of(result: ExecResult, compared: Compared) -> str:
    """A digest of a result, equal for two runs that do not differ in what is compared.

    Durations, times of day, days and addresses in the outputs are not compared, and of an output whose middle is left
    out only the beginning. What a limit ended is compared by that limit alone: where it stopped is chance.
    """
    if result.ended_by:
        return f"ended by {result.ended_by}"
    if compared == "status":
        return f"exit code {result.exit_code}"
    texts = []
    for output in (result.stdout, result.stderr):
        text = output.partition(_GAP)[0]
        for pattern, common in _VARYING:
            text = pattern.sub(common, text)
        texts.append(text)
    return sha256("\0".join([str(result.exit_code), *texts]).encode("utf-8", "backslashreplace")).hexdigest()
