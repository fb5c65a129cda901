"""Long prompts leave in several graphs, in order, none larger than need be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.ids import ActionId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.live.driver.submission import GRAPH_BYTES, _parts, _Row
from heddle_dask.live.wire.messages import ActionCall, Submission

REQUEST = Submission(ActionRequest(ActionId("a"), TrajectoryId("t"), "tool", "name"))


@given(st.lists(st.integers(0, 2 * GRAPH_BYTES), min_size=1, max_size=12))
def test_parts_are_small_and_hold_everything_in_order(sizes: list[int]) -> None:
    rows = [
        _Row(ActionCall("s", str(number), bytes(size), None, str(number)), REQUEST)
        for number, size in enumerate(sizes)
    ]
    parts = list(_parts(rows))
    assert [row for part in parts for row in part] == rows
    for part in parts:
        assert part
        assert len(part) == 1 or sum(row.call.body_bytes for row in part) <= GRAPH_BYTES
    for one, following in pairwise(parts):
        together = sum(row.call.body_bytes for row in one) + following[0].call.body_bytes
        assert together > GRAPH_BYTES, "the next would have fitted"
