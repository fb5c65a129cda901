"""What the charts of a simulation's page must show; seen in a browser first."""

from __future__ import annotations

import re
import xml.dom.minidom
from itertools import pairwise

from heddle_dask.views.drawing.svg import Line, bar_chart, heat_map, line_chart


def test_one_request_of_a_hundred_is_still_seen() -> None:
    chart = heat_map([("engine-0", [100.0, 1.0, 0.0])], most=100.0, x_most_s=60.0, unit="running requests")
    xml.dom.minidom.parseString(chart)
    shades = [float(shade) for shade in re.findall(r'fill-opacity="([0-9.]+)" shape', chart)]
    assert shades == [1.0, 0.1]
    assert "running requests" in chart and ">25<" in chart


def test_a_heat_map_of_nothing_is_a_chart() -> None:
    xml.dom.minidom.parseString(heat_map([], most=0.0, x_most_s=0.0, unit="running requests"))
    xml.dom.minidom.parseString(heat_map([("e", [0.0])], most=0.0, x_most_s=1.0, unit="requests"))


def test_labels_of_many_rows_do_not_overlap() -> None:
    rows = [(f"engine-{number}", [1.0]) for number in range(64)]
    chart = heat_map(rows, most=1.0, x_most_s=1.0, unit="requests")
    places = [int(y) for y in re.findall(r'y="(\d+)" text-anchor="end">engine', chart)]
    assert len(places) > 10
    assert min(later - earlier for earlier, later in pairwise(places)) >= 10


def test_the_last_tick_has_room_for_its_number() -> None:
    chart = line_chart([Line("one", [(0.0, 0.0), (100_000.0, 1.0)])], x_label="tokens", y_label="s")
    x = float(re.findall(r'<text x="([0-9.]+)"[^>]*>100,000<', chart)[0])
    width = float(re.findall(r'width="([0-9.]+)"', chart)[0])
    assert x + len("100,000") / 2 * 7 <= width


def test_bars_end_at_the_line_that_marks_the_most() -> None:
    chart = bar_chart([("best", 1.0, "100 %"), ("half", 0.5, "50 %")], most=1.0)
    line = float(re.findall(r'<line x1="([0-9.]+)"', chart)[0])
    ends = [float(x) + float(w) for x, w in re.findall(r'<rect x="([0-9.]+)" y="\d+" width="([0-9.]+)"', chart)]
    assert ends[0] == line and ends[1] < line
