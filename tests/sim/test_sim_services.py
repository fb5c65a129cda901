"""Model services in virtual time: loads, evictions, shared batches and failures, by hand-computed cases."""

from __future__ import annotations

import pytest
from worlds.action_worlds import ActionRun, planned

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import HostId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import DurationProfile, HostDescription
from heddle_dask.core.resources import (
    CPUS,
    GPUS,
    MODELS_PER_GPU,
    Amounts,
    ModelService,
    ResourceDemand,
    Resources,
)
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.sim.fleet import ServiceTimes, SimulatedFaults
from heddle_dask.workloads.planned import PlannedAction

TIMES = ServiceTimes(link_bytes_s=10.0, files_bytes_s=1.0, setup_s=0.5, evict_s=0.25, batch_cost=1.0)
JUDGE = ModelService("judge", load_s=(1.0,), cold_load_s=(3.0,), batch=2)
TEACHER = ModelService("teacher", (2,), host_bytes=40)


def gpu_host(number: int, gpus: int, models: int = 1) -> HostDescription:
    resources = Resources.of({GPUS: gpus, MODELS_PER_GPU: models, CPUS: 1})
    return HostDescription(HostId(f"gpu-{number}"), resources, "gpu")


def score(seconds: float, service: str = "judge", kind: str = "reward", gpus: int = 1) -> PlannedAction:
    demand = ResourceDemand.of(gpus=gpus)
    return PlannedAction("score", DurationProfile(seconds, 1.0), demand, kind, "gpu", service)


def run_of(plans: list[PlannedAction], *hosts: HostDescription, **more: object) -> ActionRun:
    trajectories = [planned(f"t{number}", rewards=[action]) for number, action in enumerate(plans)]
    more.setdefault("service_times", TIMES)
    return ActionRun(trajectories, host_list=hosts, services=(JUDGE, TEACHER), **more)  # type: ignore[arg-type]


def test_seconds_of_a_load_are_declared_or_bytes_over_the_rate() -> None:
    assert TIMES.load_s(JUDGE, 1, cold=False) == 1.0
    assert TIMES.load_s(JUDGE, 1, cold=True) == 3.0
    assert TIMES.load_s(TEACHER, 2, cold=False) == pytest.approx(0.5 + 40 / 20)
    assert TIMES.load_s(TEACHER, 2, cold=True) == pytest.approx(0.5 + 40)
    with pytest.raises(BadInput, match="rates must be above 0"):
        ServiceTimes(link_bytes_s=0.0)


def test_a_request_waits_for_the_load_and_requests_share_a_copy() -> None:
    run = run_of([score(2.0), score(2.0)], gpu_host(0, 1))
    first, second = run.calls
    assert first.begun_s == second.begun_s == pytest.approx(first.asked_s + 3.0)
    assert first.run_s == second.run_s == pytest.approx(4.0), "two that share take twice as long"
    assert run.statuses == ["completed", "completed"]


def test_a_request_that_joins_slows_the_other_from_then_on() -> None:
    run = run_of([score(4.0), score(1.0)], gpu_host(0, 1))
    long, short = run.calls
    assert short.run_s == pytest.approx(2.0)
    assert long.run_s == pytest.approx(5.0), "2 s for its first second, then 3 s alone"


def test_two_services_on_one_chunk_alternate_and_the_second_load_is_from_host_memory() -> None:
    run = run_of([score(1.0), score(1.0, "teacher", gpus=2)], gpu_host(0, 2))
    judge, teacher = run.calls
    assert judge.begun_s == pytest.approx(judge.asked_s + 3.0)
    # The judge has one GPU of the pair: the teacher waits for its end, its eviction, and a cold load.
    assert teacher.begun_s == pytest.approx(judge.begun_s + 1.0 + 0.25 + 40.5)
    assert [type(one) for one in run.commands(cmd.EvictService)] == [cmd.EvictService]


