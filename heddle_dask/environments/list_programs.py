"""Small list programs, the problems of the `code` environment: in English, in Python and as a function.

A program has stages that map a list of integers to a list of integers, and a last stage that returns a value. Every
stage has its rule in English, as one line of Python over ``xs``, and as a function, so that the expected results of
hidden tests need no sandbox.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Value = int | list[int]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of stage; ``{k}`` in its texts is its number, if any.

    Attributes
    ----------
    words
        For the model: ``"add {k} to each"``.
    python
        An expression over ``xs``.
    compute
        The same as a function of the list and the number.
    numbers
        Least and largest number that may be drawn; None if the rule has no number.
    """

    words: str
    python: str
    compute: Callable[[list[int], int], Value]
    numbers: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """A rule with its drawn number (0 if it has none)."""

    key: str
    number: int

    @property
    def words(self) -> str:
        return _rule(self.key).words.format(k=self.number)

    @property
    def returns(self) -> bool:
        return self.key in _return_rules()

    @property
    def python(self) -> str:
        """The rule as a Python expression over ``xs``."""
        return _rule(self.key).python.format(k=self.number)


def draw_stages(rng: random.Random, count: int) -> list[Stage]:
    """`count` stages, the last of which returns; no rule occurs twice in a row."""
    keys = list(_list_rules())
    stages: list[Stage] = []
    while len(stages) < count - 1:
        key = rng.choice(keys)
        if not stages or stages[-1].key != key:
            stages.append(_draw_number(rng, key))
    stages.append(_draw_number(rng, rng.choice(list(_return_rules()))))
    return stages


def run_stages(stages: list[Stage], xs: list[int]) -> Value:
    """The result of the program for `xs`."""
    value: Value = list(xs)
    for stage in stages:
        assert isinstance(value, list)
        value = _rule(stage.key).compute(value, stage.number)
    return value


def _draw_number(rng: random.Random, key: str) -> Stage:
    numbers = _rule(key).numbers
    return Stage(key, rng.randint(*numbers) if numbers else 0)


def _rule(key: str) -> Rule:
    return {**_list_rules(), **_return_rules()}[key]


def _list_rules() -> Mapping[str, Rule]:
    return {
        "even": Rule(
            "keep the even numbers",
            "[x for x in xs if x % 2 == 0]",
            lambda xs, k: [x for x in xs if x % 2 == 0],
        ),
        "odd": Rule(
            "keep the odd numbers",
            "[x for x in xs if x % 2 == 1]",
            lambda xs, k: [x for x in xs if x % 2 == 1],
        ),
        "above": Rule(
            "keep numbers above {k}",
            "[x for x in xs if x > {k}]",
            lambda xs, k: [x for x in xs if x > k],
            (2, 60),
        ),
        "below": Rule(
            "keep numbers below {k}",
            "[x for x in xs if x < {k}]",
            lambda xs, k: [x for x in xs if x < k],
            (20, 90),
        ),
        "add": Rule(
            "add {k} to each",
            "[x + {k} for x in xs]",
            lambda xs, k: [x + k for x in xs],
            (2, 50),
        ),
        "subtract": Rule(
            "subtract {k} from each",
            "[x - {k} for x in xs]",
            lambda xs, k: [x - k for x in xs],
            (2, 50),
        ),
        "multiply": Rule(
            "multiply each by {k}",
            "[x * {k} for x in xs]",
            lambda xs, k: [x * k for x in xs],
            (2, 9),
        ),
        "square": Rule(
            "square each",
            "[x * x for x in xs]",
            lambda xs, k: [x * x for x in xs],
        ),
        "remainder": Rule(
            "take each modulo {k}",
            "[x % {k} for x in xs]",
            lambda xs, k: [x % k for x in xs],
            (3, 30),
        ),
        "reverse": Rule("reverse the list", "xs[::-1]", lambda xs, k: xs[::-1]),
        "sort": Rule("sort the list", "sorted(xs)", lambda xs, k: sorted(xs)),
        "first": Rule("keep the first {k}", "xs[:{k}]", lambda xs, k: xs[:k], (2, 6)),
        "skip": Rule("drop the first {k}", "xs[{k}:]", lambda xs, k: xs[k:], (1, 4)),
    }


def _return_rules() -> Mapping[str, Rule]:
    return {
        "list": Rule("return the list", "xs", lambda xs, k: xs),
        "sum": Rule("return the sum", "sum(xs)", lambda xs, k: sum(xs)),
        "count": Rule("return how many are left", "len(xs)", lambda xs, k: len(xs)),
        "largest": Rule(
            "return the largest, 0 if none",
            "max(xs, default=0)",
            lambda xs, k: max(xs, default=0),
        ),
        "smallest": Rule(
            "return the smallest, 0 if none",
            "min(xs, default=0)",
            lambda xs, k: min(xs, default=0),
        ),
    }
