"""``heddle replay``: check that the controller makes the same decisions as in a recorded run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from heddle_dask.cli.engine_option import import_from_here
from heddle_dask.cli.shared_options import print_json, shared_options


@click.command("replay")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--import-strategies",
    is_flag=True,
    help="Import strategies of other packages that the journal names; this runs their code.",
)
@shared_options
def replay(run: Path, import_strategies: bool, as_json: bool, seed: int) -> None:
    """Feed the events of a run's journal to a fresh controller and compare the commands; changes nothing.

    Exit code 1 if they differ, or if the journal lacks events.
    """
    if import_strategies:
        import_from_here()
    from heddle_dask.live.driver.files.recorded_sessions import recorded_sessions

    sessions = recorded_sessions(run, import_strategies=import_strategies)
    rows: list[dict[str, Any]] = []
    for number, session in enumerate(sessions, start=1):
        name, differs = session.facts["strategy"], session.mismatch
        verdict = "the same commands"
        if differs is not None:
            verdict = f"other commands at event {differs.line}, {differs.event[0]}"
        elif session.missing:
            verdict = (
                f"the same commands up to event {session.compared:,}; {session.missing:,} events are missing there, "
                "because the driver did not fetch them in time, and what follows cannot be compared"
            )
        events = f"{name}, {session.events:,} events"
        click.echo(f"session {number} of {len(sessions)}: {events}: {verdict}", err=as_json)
        rows.append(
            {
                "session": number,
                "strategy": name,
                "events": session.events,
                "missing": session.missing,
                "same": differs is None and not session.missing,
                "event": differs and differs.event,
                "recorded": differs and differs.recorded,
                "replayed": differs and differs.replayed,
            }
        )
    same = all(row["same"] for row in rows)
    if as_json:
        print_json({"same": same, "sessions": rows})
    sys.exit(0 if same else 1)
