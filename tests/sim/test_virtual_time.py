"""Calls in virtual time against a list that is searched for the next one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.sim.loop import VirtualTime

# Seconds after which each call asks for others; few values, so that many fall together.
Asks = Sequence[tuple[float, Sequence[float]]]
delays = st.sampled_from([-1.0, 0.0, 0.0, 1.0, 2.0])
asks = st.lists(st.tuples(delays, st.lists(delays, max_size=3)), max_size=12)


def by_search(first: Asks, untils: Sequence[float]) -> list[tuple[float, str]]:
    """The next is the earliest, and of those the one that was asked for first."""
    now, made = 0.0, list[tuple[float, str]]()
    waiting = [(max(at, 0.0), number, f"{number}", more) for number, (at, more) in enumerate(first)]
    number = len(waiting)
    for until in untils:
        while waiting and min(waiting)[0] <= until:
            now, _, name, more = chosen = min(waiting)
            waiting.remove(chosen)
            made.append((now, name))
            for delay in more:
                waiting.append((max(now + delay, now), number, f"{name}.{delay}", ()))
                number += 1
    return made


@given(asks, st.lists(st.sampled_from([0.0, 1.0, 2.0, 9.0]), max_size=3).map(sorted))
def test_calls_come_by_time_and_of_one_moment_in_the_order_asked_for(first: Asks, untils: list[float]) -> None:
    time, made = VirtualTime(), list[tuple[float, str]]()

    def call(name: str, more: Sequence[float]) -> None:
        made.append((time.now_s, name))
        for delay in more:
            time.after(delay, call, f"{name}.{delay}", ())

    for number, (at, more) in enumerate(first):
        time.at(at, call, f"{number}", more)
    for until in untils:
        time.run(until)
    assert made == by_search(first, untils) and time.calls == len(made)
    time.run()
    assert time.calls == sum(1 + len(more) for _, more in first)
