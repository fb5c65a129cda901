"""What the end of a job costs: ``python scripts/measure_job_end.py [--rounds 3] [--model DIR]``; one line per end.

Three jobs with an emulated engine each and a tool worker, on this machine. One job ends in the middle of a rollout: it
is killed with all that it has started, or it is told by SIGUSR1 or SIGTERM. The figures are from the run's journal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from distributed import Client

from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.loading import load_environment
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.journal import JournalReader

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "pipelines" / "tiny_agent" / "checkpoint"
SLOTS, SECONDS_PER_TOKEN, TASKS = 8, 0.005, 96


def end_job(job: subprocess.Popen[bytes], how: str) -> None:
    """End one job; a kill takes all its processes at once, as the end of a node or of a job's grace does."""
    if how != "kill":
        job.send_signal(getattr(signal, how))
        return
    for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
        os.kill(process.pid, signal.SIGKILL)


async def one_round(how: str, model: str, directory: Path) -> dict[str, Any]:
    """A rollout during which a job ends."""
    jobs = []
    async with (
        LocalRolloutCluster(0, tool_cpus=8, dashboard=False, asynchronous=True, directory=directory) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        assert cluster._credentials is not None
        for number in range(3):
            command = [sys.executable, str(REPOSITORY / "workers" / "job.py"), cluster.scheduler_address]
            command += ["--name", f"gpu-{number}", "--drain-s", "40", "--scratch", str(directory / "scratch")]
            jobs.append(subprocess.Popen([*command, *cluster._credentials.options], stdout=subprocess.DEVNULL))
        await client.wait_for_workers(4)
        cost = {"seconds_per_token": SECONDS_PER_TOKEN}
        spec = EngineSpec("emulated", model, slots=SLOTS, max_model_len=8192, options=EmulatedOptions(cost=cost))
        environment = load_environment("replay:intercode", options={"token_scale": 1.0, "tool_scale": 1.0})
        out = directory / "run.zarr"
        rollout = Rollout(client, env=environment, model=model, engines=spec, strategy="heddle", seed=1, out=out)
        batch = asyncio.ensure_future(rollout.run(TASKS))
        while rollout.progress().get("generating", 0) < 2 * SLOTS or rollout.progress()["finished"] < 8:
            await asyncio.sleep(0.05)
        began_s = time.monotonic()
        end_job(jobs[0], how)
        await asyncio.to_thread(jobs[0].wait)
        gone_s = time.monotonic() - began_s
        counts = (await batch).counts
        for job in jobs[1:]:
            job.send_signal(signal.SIGTERM)
        for job in jobs[1:]:
            await asyncio.to_thread(job.wait)
    lines = [line for kind, body, _ in JournalReader(journal_path(out)) if kind == "control" for line in body["lines"]]
    return {**figures(lines), "job_ended_s": gone_s, "counts": counts}


def figures(lines: list[Any]) -> dict[str, Any]:
    """Steps that ran again, and how long it took until all of them had begun elsewhere."""
    lost_at, lost_on = next((e[1], e[2]) for e, _ in lines if e[0] == "EngineLost" and e[2].startswith("gpu-0/"))
    open_steps: dict[tuple[Any, ...], float] = {}
    finished: dict[str, int] = {}
    again: dict[tuple[Any, ...], float] = {}
    worst_back = 0
    for event, commands in lines:
        kind, at = event[0], event[1]
        if kind in ("StepStarted",) and at < lost_at and event[3] == lost_on:
            open_steps[tuple(event[2])] = at
        elif kind == "StepFinished":
            open_steps.pop(tuple(event[2]), None) if at < lost_at else None
            if event[6] != "abort":
                finished[event[2][0]] = event[2][1]
        elif kind == "EngineLost" and event[2] == lost_on:
            again = {tuple(c[1]): 0.0 for c in commands if c[0] == "StartStep"}
        elif kind == "StepRequested":
            name, index, _ = event[2][0]
            worst_back = max(worst_back, finished.get(name, -1) + 1 - index)
        if kind == "StepStarted" and at > lost_at and tuple(event[2])[:2] in {key[:2] for key in open_steps}:
            again[tuple(event[2])] = at - lost_at
    begun = [seconds for seconds in again.values() if seconds > 0]
    drained = [at for (_, at, *_), commands in lines for c in commands if c[0] == "ReleaseEngine"]
    draining = [event[1] for event, _ in lines if event[0] == "EngineDraining"]
    return {
        "steps_in_flight_lost": len(open_steps),
        "finished_steps_lost": worst_back,
        "all_begun_again_s": max(begun, default=0.0),
        "drained_s": drained[0] - draining[0] if drained and draining else float("nan"),
        "moves": sum(c[0] == "MoveContext" for _, commands in lines for c in commands),
    }


def main() -> None:
    """Measure every end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--how", nargs="*", default=["kill", "SIGUSR1", "SIGTERM"])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--out", type=Path, help="JSON lines: a row is added when a round ends.")
    options = parser.parse_args()
    for how in options.how:
        rows = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as directory:
                rows.append(asyncio.run(one_round(how, options.model, Path(directory))))
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps({"how": how, **rows[-1]}) + "\n")
        shown = {
            name: [round(row[name], 2) for row in rows] if name != "counts" else [row[name] for row in rows]
            for name in rows[0]
        }
        print(
            how,
            shown,
            f"median time {statistics.median(row['all_begun_again_s'] for row in rows):.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
