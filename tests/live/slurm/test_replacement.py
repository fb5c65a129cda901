"""Which jobs are submitted, cancelled, replaced and let go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.live.clusters.slurm.replacement import (
    FIRST_DELAY_S,
    HEALTHY_S,
    LONGEST_DELAY_S,
    PROBE_S,
    SHORT_PROBE_S,
    SILENCE_S,
    GroupRules,
    JobPhase,
    JobRecord,
    Losses,
    NotTaken,
    Observation,
    Review,
    SiteLimit,
    job_load,
    review,
    to_retire,
)
from heddle_dask.live.wire.cluster_messages import WorkerLoad

RULES = {"gpu": GroupRules(start_timeout_s=100.0, lead_s=30.0)}
RUNS = Observation(JobPhase.RUNNING)


def job(name: str = "gpu-0", **values: object) -> JobRecord:
    return replace(JobRecord(name, "gpu", 0.0), **values)  # type: ignore[arg-type]


def working(name: str = "gpu-0", at_s: float = 10.0) -> JobRecord:
    return job(name).observed(RUNS, at_s).joined(at_s)


def decide(jobs: list[JobRecord], wanted: int, now_s: float, losses: Losses | None = None) -> Review:
    return review(jobs, {"gpu": wanted}, {"gpu": losses or Losses()}, {}, RULES, now_s)


def test_missing_jobs_are_submitted_and_queued_ones_count() -> None:
    assert decide([], 2, 0.0).submit == {"gpu": 2}
    queued = [job("gpu-0"), job("gpu-1", phase=JobPhase.PENDING, reason="Priority")]
    assert decide(queued, 2, 1e6) == Review(losses={"gpu": Losses()})


def test_a_lost_job_is_replaced_after_a_delay_that_doubles() -> None:
    lost = working().observed(Observation(JobPhase.ENDED, "it was cancelled"), 20.0)
    losses, now_s, delays = Losses(), 20.0, []
    for _ in range(12):
        decided = decide([lost], 1, now_s, losses)
        assert decided.gone == (lost,) and not decided.submit
        losses = decided.losses["gpu"]
        delays.append(losses.not_before_s - now_s)
        assert not decide([], 1, losses.not_before_s - 0.1, losses).submit
        now_s = losses.not_before_s
        assert decide([], 1, now_s, losses).submit == {"gpu": 1}
    assert delays[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays[-1] == LONGEST_DELAY_S


def test_jobs_that_are_lost_together_are_one_failure() -> None:
    ended = Observation(JobPhase.ENDED, "its node failed")
    lost = [working(f"gpu-{n}").observed(ended, 20.0) for n in range(4)]
    assert decide(lost, 4, 20.0).losses["gpu"].in_a_row == 1


def test_a_job_that_serves_well_ends_the_row_of_failures() -> None:
    losses = Losses(5, failed_s=20.0, not_before_s=60.0)
    later = working(at_s=70.0)
    assert decide([later], 1, 70.0 + HEALTHY_S - 1, losses).losses["gpu"] == losses
    assert decide([later], 1, 70.0 + HEALTHY_S, losses).losses["gpu"] == Losses()
    before = working(at_s=5.0).joined(500.0)
    assert decide([before], 1, 500.0, losses).losses["gpu"] == losses


def test_the_end_of_the_walltime_is_no_failure_and_its_replacement_is_queued_before() -> None:
    old = replace(working().joined(360.0), ends_s=400.0)
    assert not decide([old], 1, 369.0).submit
    assert decide([old], 1, 370.0).submit == {"gpu": 1}
    fresh = JobRecord("gpu-1", "gpu", 370.0)
    assert not decide([old, fresh], 1, 380.0).submit
    ended = old.observed(Observation(JobPhase.ENDED, "its walltime has passed", planned=True), 400.0)
    assert decide([ended, fresh], 1, 400.0).losses["gpu"] == Losses()


def test_a_job_shorter_than_the_lead_serves_for_half_of_its_time() -> None:
    short = replace(working(at_s=0.0), ends_s=20.0)
    assert not decide([short], 1, 9.0).submit
    assert decide([short], 1, 10.0).submit == {"gpu": 1}


def test_a_job_that_drains_by_itself_is_replaced_before_it_has_ended() -> None:
    assert decide([replace(working(), drains=True)], 1, 20.0).submit == {"gpu": 1}


def test_a_job_that_leaves_by_itself_again_and_again_is_a_failure() -> None:
    left = working(at_s=1.0).observed(Observation(JobPhase.ENDED, "it ended", planned=True), 2.0)
    assert decide([left], 1, 2.0).losses["gpu"].in_a_row == 1


def test_a_worker_that_never_joins_is_replaced_and_the_queue_does_not_count() -> None:
    pending = job(phase=JobPhase.PENDING, reason="Resources")
    assert not decide([pending], 1, 1e6).cancel
    running = pending.observed(RUNS, 1000.0)
    assert not decide([running], 1, 1100.0).cancel
    decided = decide([running], 1, 1100.1)
    assert decided.cancel == {"gpu-0": "it runs, and its worker has not joined for 100 s"}
    assert decided.losses["gpu"].in_a_row == 1


def test_a_worker_that_stays_away_is_replaced_and_one_that_comes_back_is_not() -> None:
    away = working(at_s=10.0)
    assert not decide([away], 1, 110.0).cancel
    assert decide([away], 1, 110.1).cancel == {"gpu-0": "it runs, and its worker has been away for 100 s"}
    assert not decide([away.joined(110.0)], 1, 200.0).cancel


def test_a_job_whose_engine_does_not_start_is_replaced_unless_it_does_after_all() -> None:
    failing = working(at_s=10.0).joined(50.0, "no such device").joined(140.0, "no such device")
    assert not decide([failing], 1, 150.0).cancel
    why = "its engine has not started for 100 s: no such device"
    assert decide([failing], 1, 150.1).cancel == {"gpu-0": why}
    assert not decide([failing.joined(145.0)], 1, 200.0).cancel


def test_a_job_that_can_never_start_is_cancelled_with_slurms_reason() -> None:
    refused = job(phase=JobPhase.REFUSED, reason="PartitionTimeLimit")
    assert decide([refused], 1, 5.0).cancel == {"gpu-0": "it can never start: PartitionTimeLimit"}


def refused(name: str, kind: NotTaken = NotTaken.LIMIT) -> JobRecord:
    return job(name).observed(Observation(JobPhase.ENDED, "QOSMaxSubmit…", refusal=kind), 5.0)


def taken(name: str) -> JobRecord:
    return replace(working(name), job_id="7")


def at_limit(jobs: list[JobRecord], now_s: float, before: Review) -> Review:
    seen = [each.joined(now_s) if each.job_id else each for each in jobs]
    return review(seen, {"gpu": 4}, before.losses, before.limits, RULES, now_s)


def test_what_a_site_does_not_take_is_its_capacity_and_delays_no_replacement() -> None:
    first = at_limit([taken("a"), taken("b"), refused("c"), refused("d")], 5.0, Review(losses={"gpu": Losses()}))
    assert first.losses["gpu"] == Losses() and not first.submit
    assert first.limits["gpu"] == SiteLimit(2, "QOSMaxSubmit…", 5.0 + PROBE_S)
    ended = taken("b").observed(Observation(JobPhase.ENDED, "its walltime has passed", planned=True), 90.0)
    assert at_limit([taken("a"), ended], 90.0, first).submit == {"gpu": 1}, "at once, and no more than it may have"


def test_now_and_then_one_more_is_tried_than_a_site_has_taken() -> None:
    jobs = [taken("a"), taken("b")]
    first = at_limit([*jobs, refused("c")], 5.0, Review(losses={"gpu": Losses()}))
    assert not at_limit(jobs, 5.0 + PROBE_S - 1, first).submit
    now_s = 5.0 + PROBE_S
    assert at_limit(jobs, now_s, first).submit == {"gpu": 1}
    assert not at_limit([*jobs, job("e")], now_s + 1, first).submit, "it has not been answered"
    again = at_limit([*jobs, refused("e")], now_s + 2, first)
    assert again.limits["gpu"].probe_s == now_s + 2 + PROBE_S
    more = at_limit([*jobs, taken("e")], now_s + 2, first)
    assert more.limits == {} and more.submit == {"gpu": 1}, "the limit has gone"


def test_below_the_minimum_or_an_earlier_limit_it_is_tried_again_soon() -> None:
    rules = {"gpu": replace(RULES["gpu"], minimum=2)}
    low = review([taken("a"), refused("b")], {"gpu": 2}, {}, {}, rules, 5.0)
    assert low.limits["gpu"].probe_s == 5.0 + SHORT_PROBE_S
    fallen = at_limit([taken("a"), refused("b")], 5.0, Review(limits={"gpu": SiteLimit(2, "", 300.0)}))
    assert fallen.limits["gpu"] == SiteLimit(1, "QOSMaxSubmit…", 5.0 + SHORT_PROBE_S)


def test_a_controller_that_does_not_answer_is_no_failure_of_a_job() -> None:
    silent = decide([refused("a", NotTaken.SILENCE)], 1, 5.0)
    assert silent.losses["gpu"].in_a_row == 0 and not silent.submit
    assert decide([], 1, 5.0 + SILENCE_S, silent.losses["gpu"]).submit == {"gpu": 1}


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.floats(1, 60)), min_size=1, max_size=40),
)
def test_under_any_limit_a_group_has_what_it_may_have(minimum: int, moves: list[tuple[int, int, float]]) -> None:
    """Jobs end, the limit of the site changes, and SLURM refuses what is over it."""
    rules = {"gpu": replace(RULES["gpu"], minimum=minimum, lead_s=0.0)}
    jobs: dict[str, JobRecord] = {}
    before, now_s, number, asked = Review(), 0.0, 0, 0

    def once(capacity: int) -> None:
        nonlocal before, number, asked
        seen = [each.joined(now_s) if each.job_id else each for each in jobs.values()]
        before = review(seen, {"gpu": 5}, before.losses, before.limits, rules, now_s)
        for gone in before.gone:
            del jobs[gone.name]
        for _ in range(before.submit.get("gpu", 0)):
            name, number, asked = f"gpu-{number}", number + 1, asked + 1
            room = len(jobs) - sum(each.refusal is not NotTaken.NONE for each in jobs.values()) < capacity
            jobs[name] = taken(name) if room else refused(name)

    for capacity, ends, wait_s in moves:
        now_s += wait_s
        for name in list(jobs)[:ends]:
            jobs[name] = jobs[name].observed(Observation(JobPhase.ENDED, "", planned=True), now_s)
            jobs[name] = replace(jobs[name], leaving="scaled down")
        once(capacity)
        known = before.limits.get("gpu")
        if known is None or known.jobs >= capacity:
            once(capacity)
            assert sum(not each.refusal for each in jobs.values()) >= capacity, "nothing delays it"
    # The limit holds from now on: it is asked about seldom, and in the end all that it allows is there.
    capacity, asked = moves[-1][0], 0
    for _ in range(100):
        now_s += 10.0
        once(capacity)
    assert sum(not each.refusal for each in jobs.values()) >= capacity
    assert asked <= 5 + 1000.0 / SHORT_PROBE_S + 1


def test_a_leaving_job_is_neither_cancelled_nor_counted() -> None:
    leaving = replace(working(), leaving="scaled down")
    decided = decide([leaving], 1, 1e6)
    assert decided.submit == {"gpu": 1} and not decided.cancel
    ended = leaving.observed(Observation(JobPhase.ENDED, "it ended"), 20.0)
    assert decide([ended], 0, 20.0).losses["gpu"] == Losses()


def load(name: str, **values: int) -> WorkerLoad:
    return WorkerLoad(name, True, **values)


def test_jobs_in_the_queue_go_first_then_idle_ones_then_those_with_the_least() -> None:
    jobs = [
        working("full"),
        working("light"),
        working("idle"),
        job("starts").observed(RUNS, 5.0),
        job("late", submitted_s=9.0, phase=JobPhase.PENDING),
        job("early", submitted_s=3.0, phase=JobPhase.PENDING),
        replace(working("leaves"), leaving="scaled down"),
    ]
    loads = {
        "full": load("full", residents=9, resident_tokens=9000),
        "light": load("light", residents=9, resident_tokens=10),
        "idle": load("idle"),
        "leaves": load("leaves"),
    }
    order = [record.name for record in to_retire(jobs, loads, 10)]
    assert order == ["late", "early", "starts", "idle", "light", "full"]


def test_a_job_is_idle_when_all_its_workers_are() -> None:
    assert job_load("gpu-0", []) is None
    both = job_load("gpu-0", [load("gpu-0-0"), load("gpu-0-1", results=1)])
    assert both is not None and not both.idle


EVENTS = st.sampled_from(["pass", "runs", "joins", "ends", "fails", "refuses", "more", "fewer"])


@given(st.lists(st.tuples(EVENTS, st.integers(0, 5), st.floats(0.1, 90.0)), max_size=60))
def test_whatever_happens_the_serving_jobs_come_to_the_wanted_number_and_never_exceed_it(
    events: list[tuple[str, int, float]],
) -> None:
    """A queue that does anything; decisions are applied as the cluster applies them."""
    jobs: dict[str, JobRecord] = {}
    losses, wanted, now_s, number = Losses(), 1, 0.0, 0

    def once() -> None:
        nonlocal losses, number
        decided = decide(list(jobs.values()), wanted, now_s, losses)
        losses = decided.losses["gpu"]
        for gone in decided.gone:
            del jobs[gone.name]
        for name in decided.cancel:
            del jobs[name]
        for victim in to_retire(jobs.values(), {}, decided.surplus.get("gpu", 0)):
            del jobs[victim.name]
        if decided.submit:
            assert now_s >= losses.not_before_s
        for _ in range(decided.submit.get("gpu", 0)):
            jobs[f"gpu-{number}"] = JobRecord(f"gpu-{number}", "gpu", now_s)
            number += 1
        assert sum(record.serves(30.0, now_s) for record in jobs.values()) <= wanted

    for event, which, wait_s in events:
        now_s += wait_s
        chosen = list(jobs.values())[which % len(jobs)] if jobs else None
        if event in ("more", "fewer"):
            wanted = max(0, min(5, wanted + (1 if event == "more" else -1)))
        elif chosen is not None and event == "joins":
            jobs[chosen.name] = chosen.joined(now_s)
        elif chosen is not None and event != "pass":
            phase = {"runs": JobPhase.RUNNING, "refuses": JobPhase.REFUSED}.get(event, JobPhase.ENDED)
            seen = Observation(phase, event, planned=event == "ends")
            jobs[chosen.name] = chosen.observed(seen, now_s)
        once()
    # From here on everything works.
    for _ in range(4):
        now_s += LONGEST_DELAY_S
        jobs.update({name: record.joined(now_s) for name, record in jobs.items() if record.phase != JobPhase.ENDED})
        once()
    jobs.update({name: record.joined(now_s) for name, record in jobs.items()})
    assert sum(record.serves(30.0, now_s) for record in jobs.values()) == wanted


@pytest.mark.parametrize("phase", [JobPhase.PENDING, JobPhase.RUNNING])
def test_an_end_is_final(phase: JobPhase) -> None:
    ended = working().observed(Observation(JobPhase.ENDED, "it failed"), 20.0)
    assert ended.observed(Observation(phase), 30.0) == ended
    assert ended.joined(30.0) == ended
