"""How long a sandbox takes: of the machine's own files, and of an unpacked image; one by one, and many at once."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.tables import Column, print_measured_rows
from heddle_dask.cli.shared_options import COUNT, shared_options
from heddle_dask.sandbox.images.cache import HeldImage
from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.program_files import disk_usage
from heddle_dask.sandbox.stateful.contract import Command, SandboxSpec
from heddle_dask.sandbox.stateful.kinds import kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox


@dataclass(frozen=True, slots=True)
class SandboxRow:
    """Sandboxes of one kind; seconds are medians where nothing else is said.

    Attributes
    ----------
    unpack_s, image_bytes, image_files
        Of the image, once; 0 without one.
    start_s, longest_start_s
        Until the first command can be given.
    command_s
        Of ``true``.
    all_started_s
        Until `at_once` sandboxes that begin together have all started.
    """

    of: str
    unpack_s: float
    image_bytes: int
    image_files: int
    starts: int
    start_s: float
    longest_start_s: float
    command_s: float
    at_once: int
    all_started_s: float


async def measured(of: str, spec: SandboxSpec, base: Path, starts: int, at_once: int) -> SandboxRow:
    """Make sandboxes from one description, in a directory."""
    accounting = ProcessAccounting()

    async def started(name: str) -> tuple[LocalSandbox, float]:
        box = LocalSandbox(name, spec, kind_named("bubblewrap"), base, accounting)
        before_s = time.perf_counter()
        await box.start()
        return box, time.perf_counter() - before_s

    before_s = time.perf_counter()
    root = ""
    if spec.image:
        held = await asyncio.to_thread(HeldImage.of, spec.image)
        root = held.image.root
        held.release()
    unpack_s = time.perf_counter() - before_s
    seconds, commands = [], []
    for number in range(starts):
        box, took_s = await started(f"{of} {number}")
        seconds.append(took_s)
        commands.append((await box.exec(Command("true"))).seconds)
        await box.stop()
    before_s = time.perf_counter()
    together = await asyncio.gather(*(started(f"{of} together {number}") for number in range(at_once)))
    all_started_s = time.perf_counter() - before_s
    await asyncio.gather(*(box.stop() for box, _ in together))
    size = disk_usage(root) if root else None
    return SandboxRow(
        of,
        round(unpack_s, 4) if root else 0.0,
        size.used_bytes if size else 0,
        size.files if size else 0,
        starts,
        round(median(seconds), 4),
        round(max(seconds), 4),
        round(median(commands), 4),
        at_once,
        round(all_started_s, 3),
    )


def rows(image: Path | None, starts: int, at_once: int) -> Iterator[SandboxRow]:
    """A row for sandboxes without an image, and one for those of `image`, which is unpacked first."""
    base = Path(tempfile.mkdtemp(prefix="heddle-bench-boxes-"))
    base.chmod(0o711)
    try:
        yield asyncio.run(measured("machine", SandboxSpec(), base, starts, at_once))
        if image is not None:
            spec = SandboxSpec(image=str(image.absolute()))
            yield asyncio.run(measured("image", spec, base, starts, at_once))
    finally:
        shutil.rmtree(base)


@click.command("sandboxes")
@click.option("--image", type=click.Path(path_type=Path, exists=True), help="As in `ctx.sandbox(image=…)`.")
@click.option("--starts", type=COUNT, default=20, show_default=True, help="Sandboxes one after another.")
@click.option("--at-once", type=COUNT, default=50, show_default=True, help="Sandboxes that begin together.")
@shared_options
def sandboxes(image: Path | None, starts: int, at_once: int, as_json: bool, seed: int) -> None:
    """Measure how long sandboxes take to start, and a command in them."""
    columns: list[Column] = [
        ("sandbox of", lambda row: row.of),
        ("unpacked s", lambda row: f"{row.unpack_s:.1f}"),
        ("start ms", lambda row: f"{row.start_s * 1000:.0f}"),
        ("longest ms", lambda row: f"{row.longest_start_s * 1000:.0f}"),
        ("command ms", lambda row: f"{row.command_s * 1000:.0f}"),
        (f"{at_once} at once s", lambda row: f"{row.all_started_s:.1f}"),
    ]
    print_measured_rows(rows(image, starts, at_once), columns, as_json=as_json)
