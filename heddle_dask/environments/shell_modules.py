"""Modules of which the repositories of `shell` are made, each with its tests and with bugs that these tests find.

A bug replaces one text of the module by another. Its tests fail with it and pass without it; every other test passes
with it. ``@N@`` is a number that is drawn for each repository.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One wrong change of a module.

    Attributes
    ----------
    right, wrong
        The text of the module, and what stands there instead.
    tests
        Names of the tests that fail with it.
    issue
        What a user of the package reports; ``@M@`` is the module.
    """

    right: str
    wrong: str
    tests: tuple[str, ...]
    issue: str


@dataclass(frozen=True, slots=True)
class Module:
    """A module, its tests by name, a check that always holds (its random numbers come from ``rng``), and its bugs."""

    name: str
    code: str
    tests: dict[str, str]
    check: str
    bugs: tuple[Bug, ...]


MODULES = (
    Module(
        "bill",
        '''"""Amounts of money in cents."""

TAX_PERCENT = @N@


def split(total, people):
    """Split a total as evenly as possible; the first ones pay the cents that are left over."""
    share, left = divmod(total, people)
    return [share + 1 if i < left else share for i in range(people)]


def with_tax(net):
    """The amount with tax, rounded half up."""
    return (net * (100 + TAX_PERCENT) + 50) // 100


def shown(cents):
    """An amount for people: 1234 is 12.34, -5 is -0.05."""
    sign = "-" if cents < 0 else ""
    whole, rest = divmod(abs(cents), 100)
    return f"{sign}{whole}.{rest:02d}"
''',
        {
            "split_leaves_nothing": "assert bill.split(100, 3) == [34, 33, 33]",
            "split_evenly": "assert bill.split(90, 3) == [30, 30, 30]",
            "tax_rounds_half_up": "assert [bill.with_tax(n) for n in (0, 50, 100)] == "
            "[0, (50 * (100 + @N@) + 50) // 100, 100 + @N@]",
            "shown_pads": 'assert bill.shown(1205) == "12.05"',
            "shown_negative": 'assert bill.shown(-5) == "-0.05"',
        },
        "total = rng.randint(0, 9000)\n    assert sum(bill.split(total, rng.randint(1, 9))) == total",
        (
            Bug(
                "share + 1 if i < left else share",
                "share + 1 if i <= left else share",
                ("split_leaves_nothing", "split_evenly"),
                "@M@.split gives more than there is: 90 among 3 people is [31, 30, 30].",
            ),
            Bug(
                "{rest:02d}",
                "{rest}",
                ("shown_pads", "shown_negative"),
                "@M@.shown(1205) is 12.5 and should be 12.05.",
            ),
            Bug(
                "divmod(abs(cents), 100)",
                "divmod(cents, 100)",
                ("shown_negative",),
                "@M@.shown is wrong for amounts below 0: -5 should be -0.05.",
            ),
        ),
    ),
    Module(
        "spans",
        '''"""Half-open spans (start, end) of whole numbers."""

LONGEST = @N@


def merge(spans):
    """The same points as few spans, in order; spans that touch become one."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(spans):
    """Number of points that are in any of the spans."""
    return sum(end - start for start, end in merge(spans))


def cut(span):
    """The span in pieces of at most LONGEST points."""
    start, end = span
    return [(at, min(at + LONGEST, end)) for at in range(start, end, LONGEST)]
''',
        {
            "merge_touching": "assert spans.merge([(3, 5), (1, 3)]) == [(1, 5)]",
            "merge_nested": "assert spans.merge([(1, 9), (2, 3)]) == [(1, 9)]",
            "merge_apart": "assert spans.merge([(4, 5), (1, 2)]) == [(1, 2), (4, 5)]",
            "covered_twice": "assert spans.covered([(0, 4), (2, 6), (8, 9)]) == 7",
            "cut_ends": "assert spans.cut((0, @N@ + 1)) == [(0, @N@), (@N@, @N@ + 1)]",
        },
        "some = [(a, a + rng.randint(1, 9)) for a in rng.sample(range(200), 30)]\n"
        "    assert spans.covered(some) == len({p for a, b in some for p in range(a, b)})",
        (
            Bug(
                "start <= merged[-1][1]",
                "start < merged[-1][1]",
                ("merge_touching",),
                "@M@.merge([(3, 5), (1, 3)]) leaves two spans that touch; it should be [(1, 5)].",
            ),
            Bug(
                "max(merged[-1][1], end)",
                "end",
                ("merge_nested",),
                "@M@.merge loses points of a span that contains another: (1, 9) with (2, 3).",
            ),
            Bug(
                "in sorted(spans)",
                "in spans",
                ("merge_touching", "merge_apart"),
                "@M@.merge is wrong unless the spans are in order, as in [(4, 5), (1, 2)].",
            ),
            Bug(
                "min(at + LONGEST, end)",
                "at + LONGEST",
                ("cut_ends",),
                "The last piece of @M@.cut goes past the end of the span.",
            ),
        ),
    ),
    Module(
        "words",
        '''"""Texts for people."""

WIDTH = @N@ + 8


def slug(title):
    """A title as part of an address: "Two  Words!" is "two-words"."""
    kept = "".join(c if c.isalnum() else " " for c in title.lower())
    return "-".join(kept.split())


def wrapped(text):
    """Lines of at most WIDTH characters; longer words have a line of their own."""
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if line and len(longer) > WIDTH:
            lines.append(line)
            line = word
        else:
            line = longer
    return lines + [line] if line else lines


def counted(number, name):
    """A number with its noun: 1 file, 2 files."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
''',
        {
            "slug_spaces": 'assert words.slug("Two  Words!") == "two-words"',
            "slug_case": 'assert words.slug("ABC") == "abc"',
            "wrapped_last": 'assert " ".join(words.wrapped("a " * 60)) == " ".join(["a"] * 60)',
            "wrapped_width": 'assert max(map(len, words.wrapped("ab " * 60))) <= @N@ + 8',
            "counted_one": 'assert words.counted(1, "file") == "1 file"',
            "counted_none": 'assert words.counted(0, "file") == "0 files"',
        },
        'text = " ".join("x" * rng.randint(1, 6) for _ in range(40))\n    assert " ".join(words.wrapped(text)) == text',
        (
            Bug(
                "title.lower()",
                "title",
                ("slug_spaces", "slug_case"),
                "@M@.slug keeps capital letters.",
            ),
            Bug(
                "lines + [line] if line else lines",
                "lines",
                ("wrapped_last",),
                "The last line is missing in what @M@.wrapped returns.",
            ),
            Bug(
                "number == 1",
                "number <= 1",
                ("counted_none",),
                '@M@.counted(0, "file") says "0 file".',
            ),
        ),
    ),
    Module(
        "recent",
        '''"""A mapping that forgets what was not used for long."""

SIZE = @N@


class Recent:
    """Keeps the SIZE entries that were used last."""

    def __init__(self):
        self._kept = {}

    def __len__(self):
        return len(self._kept)

    def get(self, key, default=None):
        """The value of a key, which counts as used."""
        if key not in self._kept:
            return default
        self._kept[key] = self._kept.pop(key)
        return self._kept[key]

    def put(self, key, value):
        """Set the value of a key; the one that was not used for longest leaves."""
        self._kept.pop(key, None)
        self._kept[key] = value
        if len(self._kept) > SIZE:
            del self._kept[next(iter(self._kept))]
''',
        {
            "bounded": "r = recent.Recent()\n    for i in range(3 * @N@):\n        r.put(i, i)\n"
            "    assert len(r) == @N@",
            "get_counts_as_use": "r = recent.Recent()\n    for i in range(@N@):\n        r.put(i, i)\n"
            "    r.get(0)\n    r.put(@N@, 1)\n    assert r.get(0) == 0 and r.get(1) is None",
            "put_counts_as_use": "r = recent.Recent()\n    for i in range(@N@):\n        r.put(i, i)\n"
            "    r.put(0, 5)\n    r.put(@N@, 1)\n    assert r.get(0) == 5 and r.get(1) is None",
            "default": "assert recent.Recent().get(1, 2) == 2",
        },
        "r = recent.Recent()\n    for i in range(200):\n        r.put(rng.randint(0, 40), i)\n"
        "    assert len(r) <= recent.SIZE",
        (
            Bug(
                "len(self._kept) > SIZE",
                "len(self._kept) >= SIZE",
                ("bounded", "get_counts_as_use"),
                "@M@.Recent keeps one entry less than SIZE.",
            ),
            Bug(
                "        self._kept[key] = self._kept.pop(key)\n",
                "",
                ("get_counts_as_use",),
                "@M@.Recent forgets entries that were read a moment ago.",
            ),
            Bug(
                "        self._kept.pop(key, None)\n",
                "",
                ("put_counts_as_use",),
                "@M@.Recent forgets an entry whose value was just set again.",
            ),
            Bug(
                "            return default\n",
                "            return None\n",
                ("default",),
                "@M@.Recent.get ignores its default.",
            ),
        ),
    ),
    Module(
        "grades",
        '''"""Statistics of marks."""

PASS_MARK = @N@


def median(marks):
    """The middle mark, or the mean of the two in the middle."""
    ordered = sorted(marks)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def passed(marks):
    """Names with at least the pass mark, best first; equal ones by name."""
    good = [name for name, mark in marks.items() if mark >= PASS_MARK]
    return sorted(good, key=lambda name: (-marks[name], name))


def histogram(marks, width):
    """Number of marks in each class of that width, by its lower end."""
    counts = {}
    for mark in marks:
        low = mark // width * width
        counts[low] = counts.get(low, 0) + 1
    return counts
''',
        {
            "median_odd": "assert grades.median([9, 1, 5]) == 5",
            "median_even": "assert grades.median([4, 1, 2, 9]) == 3",
            "passed_at_mark": 'assert grades.passed({"a": @N@, "b": @N@ - 1}) == ["a"]',
            "passed_order": 'assert grades.passed({"c": @N@ + 1, "b": @N@ + 2, "a": @N@ + 1}) == ["b", "a", "c"]',
            "histogram": "assert grades.histogram([0, 9, 10, 25], 10) == {0: 2, 10: 1, 20: 1}",
        },
        "marks = [rng.randint(0, 99) for _ in range(51)]\n    assert sum(grades.histogram(marks, 7).values()) == 51",
        (
            Bug(
                "ordered = sorted(marks)",
                "ordered = list(marks)",
                ("median_odd", "median_even"),
                "@M@.median is wrong for marks that are not in order.",
            ),
            Bug(
                "(ordered[half - 1] + ordered[half]) / 2",
                "(ordered[half] + ordered[half]) / 2",
                ("median_even",),
                "@M@.median of an even number of marks is the upper one, not the mean of the two in the middle.",
            ),
            Bug(
                "mark >= PASS_MARK",
                "mark > PASS_MARK",
                ("passed_at_mark",),
                "Someone with exactly the pass mark is missing in @M@.passed.",
            ),
            Bug(
                "(-marks[name], name)",
                "(marks[name], name)",
                ("passed_order",),
                "@M@.passed lists the best ones last.",
            ),
        ),
    ),
    Module(
        "paths",
        '''"""Ways on a grid of squares."""

from collections import deque

SIDE = @N@


def neighbours(square):
    """The squares left, right, above and below, inside the grid."""
    x, y = square
    around = [(x - 1, y), (x + 1, y), (x, y - 1), (x, y + 1)]
    return [(a, b) for a, b in around if 0 <= a < SIDE and 0 <= b < SIDE]


def steps(start, goal, walls=()):
    """Fewest steps from start to goal; None without a way."""
    reached = {start: 0}
    queue = deque([start])
    while queue:
        square = queue.popleft()
        if square == goal:
            return reached[square]
        for other in neighbours(square):
            if other not in reached and other not in walls:
                reached[other] = reached[square] + 1
                queue.append(other)
    return None
''',
        {
            "corner": "assert sorted(paths.neighbours((0, 0))) == [(0, 1), (1, 0)]",
            "far_corner": "assert len(paths.neighbours((@N@ - 1, @N@ - 1))) == 2",
            "no_step": "assert paths.steps((1, 1), (1, 1)) == 0",
            "around_a_wall": "assert paths.steps((0, 0), (2, 0), walls={(1, 0)}) == 4",
            "no_way": "assert paths.steps((0, 0), (2, 2), walls={(0, 1), (1, 0)}) is None",
        },
        "a, b = [(rng.randrange(paths.SIDE), rng.randrange(paths.SIDE)) for _ in range(2)]\n"
        "    assert paths.steps(a, b) == abs(a[0] - b[0]) + abs(a[1] - b[1])",
        (
            Bug(
                "0 <= a < SIDE",
                "0 <= a <= SIDE",
                ("far_corner",),
                "@M@.neighbours of a square at the right edge has one that is not on the grid.",
            ),
            Bug(
                "queue.popleft()",
                "queue.pop()",
                ("around_a_wall",),
                "@M@.steps takes detours: around one wall it should be 4 steps.",
            ),
            Bug(
                " and other not in walls",
                "",
                ("around_a_wall", "no_way"),
                "@M@.steps goes through walls.",
            ),
        ),
    ),
    Module(
        "orders",
        '''"""Stock of a shop."""

LEAST = @N@


class Stock:
    """Number of pieces by name."""

    def __init__(self, pieces=None):
        self.pieces = dict(pieces or {})

    def take(self, name, count):
        """Take pieces out; KeyError without the name, ValueError with too few, and then nothing is taken."""
        if self.pieces[name] < count:
            raise ValueError(f"only {self.pieces[name]} of {name}")
        self.pieces[name] -= count

    def deliver(self, delivery):
        """Add a delivery; returns the names that are new."""
        new = [name for name in delivery if name not in self.pieces]
        for name, count in delivery.items():
            self.pieces[name] = self.pieces.get(name, 0) + count
        return sorted(new)

    def to_order(self):
        """Names of which there are fewer than LEAST, in alphabetical order."""
        return sorted(name for name, count in self.pieces.items() if count < LEAST)
''',
        {
            "take_all": 's = orders.Stock({"a": 3})\n    s.take("a", 3)\n    assert s.pieces == {"a": 0}',
            "take_too_many": 's = orders.Stock({"a": 3})\n    try:\n        s.take("a", 4)\n'
            '    except ValueError:\n        assert s.pieces == {"a": 3}\n    else:\n        assert False',
            "deliver_adds": 's = orders.Stock({"a": 3})\n    assert s.deliver({"a": 2, "b": 1}) == ["b"]\n'
            '    assert s.pieces == {"a": 5, "b": 1}',
            "own_pieces": 'given = {"a": 1}\n    orders.Stock(given).take("a", 1)\n    assert given == {"a": 1}',
            "to_order": 'assert orders.Stock({"b": @N@ - 1, "a": 0, "c": @N@}).to_order() == ["a", "b"]',
        },
        "s = orders.Stock()\n    for _ in range(40):\n        s.deliver({rng.choice('abc'): 2})\n"
        "    assert sum(s.pieces.values()) == 80",
        (
            Bug(
                "self.pieces[name] < count",
                "self.pieces[name] <= count",
                ("take_all", "own_pieces"),
                "@M@.Stock.take refuses the last pieces.",
            ),
            Bug(
                "self.pieces.get(name, 0) + count",
                "count",
                ("deliver_adds",),
                "@M@.Stock.deliver forgets what was there before.",
            ),
            Bug(
                "dict(pieces or {})",
                "{} if pieces is None else pieces",
                ("own_pieces",),
                "A dictionary that is given to @M@.Stock changes when something is taken.",
            ),
            Bug(
                "count < LEAST",
                "count <= LEAST",
                ("to_order",),
                "@M@.Stock.to_order lists pieces of which there are enough.",
            ),
        ),
    ),
)