def test_the_next_service_is_loaded_while_the_first_one_runs() -> None:
    services = [score(60.0, "teacher", gpus=2), score(1.0)]
    alone = run_of(services, gpu_host(0, 2)).calls[1]
    beside = run_of(services, gpu_host(0, 2, models=2)).calls[1]
    assert alone.begun_s - beside.begun_s == pytest.approx(3.0 + 0.25)


def test_a_lost_host_loses_its_requests_and_they_run_on_another() -> None:
    faults = SimulatedFaults(hosts_lost={0: 5.0})
    run = run_of([score(50.0)], gpu_host(0, 1), gpu_host(1, 1), faults=faults)
    assert run.statuses == ["completed"]
    assert [one.host_id for one in run.commands(cmd.RunAction)] == ["gpu-0", "gpu-1"]
    assert len(run.events(ev.ActionFinished)) == 1


def test_a_service_that_cannot_be_loaded_leaves_the_reward_unknown() -> None:
    broken = ServiceTimes(failure_share=1.0)
    run = run_of([score(1.0)], gpu_host(0, 1), service_times=broken, retries=RetryPolicy(1))
    (call,) = run.calls
    assert call.cause == "model service 'judge' could not be loaded 2 times: simulated fault"
    assert run.statuses == ["completed"]


def test_some_failed_loads_cost_time_only() -> None:
    flaky = ServiceTimes(failure_share=0.7)
    run = run_of(
        [score(0.5, service, gpus=gpus) for service, gpus in [("judge", 1), ("teacher", 2)] * 10],
        gpu_host(0, 2),
        service_times=flaky,
        retries=RetryPolicy(50),
    )
    assert set(run.statuses) == {"completed"}
    assert any(not event.ok for event in run.events(ev.ServiceLoaded))


def test_an_action_without_a_service_has_its_gpus_for_itself() -> None:
    plain = PlannedAction("train", DurationProfile(3.0, 1.0), ResourceDemand.of(gpus=1), "reward", "gpu")
    run = run_of([plain, plain], gpu_host(0, 1))
    first, second = run.calls
    assert second.begun_s == pytest.approx(first.begun_s + 3.0)


def test_a_request_that_takes_too_long_is_ended() -> None:
    slow = PlannedAction(
        "score", DurationProfile(9.0), ResourceDemand.of(gpus=1), "reward", "gpu", "judge", timeout_s=2.0
    )
    run = run_of([slow], gpu_host(0, 1))
    assert run.calls[0].run_s == pytest.approx(2.0) and run.calls[0].cause == "timeout"


@pytest.mark.parametrize("actions", ["fcfs-minimum", "elastic,order=fcfs", "elastic,order=tail"])
def test_many_requests_of_all_kinds_end_under_every_strategy(actions: str) -> None:
    def elastic(seconds: float) -> PlannedAction:
        sizes = ResourceDemand.of(gpus=Amounts(1, 4, (1, 2, 4)))
        profile = DurationProfile(seconds, 0.1)
        return PlannedAction("score", profile, sizes, "reward", "gpu", "wide", declared=profile)

    wide = ModelService("wide", (1, 2, 4), load_s=(1.0, 0.6, 0.4), batch=3)
    kinds = (score(1.0), score(2.0, "teacher", gpus=2), elastic(8.0), elastic(0.5))
    plans = [planned(f"t{number}", rewards=[kinds[number % 4]]) for number in range(60)]
    faults = SimulatedFaults(hosts_lost={1: 20.0}, tool_failure_share=0.1)
    runs = [
        ActionRun(
            plans,
            host_list=(gpu_host(0, 4, 2), gpu_host(1, 8)),
            services=(JUDGE, TEACHER, wide),
            service_times=TIMES,
            actions=actions,
            faults=faults,
            check=check,
        )
        for check in (True, False)
    ]
    assert set(runs[0].statuses) == {"completed"}
    lines = [[(encode(event), [encode(c) for c in commands]) for event, commands in run.lines] for run in runs]
    assert lines[0] == lines[1], "equal inputs give equal journals"
