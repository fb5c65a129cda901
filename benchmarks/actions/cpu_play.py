"""Runs jobs of the CPU experiments: once each, in this process or on a Dask cluster, kept in a file if one is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.actions.cpu_job import CpuFigures, CpuJob, figures_from, run_cpu_job
from heddle_dask.core.errors import BadInput

RunJobs = Callable[[Sequence[CpuJob], Callable[[int, CpuFigures], None]], None]
"""Runs all jobs, and calls the function with the number and the figures of each one that has ended."""


def run_here(jobs: Sequence[CpuJob], ended: Callable[[int, CpuFigures], None]) -> None:
    """Run one job after the other in this process."""
    for number, job in enumerate(jobs):
        ended(number, run_cpu_job(job))


class CpuPlay:
    """Figures by job.

    Parameters
    ----------
    code
        Digest of the code that decides; figures of other code in the file are run again.
    path
        JSON-lines file that gets each result at once; None: memory only.
    run
        Runs what is not known yet.
    say
        Takes a line per job; also kept as an attribute for other measurements.

    Raises
    ------
    BadInput
        The file cannot be read or written, or has other content.
    """

    def __init__(
        self, code: str, path: Path | None, run: RunJobs = run_here, say: Callable[[str], None] = print
    ) -> None:
        self._code = code
        self._path = path
        self._run = run
        self.say = say
        self._known: dict[str, CpuFigures] = {}
        if path is not None and path.exists():
            self._known.update(_read(path, code))

    def figures(self, jobs: Sequence[CpuJob]) -> list[CpuFigures]:
        """The figures of the jobs, in their order."""
        fresh = list({job.key: job for job in jobs if job.key not in self._known}.values())

        def ended(number: int, figures: CpuFigures) -> None:
            job = fresh[number]
            self._known[job.key] = figures
            self._append(job, figures)
            self.say(
                f"{job.batch} trajectories, {job.cores} cores, {_arm(job)}, seed {job.seed}: "
                f"ACT {figures.act_mean_s:.3f} s, step {figures.step_s:,.0f} s ({figures.cpu_s:.1f} s of CPU)"
            )

        if fresh:
            self._run(fresh, ended)
        return [self._known[job.key] for job in jobs]

    def _append(self, job: CpuJob, figures: CpuFigures) -> None:
        if self._path is None:
            return
        line = json.dumps({"code": self._code, "job": job.key, "figures": asdict(figures)})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise BadInput(f"{self._path}: {error.strerror}; give a file that can be written") from None


def _arm(job: CpuJob) -> str:
    if job.pods is None:
        return job.actions
    return f"pods of {job.pods.request_cpus:g} to {job.pods.limit_cpus:g} CPUs"


def _read(path: Path, code: str) -> Iterator[tuple[str, CpuFigures]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: {error}; give a file that can be read") from None
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line)
            if row["code"] == code:
                yield row["job"], figures_from(row["figures"])
        except (ValueError, KeyError, TypeError):
            if number < text.count("\n") + 1 and text.endswith("\n"):
                raise BadInput(
                    f"{path}, line {number}: no result of this command; give another file"
                ) from None
