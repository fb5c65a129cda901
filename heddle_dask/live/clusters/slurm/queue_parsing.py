"""What SLURM's commands print, and what it means for a job. Pure text; `queue` runs the commands."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from heddle_dask.live.clusters.slurm.replacement import JobPhase, NotTaken, Observation

SQUEUE_FORMAT = "%i|%T|%e|%r"

# A job with such a reason waits until its request, or the site's configuration, is changed: SLURM's list of reason
# codes ("job_reason_codes"), without those that pass by themselves (limits over several jobs, nodes that are down,
# reservations that have not begun) and without holds, which somebody has set and may lift.
_NEVER = frozenset(
    {
        "AccountNotAllowed",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "JobLaunchFailure",
        "PartitionConfig",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "ReservationDeleted",
    }
)
# One job alone is over (or under) what an association or a QOS allows a job or a node.
_NEVER_PATTERN = re.compile(r"(Assoc|QOS)Max\w*(PerJob|PerNode)(Limit)?|QOSMin\w+")

# A limit over the jobs of a user, an account or a partition.
_LIMIT = re.compile(r"\b(?:Assoc|QOS|MaxSubmit|Partition)\w*Limit\b")
# Of a controller that is busy or just being restarted: the same command works a moment later.
NO_ANSWER = ("Socket timed out", "Unable to contact slurm controller", "Zero Bytes were transmitted")

_PENDING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
_RUNNING = frozenset(
    {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
)
_ENDS = {
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it ended",
    "DEADLINE": "its deadline has passed",
    "FAILED": "it failed",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
    "TIMEOUT": "its walltime has passed",
}
_PLANNED = frozenset({"COMPLETED", "TIMEOUT"})


def can_never_start(reason: str) -> bool:
    """Whether a pending job with this reason waits for something that time does not bring."""
    code = reason.split(",")[0].strip("() ")
    return code in _NEVER or _NEVER_PATTERN.fullmatch(code) is not None


def job_id_of(printed: str) -> str:
    """The id that ``sbatch --parsable`` prints, perhaps after a site's own lines, perhaps with ``;CLUSTER`` behind it.

    Raises
    ------
    ValueError
        There is none.
    """
    for line in reversed(printed.splitlines()):
        if re.fullmatch(r"\d+(;\S+)?", line.strip()):
            return line.strip().split(";")[0]
    raise ValueError(f"sbatch printed no job id: {one_line(printed)}")


def observations(printed: str, asked: Mapping[str, str], now_s: float, wall_s: float) -> dict[str, Observation]:
    """What ``squeue -h -t all -o SQUEUE_FORMAT`` says of the jobs that were asked for.

    Parameters
    ----------
    asked
        Name of each job by id. One that is not printed has ended some time ago.
    now_s, wall_s
        The same moment on the clock of the records, and as seconds since the epoch.
    """
    found: dict[str, Observation] = {}
    for line in printed.splitlines():
        parts = line.strip().split("|", 3)
        if len(parts) == 4 and parts[0] in asked:
            _, state, end, reason = parts
            found[asked[parts[0]]] = _observation(state, _monotonic(end, now_s, wall_s), reason)
    gone = Observation(JobPhase.ENDED, "SLURM knows it no more")
    return {name: found.get(name, gone) for name in asked.values()}


def _observation(state: str, ends_s: float | None, reason: str) -> Observation:
    state = state.split()[0].rstrip("+")
    told = "" if reason in ("", "None") else reason
    if state in _PENDING:
        return Observation(JobPhase.REFUSED if can_never_start(told) else JobPhase.PENDING, told)
    if state in _RUNNING:
        return Observation(JobPhase.RUNNING, "" if state == "RUNNING" else state.lower(), ends_s)
    ended = _ENDS.get(state, f"its state is {state}")
    detail = f" ({told})" if told and state not in _PLANNED else ""
    return Observation(JobPhase.ENDED, f"{ended}{detail}", planned=state in _PLANNED)


def _monotonic(end: str, now_s: float, wall_s: float) -> float | None:
    """A printed local time on the clock of the records; None: unknown or unlimited."""
    try:
        return time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S")) - wall_s + now_s
    except ValueError:
        return None


def walltime_limits(printed: str) -> dict[str, float]:
    """Longest walltime in seconds of each partition that ``sinfo -h -o "%R|%l"`` names with one."""
    limits: dict[str, float] = {}
    for line in printed.splitlines():
        partition, _, limit = line.strip().partition("|")
        clock = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
        if clock is not None:
            days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
            limits[partition] = 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    return limits


def refusal(printed: str) -> str:
    """SLURM's own words in what ``sbatch`` printed, in one line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [re.sub(r"^(sbatch|srun): (error: )?", "", line) for line in lines if "error:" in line]
    failure = [re.sub(r"^(sbatch|srun): ", "", line) for line in lines if "allocation failure" in line]
    return one_line("; ".join(errors or failure or lines)) or "sbatch failed and printed nothing"


def only_busy(printed: str) -> bool:
    """Whether a refused ``sbatch --test-only`` only means that the nodes are in use now."""
    return "Requested nodes are busy" in printed


def refusal_kind(printed: str) -> NotTaken:
    """Whether a submission was refused for a limit over several jobs, or because SLURM did not answer."""
    if any(sign in printed for sign in NO_ANSWER):
        return NotTaken.SILENCE
    over = [code for code in _LIMIT.findall(printed) if not can_never_start(code)]
    return NotTaken.LIMIT if over else NotTaken.NONE


def short_refusal(printed: str) -> str:
    """The code of the limit in SLURM's words; all of them where there is none."""
    found = _LIMIT.search(printed)
    return found[0] if found is not None else one_line(printed)


def one_line(text: str) -> str:
    """`text` without line breaks."""
    return " ".join(text.split())
