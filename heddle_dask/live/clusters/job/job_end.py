"""When a job of a batch system ends, as far as anything tells."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Callable, Mapping

JOB_VARIABLE = "SLURM_JOB_ID"
END_VARIABLE = "SLURM_JOB_END_TIME"
_ANSWER_S = 20.0


def squeue_end(job_id: str) -> str:
    """What ``squeue`` says is the end of the job; empty when it does not answer."""
    command = ("squeue", "-h", "-j", job_id, "-o", "%e")
    # The variable would change the format of the answer.
    environ = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=True, env=environ
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def seconds_to_end(
    ends_in_s: float | None,
    environ: Mapping[str, str],
    now_s: float,
    asked: Callable[[str], str] = squeue_end,
) -> float | None:
    """Seconds until the job ends: as the option says, else its environment, else ``squeue``; None when none knows.

    Parameters
    ----------
    now_s
        Seconds since the epoch.
    asked
        Takes the id of the job, and answers as `squeue_end` does.
    """
    if ends_in_s is not None:
        return ends_in_s
    stated = environ.get(END_VARIABLE, "")
    if stated.isdigit():
        return max(0.0, int(stated) - now_s)
    job_id = environ.get(JOB_VARIABLE)
    end_s = None if job_id is None else parsed_end(asked(job_id))
    return None if end_s is None else max(0.0, end_s - now_s)


def parsed_end(text: str) -> float | None:
    """Seconds since the epoch of an end as ``squeue`` prints it, in the node's time zone; None for none ("N/A")."""
    try:
        return datetime.datetime.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S").timestamp()
    except ValueError:
        return None
