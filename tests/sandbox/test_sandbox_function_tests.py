"""Hidden tests: the verdict is made outside, and the code that is tested cannot change or read it."""

from __future__ import annotations

import asyncio
import json
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.sandbox.function_tests import TestReport, _failures, run_function_tests
from heddle_dask.sandbox.inside import decode, encode
from heddle_dask.sandbox.outcome import RawRun, SandboxLimits

SQUARES = [((n,), n * n) for n in range(5)]
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.integers(), inner),
    max_leaves=10,
)


def report(code: str, cases: Any = SQUARES, **more: Any) -> TestReport:
    return asyncio.run(run_function_tests(code, "f", cases, **more))


@given(plain)
def test_values_survive_the_way_out(value: object) -> None:
    assert decode(encode(value)) == value
    assert type(decode(encode(value))) is type(value)


@pytest.mark.parametrize("cpus", [1, 2, 8])
def test_right_function_passes_all(cpus: int) -> None:
    assert report("def f(x): return x * x", cpus=cpus) == TestReport(5, 5, "5 of 5 tests passed")


def test_wrong_results_are_counted_without_telling_the_right_ones() -> None:
    result = report("def f(x): return x * x if x < 3 else -1", [*SQUARES, ((7,), 31415)])
    assert (result.passed, result.total) == (3, 6)
    assert "case 4: wrong result" in result.text
    assert "31415" not in result.text


def test_exceptions_fail_their_case_alone() -> None:
    result = report("def f(x):\n    return 1 / x", [((0,), 0), ((2,), 0.5)])
    assert (result.passed, result.total) == (1, 2)
    assert "case 1: ZeroDivisionError: division by zero" in result.text


def test_floats_compare_within_rounding() -> None:
    assert report("def f(x): return sum([0.1] * x)", [((3,), 0.3)]).passed == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def g(x): return x", "KeyError: 'f'"),
        ("def f(x: return x", "SyntaxError"),
        ("f = 3", "TypeError"),
        ("import os\nos._exit(0)\ndef f(x): return x * x", "no result"),
        ("import os\ndef f(x): os._exit(7)", "exit status 7"),
        ("def f(x):\n    while True: pass", "ran longer than 2 s"),
        ("def f(x): return object()", "value of type object cannot leave the sandbox"),
        ("def f(x): return f(x)", "RecursionError"),
        ("def f(x): return 'x' * 4_000_000", "bytes of output"),
    ],
)
def test_broken_code_passes_nothing_and_is_named(code: str, message: str) -> None:
    result = report(code, limits=SandboxLimits(wall_s=2, output_bytes=1 << 20))
    assert (result.passed, result.total) == (0, 5)
    assert message in result.text


def test_results_before_a_timeout_count() -> None:
    code = "def f(x):\n    while x == 3: pass\n    return x * x"
    result = report(code, limits=SandboxLimits(wall_s=2))
    assert (result.passed, result.total) == (3, 5)


@pytest.mark.parametrize(
    "code",
    [
        # an object that says it equals everything
        "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef f(x): return E(-1)",
        # prints to the real output, on every descriptor, in our own format
        "import os, json\nfor fd in range(1, 64):\n"
        "    try: os.write(fd, b''.join(b'[%d, \"r\", \"zz\"]\\n' % i for i in range(5)))\n"
        "    except OSError: pass\ndef f(x): return None",
        # changes the encoder that reports the results
        "import json\njson.dumps = lambda v: '[0, \"r\", null]\\n' * 9\ndef f(x): return None",
        # malformed and deep data
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, b'[' * 100000 + b'\\n{}\\n[1]\\n[0, \"r\", [\"i\", {}]]\\n\\xff\\n')\n"
        "    except OSError: pass\ndef f(x): return None",
        # an error that is no text
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, b'[0, \"e\", ' + b'[' * 700 + b']' * 701 + b'\\n')\n"
        "    except OSError: pass\ndef f(x): return None",
        # numbers that overflow while they are judged
        "import os\nfor fd in range(3, 64):\n"
        '    try: os.write(fd, b\'[0, "r", ["f", "0x1p999999"]]\\n\')\n'
        "    except OSError: pass\ndef f(x): return None",
    ],
)
def test_verdict_cannot_be_forged(code: str) -> None:
    assert report(code).passed == 0


def test_any_result_line_is_a_verdict() -> None:
    """Seeded random lines, well formed or not: each fails its case and none raises."""
    random = Random(20)
    digits = ["", "0x1p999999", "-0x1p-9", "nan", "inf", "0x" + "f" * 500, "zz", "9" * 5000, "\ud800", "\0"]
    kinds = ["i", "f", "c", "b", "l*", "t*", "s*", "f*", "d*", "?", "", None, 1]

    def anything(depth: int) -> Any:
        leaf = random.choice([None, True, -1, 1e400, 2**70, *digits])
        if depth == 0 or random.random() < 0.2:
            return leaf
        items = [anything(depth - 1) for _ in range(random.randrange(4))]
        return random.choice([items, [random.choice(kinds), *items], [random.choice(kinds), items], {"k": leaf}])

    expected = [math.pi, math.nan, 2.5j, -7, "word", b"bytes", [3.5, 1], (9, 8), {5: 0.5}, {1, 2}]
    for number in range(3000):
        line = json.dumps([0, "r", anything(3)]).encode()
        if number % 5 == 0:
            place = random.randrange(len(line))
            line = line[:place] + random.randbytes(3) + line[place + random.randrange(3) :]
        if number % 7 == 0:
            line = line.replace(b'"r"', b'"e"')
        run = RawRun(line + b"\n", exit_status=0, stopped_for="", seconds=0.0)
        for wanted in expected:
            assert list(_failures(run, [(0, wanted)], SandboxLimits())) == [0], line


def test_expected_values_are_not_in_the_sandbox() -> None:
    code = """
import gc, sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        found.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    found += [repr(o) for o in gc.get_objects() if isinstance(o, (list, dict, tuple)) and len(o) < 9]
    wanted = str(271827 + x)
    return any(wanted in text for text in found)
"""
    assert report(code, [((1,), 271828), ((2,), True)]).passed == 0


def test_no_cases_and_odd_values_are_bad_input() -> None:
    with pytest.raises(BadInput, match="no cases"):
        report("def f(): pass", [])
    with pytest.raises(BadInput, match="hidden test 1: value of type object"):
        report("def f(): pass", [((), object())])
