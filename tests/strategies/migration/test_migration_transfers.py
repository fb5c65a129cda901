"""The transmission scheduler: disjoint endpoints, longest first, nothing left out that could run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.view import MoveRequest
from heddle_dask.strategies.migration.priced import choose_transfers

ends = st.lists(st.sampled_from("ABCDEF"), min_size=2, max_size=2, unique=True)


def request(source: str, target: str, length: float, order: int) -> MoveRequest:
    return MoveRequest(TrajectoryId(f"t{order}"), EngineId(source), EngineId(target), "transfer", length, order)


requests = st.lists(st.tuples(ends, st.integers(0, 5)), max_size=12).map(
    lambda rows: [request(*pair, length, order) for order, (pair, length) in enumerate(rows)]
)


def endpoints(transfers: list[MoveRequest]) -> list[EngineId]:
    return [engine for transfer in transfers for engine in (transfer.source, transfer.target)]


@given(requests, requests, st.none() | st.integers(0, 4))
def test_chosen_transfers_are_disjoint_longest_first_and_maximal(
    waiting: list[MoveRequest], other: list[MoveRequest], most: int | None
) -> None:
    running = choose_transfers(other)
    chosen = choose_transfers(waiting, running, max_running=most)
    taken = endpoints([*running, *chosen])
    assert len(taken) == len(dict.fromkeys(taken)), "two transfers share an engine"
    assert most is None or not chosen or len(running) + len(chosen) <= most
    full = most is not None and len(running) + len(chosen) >= most
    for left in waiting:
        if left in chosen or full:
            continue
        # The transfer that excludes it runs already, or is at least as long.
        rivals = [*running, *(t for t in chosen if t.length_tokens >= left.length_tokens)]
        assert left.source in endpoints(rivals) or left.target in endpoints(rivals)
    keys = [(-t.length_tokens, t.order) for t in chosen]
    assert keys == sorted(keys)


def test_a_chain_of_engines_waits_for_its_middle() -> None:
    first, second, third = request("A", "B", 9, 0), request("B", "C", 8, 1), request("C", "D", 7, 2)
    assert choose_transfers([third, second, first]) == [first, third]
    assert choose_transfers([second], [first]) == []
    assert choose_transfers([second]) == [second]
