"""What tells of a job of a batch system on this node: when it ends, and its memory."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Callable, Mapping

JOB_VARIABLE = "SLURM_JOB_ID"
END_VARIABLE = "SLURM_JOB_END_TIME"
_MIB = 1 << 20
_ANSWER_S = 20.0
_WARNS_EARLY_S = 60.0


def squeue_end(job_id: str) -> str:
    """What ``squeue`` says is the end of the job; empty when it does not answer."""
    command = ("squeue", "-h", "-j", job_id, "-o", "%e")
    # The variable would change the format of the answer.
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True, env=environ)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def seconds_to_end(
    ends_in_s: float | None,
    environ: Mapping[str, str],
    now_s: float,
    asked: Callable[[str], str] = squeue_end,
) -> float | None:
    """Seconds until the job ends: as its environment says, else ``squeue``, and no more than the option; None: unknown.

    The option counts from the start of this process, and a job has begun before; the batch system may also have given
    it less time than it asked for.

    Parameters
    ----------
    now_s
        Seconds since the epoch.
    asked
        Takes the id of the job, and answers as `squeue_end` does.
    """
    end_s = _batch_end(environ, asked)
    known = [] if ends_in_s is None else [ends_in_s]
    if end_s is not None:
        known.append(max(0.0, end_s - now_s))
    return min(known, default=None)


def _batch_end(environ: Mapping[str, str], asked: Callable[[str], str]) -> float | None:
    stated = environ.get(END_VARIABLE, "")
    if stated.isdigit():
        return float(stated)
    job_id = environ.get(JOB_VARIABLE)
    return None if job_id is None else parsed_end(asked(job_id))


def warns_early(left_s: float, drain_s: float) -> bool:
    """Whether a SIGUSR1 is the warning of ``--signal`` before its time: SLURM sends it up to a minute early.

    A SIGUSR1 with more time left is somebody's wish.
    """
    return 0 < left_s - drain_s < _WARNS_EARLY_S


def parsed_end(text: str) -> float | None:
    """Seconds since the epoch of an end as ``squeue`` prints it, in the node's time zone; None for none ("N/A")."""
    try:
        return datetime.datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S").timestamp()
    except ValueError:
        return None


def job_memory_bytes(environ: Mapping[str, str]) -> int:
    """Bytes of ``--mem`` or ``--mem-per-cpu`` as SLURM passes them on (in mebibytes); 0: nothing tells, or no limit."""
    per_node = _number(environ.get("SLURM_MEM_PER_NODE", ""))
    per_cpu = _number(environ.get("SLURM_MEM_PER_CPU", ""))
    return (per_node or per_cpu * _number(environ.get("SLURM_CPUS_ON_NODE", ""))) * _MIB


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
