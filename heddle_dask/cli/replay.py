"""``heddle replay``: check that the controller makes the same decisions as in a recorded run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from heddle_dask.cli.shared_options import print_json, shared_options


@click.command("replay")
@click.argument("run", type=click.Path(path_type=Path))
@shared_options
def replay(run: Path, as_json: bool, seed: int) -> None:
    """Feed the events of a run's journal to a fresh controller and compare the commands; changes nothing.

    Exit code 1 if they differ.
    """
    from heddle_dask.live.driver.recorded_sessions import recorded_sessions

    sessions = recorded_sessions(run)
    rows: list[dict[str, Any]] = []
    for number, session in enumerate(sessions, start=1):
        differs = session.first_mismatch()
        name, events = session.facts["strategy"], len(session.lines)
        verdict = "the same commands"
        if differs is not None:
            verdict = f"other commands at event {differs.line}, {differs.event[0]}"
        click.echo(f"session {number} of {len(sessions)}: {name}, {events:,} events: {verdict}", err=as_json)
        rows.append(
            {
                "session": number,
                "strategy": name,
                "events": events,
                "same": differs is None,
                "event": differs and differs.event,
                "recorded": differs and differs.recorded,
                "replayed": differs and differs.replayed,
            }
        )
    same = all(row["same"] for row in rows)
    if as_json:
        print_json({"same": same, "sessions": rows})
    sys.exit(0 if same else 1)
