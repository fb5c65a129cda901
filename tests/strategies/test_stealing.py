"""Which steps an idle engine takes, against their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.core_builders import engine_of, trajectory_spec

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.state import State
from heddle_dask.core.transitions import KvState
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.stealing import PricedStealing

COST = EngineCost(fixed_s=0.01, sequence_s=0.001, prefill_token_s=1e-3)
SLOTS = 4


class Pair:
    """A loaded engine with residents of these contexts and mean tokens a step, and an idle one."""

    def __init__(self, *contexts: int, tokens: int = 100, kv_tokens: int = 0) -> None:
        self.state = State()
        self.idle = Engine(engine_of("idle", SLOTS, kv_tokens=kv_tokens), 1)
        self.loaded = Engine(engine_of("loaded", SLOTS), 2)
        self.queue = [self.resident(f"t{number}", context, tokens) for number, context in enumerate(contexts)]
        self.stealing = PricedStealing()
        self.stealing.use_costs({1: COST})

    def resident(self, name: str, context: int, tokens: int) -> Trajectory:
        """A trajectory that has finished two steps; a context of 0: it has nothing anywhere."""
        made = Trajectory(spec=trajectory_spec(name), number=1)
        made.context_tokens = made.kept_tokens = context
        made.home = made.kept_on = self.loaded.engine_id
        made.kv = KvState.RESIDENT if context else KvState.ABSENT
        if context:
            made.generated_tokens, made.steps_finished = 2 * tokens, 2
        self.state.trajectories[made.trajectory_id] = made
        self.loaded.residents[made.trajectory_id] = None
        return made

    def take(self, most: int) -> list[str]:
        taken = self.stealing.take(ClusterView(self.state), self.idle, self.loaded, self.queue, most)
        return [trajectory.trajectory_id for trajectory in taken]


# With four slots in use an iteration takes 14 ms: a step of 100 tokens 1.4 s, a slot becomes free every 0.35 s.
SLOT_S = 100 * 0.014 / SLOTS


def test_the_end_of_the_queue_goes_where_recomputation_is_faster_than_the_wait() -> None:
    # The prompt of 600 tokens takes 0.61 s: the first waits 0.35 s, the second 0.7 s, the third 1.05 s.
    assert Pair(600, 600, 600).take(8) == ["t2", "t1"]
    assert Pair(600, 600, 600).take(1) == ["t2"]


def test_a_context_that_was_never_computed_costs_nothing() -> None:
    assert Pair(0, 0).take(8) == ["t1", "t0"]


def test_what_the_memory_does_not_hold_stays() -> None:
    assert Pair(600, 600, 600, 600, kv_tokens=1300).take(8) == ["t3", "t2"]


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(0, 6), st.sampled_from([0, 2000]))
def test_it_takes_the_last_that_pay_and_fit(contexts: list[int], most: int, kv_tokens: int) -> None:
    pair = Pair(*contexts, kv_tokens=kv_tokens)
    ran = sum(context > 0 for context in contexts)
    expected, room = [], kv_tokens or 10**9
    for place in reversed(range(len(contexts))):
        context = contexts[place]
        wait_s = (place + 1) * SLOT_S * (ran > 0)
        if len(expected) < most and context <= room and (context == 0 or COST.prefill_s(context) < wait_s):
            expected.append(f"t{place}")
            room -= context
    assert pair.take(most) == expected


def at(engine: Engine, steps: int, tokens: int) -> Engine:
    for number in range(steps):
        engine.inflight[f"other{number}"] = None  # type: ignore[index]
    engine.inflight_tokens = steps * tokens
    return engine


@pytest.mark.parametrize(
    ("here", "there", "context", "moves"),
    [
        (3, 0, 100, True),  # 13 ms a token beside 3 in place of 11 ms alone: 0.3 s of 100 tokens, for 0.11 s
        (3, 0, 400, False),  # 0.41 s is more
        (1, 0, 100, False),
        (3, 2, 100, False),  # those that run there would wait for the prompt, too
        (8, 0, 2000, True),  # it would wait for a slot as well
        (8, 3, 2000, False),
    ],
)
def test_a_new_step_goes_where_it_ends_earlier(here: int, there: int, context: int, moves: bool) -> None:
    pair = Pair(context)
    home, idle = at(pair.loaded, here, 0), at(pair.idle, there, 0)
    assert pair.stealing.prefers(pair.queue[0], home, idle) is moves


def test_a_trajectory_without_a_finished_step_stays() -> None:
    pair = Pair(0)
    assert not pair.stealing.prefers(pair.queue[0], at(pair.loaded, 9, 0), pair.idle)
