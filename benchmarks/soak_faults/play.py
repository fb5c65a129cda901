"""One run under one fault: what is stored after it, what `--resume` makes of it, and what is left."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.code_digest import code_digest
from benchmarks.soak_faults.cluster_faults import CLUSTER_FAULTS
from benchmarks.soak_faults.faults import FAULTS, Fault
from benchmarks.soak_faults.place import FaultPlace, new_place, rollout_command
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.records.trajectory import trajectory_to_body

_LIMIT_S = 240.0
_SETTLE_S = 15.0
_LOOK_S = 0.2
_TOLD = re.compile(r"\[ *[\d.]+ s\] (?!done )|heddle: ")


@dataclass(slots=True)
class FaultRow:
    """What came of a run.

    Attributes
    ----------
    exit_code
        Of the run; None: it did not end within the limit and was killed.
    said
        Its last words.
    first_line, first_line_s
        What it said first after the fault, but for its progress, and after how many seconds; None: nothing.
    finished, intact
        Trajectories that are stored after the run, and those of them that are equal after the resume.
    failed
        Trajectories whose programs failed, of `total`, at the end.
    left
        Processes and files that are there after the end.
    """

    fault: str
    told: str
    trajectories: int
    exit_code: int | None = None
    run_s: float = 0.0
    said: str = ""
    first_line: str = ""
    first_line_s: float | None = None
    tracebacks: list[str] = field(default_factory=list)
    finished: int = 0
    intact: int = 0
    resume_code: int | None = None
    resume_said: str = ""
    resume_s: float = 0.0
    total: int = 0
    failed: int = 0
    left: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Whether all that must hold after a fault holds."""
        told = self.exit_code in (0, 1, 2) and not self.tracebacks
        whole = self.finished == self.intact and self.total == self.trajectories
        return told and whole and self.resume_code in (0, None) and not self.left

    def as_json(self) -> dict[str, Any]:
        """JSON-able form, a row of a file."""
        return {"kind": "fault", **asdict(self), "succeeded": self.succeeded, "code": code_digest()}

    def line(self) -> str:
        """The run in a line."""
        resumed = "" if self.resume_code is None else f"; resumed: {self.resume_code} in {self.resume_s} s"
        left = f"; left: {', '.join(self.left)}" if self.left else ""
        kept = f"{self.intact} of {self.finished} stored intact, {self.total} of {self.trajectories} at the end"
        ended = "not ended" if self.exit_code is None else f"exit code {self.exit_code}"
        verdict = "" if self.succeeded else "NOT SO: "
        return f"{verdict}{self.told}: {ended} in {self.run_s} s, {kept}{resumed}{left}. {self.said}"


def faults_named(names: Iterable[str]) -> Iterator[tuple[str, Fault]]:
    """The faults, in the order of their names here."""
    for name in names:
        yield name, {**FAULTS, **CLUSTER_FAULTS}[name]()


def play(name: str, fault: Fault) -> FaultRow:
    """Run it."""
    row = FaultRow(name, fault.told, fault.trajectories)
    with new_place() as place:
        with fault.around(place):
            row.exit_code, row.run_s, text = _run(place, fault, row)
            row.said, row.tracebacks = _last_line(text), _tracebacks(text)
            before = _digests(place.out)
            row.finished = len(before)
            if row.exit_code != 0:
                row.resume_code, row.resume_s, text = _run(place, fault, None, "--resume")
                row.resume_said = _last_line(text)
                row.tracebacks += _tracebacks(text)
            after = _digests(place.out)
            row.intact = sum(after.get(name) == digest for name, digest in before.items())
            row.total = len(after)
            row.failed = sum(ended.status != "completed" for ended in StoredRun(place.out).ended()) if after else 0
            row.figures = fault.figures()
        row.left = _left(place)
    return row


def _run(place: FaultPlace, fault: Fault, struck: FaultRow | None, *more: str) -> tuple[int | None, float, str]:
    """Exit code, seconds and what it said; the fault comes and goes, and `struck` gets the first line after it."""
    command = rollout_command(place, fault.trajectories, fault.program, *more)
    log = place.folder / "said.txt"
    began_s = time.monotonic()
    struck_s: float | None = None
    silent = 0
    lifted = False
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env=place.environment(fault.span_s), start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() - began_s < _LIMIT_S:
                time.sleep(_LOOK_S)
                if struck is None:
                    continue
                if struck_s is None and place.ended >= fault.after * fault.trajectories:
                    silent = log.stat().st_size
                    fault.strike(place)
                    struck_s = time.monotonic()
                if struck_s is None:
                    continue
                since_s = time.monotonic() - struck_s
                if not struck.first_line and (line := _first_line(log.read_bytes()[silent:])):
                    struck.first_line, struck.first_line_s = line, round(since_s, 1)
                if not lifted and fault.lasts_s is not None and since_s >= fault.lasts_s:
                    fault.lift(place)
                    lifted = True
            ended_s = time.monotonic() - began_s
            code = process.poll()
        finally:
            process.kill()
            process.wait()
    if struck_s is not None and not lifted:
        _settled(place)
        fault.lift(place)
    return code, round(ended_s, 1), log.read_text(errors="replace")


def _first_line(said: bytes) -> str:
    """The first whole line that tells of an event."""
    lines = said.decode(errors="replace").splitlines(keepends=True)
    return next((line.strip()[:300] for line in lines if line.endswith("\n") and _TOLD.match(line)), "")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("{")]
    return lines[-1][-300:] if lines else ""


def _tracebacks(text: str) -> list[str]:
    return [part[:2000] for part in text.split("Traceback (most recent call last)")[1:]]


def _digests(out: Path) -> dict[str, str]:
    """Of each trajectory that has ended, all of its tokens and times read."""
    try:
        run = StoredRun(out)
    except BadInput:
        return {}
    return {record.trajectory_id: _digest(trajectory_to_body(record)) for record in run}


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=repr).encode()).hexdigest()


def _settled(place: FaultPlace) -> list[str]:
    """Processes that run after a while."""
    deadline = time.monotonic() + _SETTLE_S
    while (running := place.marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return running


def _left(place: FaultPlace) -> list[str]:
    return [*_settled(place), *place.left_files()]
