"""Deployments: the TP degrees of the engines. The body searches them; they are checked here and deployed once."""

from __future__ import annotations

from heddle_dask.core import events as ev
from heddle_dask.core import guards
from heddle_dask.core.commands import Command, DeployEngines, PlanDegrees
from heddle_dask.core.state import State
from heddle_dask.core.tp_degrees import DegreeRequest, TpDegreePlan


class Deployments:
    """The controller's handler of TP degrees."""

    def __init__(self, state: State) -> None:
        self.state = state

    def requested(self, event: ev.DegreesRequested) -> list[Command]:
        """Deploy the TP degrees that the user gave, or command the search of a plan."""
        request = event.request
        if request.asked:
            return self._deploy(request, TpDegreePlan(tuple(sorted(request.asked, reverse=True)), "asked"))
        self.state.degree_request = request
        return [PlanDegrees(request.request_id)]

    def planned(self, event: ev.DegreesPlanned) -> list[Command]:
        """Deploy a plan that passes the guard; the plan of a superseded request is stale."""
        request = self.state.degree_request
        if request is None or request.request_id != event.request_id:
            return self.state.count_stale()
        if event.plan is None:
            self.state.degree_request = None
            return []
        return self._deploy(request, event.plan)

    def _deploy(self, request: DegreeRequest, plan: TpDegreePlan) -> list[Command]:
        guards.check_tp_degrees(request, plan)
        self.state.degree_request = None
        self.state.tp_degree_plan = plan
        return [DeployEngines(request.request_id, plan.tp_degrees)]
