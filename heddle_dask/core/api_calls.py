"""Calls of APIs by actions, as the controller handles them: repetitions, how calls ended, and when to look again."""

from __future__ import annotations

from heddle_dask.core.commands import NO_WAITS, Command, ReportApi, WakeUp
from heddle_dask.core.entities import Action
from heddle_dask.core.events import ActionFinished
from heddle_dask.core.nouns import ActionRequest, ActionWaits
from heddle_dask.core.quotas import apis_of, backoff_s
from heddle_dask.core.resources import ApiQuota
from heddle_dask.core.state import State
from heddle_dask.core.transitions import BreakerState


class ApiCalls:
    """The part of the controller's handler of actions that knows of APIs."""

    def __init__(self, state: State, max_wait_s: float) -> None:
        self.state = state
        self.max_wait_s = max_wait_s
        self._woken_s: float | None = None

    def backoff_s(self, spec: ActionRequest) -> float:
        """Seconds until the repetition may start: the longest of its APIs; without one, that of a usual quota."""
        quotas = [self.state.apis.of(name).quota for name in apis_of(spec.demand.least)] or [ApiQuota("none")]
        return max(backoff_s(quota, spec.action_id, spec.attempt) for quota in quotas)

    def judge(self, action: Action, event: ActionFinished) -> list[Command]:
        """Tell the APIs of a running action how it ended, before it is released."""
        reports: list[Command] = []
        if not event.ran:
            return reports
        cause = "" if event.ok else event.cause or "raised"
        for name in apis_of(action.resources):
            api = self.state.apis.of(name)
            if api.judge(action.spec.action_id, cause, event.retry_after_s, event.at):
                if api.breaker is BreakerState.OPEN:
                    why = f"{api.failures} calls failed one after the other, the last one: {cause}"
                    reports.append(ReportApi(name, api.breaker.value, api.open_until_s, why))
                else:
                    reports.append(ReportApi(name, api.breaker.value))
        return reports

    def waits(self, action: Action) -> ActionWaits:
        """How long an action that starts now has waited for quotas, and for its time as a repetition."""
        blocked_s = self.state.apis.blocked_s(action.spec.action_id, action.least, self.state.at)
        quota_s = action.delayed_s + blocked_s
        return ActionWaits(quota_s=quota_s) if quota_s else NO_WAITS

    def wake_ups(self) -> list[Command]:
        """A command for the next time at which an action may start, unless an earlier one is under way."""
        at = self.state.at
        self.state.apis.note_blocked(at)
        times = [self.state.delayed_actions.next_s, self.state.apis.next_s(at, self.max_wait_s)]
        next_s = min((each for each in times if each is not None), default=None)
        if next_s is None:
            return []
        if self._woken_s is not None and at < self._woken_s <= next_s:
            return []
        self._woken_s = next_s
        return [WakeUp(next_s)]
