"""Who of those that wait starts next at an engine: the longest, without starving those that take much memory.

Memory comes free in small pieces. Were every piece given to whoever fits into it, one that needs a large piece would
wait until hardly anybody is left, and end last (a list schedule with backfilling starves wide jobs; EASY reserves for
the first one). So where lengths are certain nobody passes one that is *critical*: the engine waits for its memory.
"""

from __future__ import annotations

from collections.abc import Callable

from heddle_dask.core.entities import Trajectory
from heddle_dask.strategies.admission.engine_snapshot import AdmissionSite
from heddle_dask.strategies.admission.wait_queue import WaitingLine
from heddle_dask.strategies.remaining_demand import Stay

StayOf = Callable[[Trajectory], Stay]


def next_in_line(
    line: WaitingLine, site: AdmissionSite, critical: float, stay_of: StayOf
) -> Trajectory | None:
    """Who starts there now, if anybody. O(log n) looks at the site, and one for each group that is there.

    Parameters
    ----------
    critical
        Whose path is as long would end last if it started late.

    Notes
    -----
    `site.late` is set to the longest that has room there and no time.
    """
    if not site.held:
        return line.longest()
    if site.free < 1:
        return None
    if site.room is None:
        return _longest_or_sibling(line, site, critical, stay_of)
    first = line.longest_where(lambda trajectory: site.in_time(stay_of(trajectory)))
    if first is not None:
        stay = stay_of(first)
        if site.fits(first, stay):
            return first
        if line.path_of(first) >= critical and site.may_ever_fit(stay):
            return None
    chosen = _longest_or_sibling(line, site, critical, stay_of)
    return chosen if chosen is not None else _longest_by_memory(line, site, stay_of)


def _longest_or_sibling(
    line: WaitingLine, site: AdmissionSite, critical: float, stay_of: StayOf
) -> Trajectory | None:
    """The longest that fits; of those that are not critical, one whose group's prompt is there."""

    def fits(trajectory: Trajectory) -> bool:
        stay = stay_of(trajectory)
        return site.in_time(stay) and site.fits(trajectory, stay)

    longest = line.longest_where(fits)
    if longest is not None and line.path_of(longest) >= critical:
        return longest
    sibling = line.longest_of(site.prompts, fits)
    return longest if sibling is None else sibling


def _longest_by_memory(line: WaitingLine, site: AdmissionSite, stay_of: StayOf) -> Trajectory | None:
    """The longest that has room, which the searches above may have passed over; `site.late` if it has no time."""
    chosen = line.longest_where(lambda trajectory: site.fits(trajectory, stay_of(trajectory)))
    if chosen is None or site.in_time(stay_of(chosen)):
        return chosen
    site.late = chosen
    return None
