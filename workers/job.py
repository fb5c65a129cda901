"""The main process of a job of a batch system: ``exec python workers/job.py ADDRESS --name NAME …``.

Starts the job's workers, and has them drained before the job ends. As the last line of a job script, with ``exec``, it
takes the place of the shell and gets the job's signals.
"""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

# Started by its file, Python looks for modules beside it, and finds the package only where it is installed.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
if importlib.util.find_spec("heddle_dask") is None:
    sys.path.insert(0, str(_HERE.parent))

import click

from heddle_dask.core.errors import BadInput
from heddle_dask.isolation.output_streams import keep_output_alive
from heddle_dask.live.clusters.job.launcher import run_job
from heddle_dask.live.clusters.job.options import JobOptions, WorkerTls

EXIT_BAD_INPUT = 2
_SECONDS = click.FloatRange(min=0, min_open=True)
_PATH = click.Path(path_type=Path)


def _ports(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    first, _, last = value.partition(":")
    if not (first.isdigit() and last.isdigit()):
        raise click.BadParameter(f"{value} is no range of ports: give FIRST:LAST")
    return int(first), int(last)


@click.command()
@click.argument("address")
@click.option("--name", required=True, help="of the job; its workers are NAME, or NAME-0, NAME-1, …")
@click.option("--role", type=click.Choice(["rollout", "tool", "trainer"]), default="rollout", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=1, help="Dask workers; one engine on each")
@click.option("--tp-degree", type=click.IntRange(min=1), default=1, help="GPUs of each engine")
@click.option("--engines-per-gpu", type=click.IntRange(min=1), default=1, help="engines that share each GPU")
@click.option("--cpus", type=click.IntRange(min=1), default=1, help="CPUs for the actions of a tool worker")
@click.option(
    "--ends-in",
    "ends_in_s",
    type=_SECONDS,
    default=None,
    help="seconds until the job ends; default: as SLURM says",
)
@click.option("--drain-s", type=_SECONDS, default=120.0, show_default=True, help="drain so long before the end")
@click.option("--kill-wait-s", type=_SECONDS, default=25.0, show_default=True, help="time after SIGTERM")
@click.option("--interface", default=None, help="network interface of the workers")
@click.option("--host", default=None, help="address of the workers, in place of --interface")
@click.option("--worker-ports", callback=_ports, default=None, help="FIRST:LAST")
@click.option("--scratch", type=_PATH, default=None, help="where this job makes its directory")
@click.option("--logs", type=_PATH, default=None, help="directory of logs; default: with the scratch")
@click.option("--tls-ca-file", type=_PATH, default=None)
@click.option("--tls-cert", type=_PATH, default=None)
@click.option("--tls-key", type=_PATH, default=None)
@click.option("--connect-s", type=_SECONDS, default=30.0, show_default=True, help="to reach the scheduler")
def main(tls_ca_file: Path | None, tls_cert: Path | None, tls_key: Path | None, **options: Any) -> None:
    """Host workers of the scheduler at ADDRESS until this job ends."""
    keep_output_alive()
    tls = None
    if tls_ca_file is not None and tls_cert is not None and tls_key is not None:
        tls = WorkerTls(tls_ca_file, tls_cert, tls_key)
    elif tls_ca_file or tls_cert or tls_key:
        raise click.UsageError("give all of --tls-ca-file, --tls-cert and --tls-key, or none")
    try:
        sys.exit(asyncio.run(run_job(JobOptions(tls=tls, **options), os.environ)))
    except BadInput as error:
        print(f"heddle job: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    main()
