"""Runs SLURM's commands: one call for all jobs wherever there are several."""

from __future__ import annotations

import asyncio
import getpass
import math
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.live.clusters.slurm.amounts import slurm_time
from heddle_dask.live.clusters.slurm.job_script import submission_environment
from heddle_dask.live.clusters.slurm.queue_parsing import (
    NO_ANSWER,
    SQUEUE_FORMAT,
    job_id_of,
    observations,
    one_line,
    only_busy,
    refusal,
    walltime_limits,
)
from heddle_dask.live.clusters.slurm.replacement import Observation
from heddle_dask.live.clusters.slurm.site_limits import ASSOCIATIONS, PARTITIONS, QOS, SiteLimits, site_limits
from heddle_dask.live.clusters.slurm.worker_group import WorkerGroup

_ANSWER_S = 60.0
_NOT_INSTALLED = 127
_TRIES = 3
_PAUSE_S = 1.0


class SlurmFailed(HeddleError):
    """A SLURM command failed; the message is one line with what it printed."""


class SlurmQueue:
    def __init__(self) -> None:
        self.squeue_calls = 0  # how often it was asked: sites limit this

    async def check_walltimes(self, groups: Iterable[WorkerGroup]) -> None:
        """Refuse walltimes over the limit of the partition: most sites accept such jobs, and never start them."""
        code, out, _ = await _run(["sinfo", "-h", "-o", "%R|%l"])
        limits = {} if code else walltime_limits(out)
        for group in groups:
            partitions = (group.partition or "").split(",")
            longest_s = max((limits.get(name, math.inf) for name in partitions), default=math.inf)
            if group.walltime_s is not None and group.walltime_s > longest_s:
                raise BadInput(
                    f"group {group.name}: walltime {slurm_time(group.walltime_s)} exceeds the limit "
                    f"{slurm_time(longest_s)} of partition {group.partition}: its jobs would never start"
                )

    async def check(self, group: str, script: str) -> None:
        """Have SLURM check a job script without submitting it.

        Raises
        ------
        BadInput
            SLURM would refuse the job, or is not there; with its message.
        """
        code, out, error = await self._with_script(["sbatch", "--test-only"], script)
        printed = f"{error}\n{out}"
        if code == _NOT_INSTALLED:
            raise BadInput(f"{error}, or use backend = 'local'")
        if code and any(sign in error for sign in NO_ANSWER):
            raise BadInput(f"SLURM does not answer: {refusal(printed)}")
        if code and not only_busy(printed):
            raise BadInput(
                f"group {group}: SLURM refuses its jobs: {refusal(printed)}: change the group in the cluster file"
            )

    async def site_limits(self) -> SiteLimits:
        """What the site allows this user, as far as SLURM says so."""
        (_, partitions, _), (no_qos, qos, _), (no_accounts, accounts, _) = await asyncio.gather(
            *(_run(command) for command in (PARTITIONS, QOS, ASSOCIATIONS))
        )
        return site_limits(partitions, None if no_qos else qos, None if no_accounts else accounts, getpass.getuser())

    async def submit(self, script: str) -> str:
        """Submit a job script and return the job's id.

        Raises
        ------
        SlurmFailed
        """
        code, out, error = await self._with_script(["sbatch", "--parsable"], script)
        if code:
            raise SlurmFailed(refusal(error or out))
        try:
            return job_id_of(out)
        except ValueError as problem:
            raise SlurmFailed(str(problem)) from None

    async def observe(self, names: Mapping[str, str]) -> dict[str, Observation]:
        """What SLURM says of these jobs (names by id), in one call.

        Raises
        ------
        SlurmFailed
            It does not say: nothing is known.
        """
        self.squeue_calls += 1
        argv = ["squeue", "-h", "-t", "all", "-o", SQUEUE_FORMAT, "-j", ",".join(names)]
        code, out, error = await _run(argv)
        # The only job of the question, or the last of them, is forgotten.
        if code and "Invalid job id" not in error:
            raise SlurmFailed(f"squeue: {one_line(error)}")
        return observations(out, names, time.monotonic(), time.time())

    async def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs, in one call; those that have ended are left alone.

        Raises
        ------
        SlurmFailed
        """
        if not job_ids:
            return
        code, _, error = await _run(["scancel", *job_ids])
        if code and "Invalid job id" not in error and "already completing" not in error:
            raise SlurmFailed(f"scancel: {one_line(error)}")

    async def end_steps(self, job_id: str, names: Sequence[str]) -> None:
        """Ask steps of an allocation to leave, by name: `srun` itself hands no SIGTERM on.

        A step that cannot be asked is ended with its `srun` in any case.
        """
        _, out, _ = await _run(["squeue", "-h", "--steps", "-j", job_id, "-o", "%i %j"])
        steps = [line.split(maxsplit=1) for line in out.splitlines()]
        mine = [step[0] for step in steps if len(step) == 2 and step[1].strip() in names]
        if mine:
            await _run(["scancel", "--signal=TERM", *mine])

    async def _with_script(self, argv: Sequence[str], script: str) -> tuple[int, str, str]:
        """Run sbatch with a script, again when only the controller did not answer."""
        with tempfile.NamedTemporaryFile("w", prefix="heddle-job-", suffix=".sh") as file:
            file.write(script)
            file.flush()
            for again in range(_TRIES):
                code, out, error = await _run([*argv, file.name])
                if not code or again == _TRIES - 1 or not any(sign in error for sign in NO_ANSWER):
                    return code, out, error
                await asyncio.sleep(_PAUSE_S * 2**again)
        raise AssertionError("unreachable")


async def _run(argv: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    # Times are parsed, whatever the user has set for reading them.
    env = {**submission_environment(os.environ), "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"}
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            # Ctrl-C at the terminal must not end a command half way.
            start_new_session=True,
        )
    except FileNotFoundError:
        return _NOT_INSTALLED, "", f"{argv[0]} is not installed here: run where SLURM's commands are"
    try:
        out, error = await asyncio.wait_for(process.communicate(), _ANSWER_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 124, "", f"{argv[0]} has not answered for {_ANSWER_S:.0f} s"
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace"), error.decode(errors="replace")
