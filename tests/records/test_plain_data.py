"""Plain values go through JSON and back; nothing else does, and no text makes anything else of itself."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.records.plain_data import MAX_DEPTH, NotPlain, from_plain, to_plain

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**4000), 2**4000)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary(max_size=30)
)
keys = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
values = st.recursive(
    leaves | st.sets(keys, max_size=3) | st.frozensets(keys, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dict", "tuple", "set", "int", "bytes", "array", "scalar", "x"]),
            inner,
            max_size=2,
        )
    ),
    max_leaves=10,
)

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


def through_json(value: Any) -> Any:
    return from_plain(json.loads(json.dumps(to_plain(value))))


def same(one: Any, other: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    return bool(one == other)


@given(values)
def test_plain_values_come_back_with_their_types(value):
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array([1.5, math.nan, -0.0], np.float16),
        np.array(["ä", "bc"]),
        np.array([b"x", b"yz"]),
        np.array(3 + 4j),
        np.zeros((0, 4), bool),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.float32(0.1),
        np.str_("text"),
        np.int64(-7),
    ],
    ids=str,
)
def test_arrays_and_scalars_come_back(array):
    back = through_json({"a": [array]})["a"][0]
    assert type(back) is type(array) and back.dtype == array.dtype and back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    if isinstance(back, np.ndarray) and back.size:
        back.flat[0] = back.flat[-1]  # it is the program's own


def test_sets_are_written_in_one_order():
    letters = [chr(code) for code in range(97, 123)]
    assert to_plain(set(letters)) == to_plain(set(reversed(letters))) == {"set": letters}


def test_nan_and_infinities_come_back():
    back = through_json([math.nan, math.inf, -math.inf])
    assert math.isnan(back[0]) and back[1:] == [math.inf, -math.inf]


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def test_what_has_another_type_is_not_plain():
    ring: list[Any] = []
    ring.append(ring)
    odd = [
        object(),
        Point(1, 2),
        Colour.RED,
        OrderedDict(a=1),
        print,
        ValueError("x"),
        ring,
        nested(MAX_DEPTH + 1),
    ]
    odd += [
        np.array([object()]),
        np.zeros(2, [("a", "i4")]),
        np.array(["2026-01-01"], "datetime64[D]"),
        bytearray(),
    ]
    for value in odd:
        for held in (value, [value], {"key": (value,)}):
            with pytest.raises(NotPlain):
                to_plain(held)
    assert through_json(nested(MAX_DEPTH)) == nested(MAX_DEPTH)


@given(json_values)
def test_any_other_text_is_refused_and_never_more_than_data(form):
    try:
        value = from_plain(form)
    except NotPlain:
        return
    to_plain(value)  # what came out is plain


@pytest.mark.parametrize("dtype", ["O", "|O8", "i4,O", "M8[s]", "V8"])
def test_an_array_of_objects_is_refused(dtype):
    with pytest.raises(NotPlain):
        from_plain({"array": [dtype, [1], "AAAAAAAAAAA="]})
