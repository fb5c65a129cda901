"""The tool host in virtual time: each action takes its planned seconds, or half of them if it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heddle_dask.core.events import ActionFinished
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.sim.fleet import FAILED_TOOL_SHARE
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import Program


@dataclass(slots=True)
class _Tool:
    """A running action."""

    program: Program
    action_id: ActionId
    tool_s: float
    ok: bool
    over: bool = False


class SimulatedTools:
    """Runs actions; the host is never lost.

    Parameters
    ----------
    fails
        Whether an action ends with an error.
    finished
        Called with the event of each action that has ended or was aborted, and its program.
    """

    def __init__(
        self,
        host_id: HostId,
        time: VirtualTime,
        fails: Callable[[ActionId], bool],
        finished: Callable[[ActionFinished, Program], None],
    ) -> None:
        self._host_id = host_id
        self._time = time
        self._fails = fails
        self._finished = finished
        self._running: dict[ActionId, _Tool] = {}

    def run(self, action_id: ActionId, program: Program) -> None:
        """Run the tool call after the step that the program has just finished."""
        tool_s = program.plan.steps[program.step_index - 1].tool_s
        ok = not self._fails(action_id)
        tool = _Tool(program, action_id, tool_s if ok else FAILED_TOOL_SHARE * tool_s, ok)
        self._running[action_id] = tool
        self._time.after(tool.tool_s, self._end, tool)

    def abort(self, action_id: ActionId) -> None:
        """End an action now."""
        self._time.after(0.0, self._end, self._running[action_id])

    def _end(self, tool: _Tool) -> None:
        if tool.over:
            return
        tool.over = True
        del self._running[tool.action_id]
        event = ActionFinished(self._time.now_s, tool.action_id, self._host_id, tool.tool_s, tool.ok)
        self._finished(event, tool.program)
