"""A live fleet and its simulated counterpart: same number, slots and context, same cost, same control plane.

Nothing is fitted to a makespan: the cost of engines is their profile or measured table, and control-plane delays are
those of ``python -m benchmarks overhead``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.live_setup import Fleet, fleet_of, table_of
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.cost.measured import MeasuredTable
from heddle_dask.cost.table_fit import fit_table
from heddle_dask.engines.spec import engine_kind
from heddle_dask.sim.clusters import ACTION_ADDED_S, STEP_ADDED_S
from heddle_dask.sim.fleet import ControlDelays, SimulatedFleet


@dataclass(frozen=True, slots=True)
class Twins:
    """A live fleet and its simulated counterpart."""

    live: Fleet
    simulated: SimulatedFleet


def twins_of(
    kind: str,
    model: str,
    engines: int,
    slots: int,
    *,
    profile: str,
    tables: Sequence[str],
    time_scale: float,
    max_context_tokens: int,
    delays: ControlDelays,
) -> Twins:
    """Engines of one kind, live and simulated.

    Parameters
    ----------
    profile, time_scale
        For emulated engines: their cost, and real seconds for each of its seconds.
    tables
        For vLLM engines: measured tables by name or file. With several, each was measured with another number of
        concurrent engines and applies while so many are busy; strategies use the one with the most engines.
    delays
        Delays of the control plane. vLLM's own request time (`TableFit.request_s`) is added: half before the step,
        half after it, and it is part of the time of an empty slot.

    Raises
    ------
    BadInput
        Unknown kind, profile or table, a table of another model, or two of one number of engines.
    """
    fleet = fleet_of(
        kind,
        model,
        engines,
        slots,
        profile=profile,
        time_scale=time_scale,
        kv_transfer=False,
        max_model_len=max_context_tokens,
    )
    delays = replace(delays, steps_ahead=fleet.spec.steps_ahead)
    if engine_kind(kind).takes_cost:
        told = _Told(fleet.cost, fleet.cost.capacity_tokens)
    else:
        told = _told_by(_by_engines(tables, model, fleet.spec.tp_degree), engines)
        fleet = replace(fleet, cost=told.cost)
        delays = replace(delays.with_request(told.request_s), slot_s=delays.slot_s + told.request_s)
    described = [
        EngineDescription(
            EngineId(f"engine-{number}"), slots, max_context_tokens, kv_capacity_tokens=told.capacity_tokens
        )
        for number in range(engines)
    ]
    simulated = SimulatedFleet(
        tuple((description, told.cost) for description in described),
        delays=delays,
        believed={1: fleet.cost},
        crowded=told.crowded,
    )
    return Twins(fleet, simulated)


@dataclass(frozen=True, slots=True)
class _Told:
    """Cost and KV capacity of a simulated engine; `crowded`: costs by number of busy engines, if measured."""

    cost: EngineCost
    capacity_tokens: int
    request_s: float = 0.0
    crowded: Mapping[int, EngineCost] = field(default_factory=dict)


def _told_by(measured: Mapping[int, MeasuredTable], engines: int) -> _Told:
    """Cost and KV capacity from the tables, for this number of engines."""
    fits = {count: fit_table(table) for count, table in measured.items()}
    crowded = {count: fit.cost for count, fit in fits.items() if count <= engines}
    most = max(crowded, default=min(measured))
    return _Told(
        fits[most].cost,
        measured[most].capacity_tokens,
        fits[most].request_s,
        crowded if len(crowded) > 1 else {},
    )


def _by_engines(tables: Sequence[str], model: str, tp_degree: int) -> dict[int, MeasuredTable]:
    """Tables by their number of concurrently measured engines."""
    found: dict[int, MeasuredTable] = {}
    for name in tables:
        table = table_of(name, model, tp_degree)
        if table.engines in found:
            raise BadInput(f"--table {name}: another one with {table.engines} engines at once is given: keep one")
        found[table.engines] = table
    return found


def delays_of(overhead: Path | None, trajectories: int) -> ControlDelays:
    """Control-plane delays from the JSON of ``python -m benchmarks overhead``.

    A third each of a step's added time is assigned to the way to the controller, to the engine and back; the worker
    holds a slot for half of the last two. The row with the nearest number of trajectories is used.

    Parameters
    ----------
    overhead
        None: the default medians of simulated clusters (`sim.clusters`).

    Raises
    ------
    BadInput
        The file cannot be read or has another form.
    """
    step_s, action_s = STEP_ADDED_S, ACTION_ADDED_S
    if overhead is not None:
        try:
            rows = json.loads(overhead.read_text(encoding="utf-8"))["rows"]
            row = min(rows, key=lambda row: abs(row["trajectories"] - trajectories))
            step_s, action_s = row["added_ms_p50"] / 1000, row["action_added_ms_p50"] / 1000
        except OSError as error:
            raise BadInput(f"--overhead {overhead}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise BadInput(
                f"--overhead {overhead} holds no overhead: write it with `python -m benchmarks overhead --json`"
            ) from None
    return ControlDelays.measured(step_s, action_s, slot_s=step_s / 3)
