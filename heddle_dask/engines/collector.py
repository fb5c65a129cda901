"""Python's garbage collector in processes that answer within milliseconds, or hold a million plans."""

from __future__ import annotations

import gc

# Net new containers before the young are looked at; looks at the young per look at the middle-aged; and of those per
# look at everything. Python's own are 700, 10 and 10.
_THRESHOLDS = (20_000, 20, 20)


def collect_seldom() -> None:
    """Look at the modules no more, and at the rest less often; for processes of our own, once they have started.

    A look at everything stops the process for 40 ms with Dask's modules loaded, and comes every few seconds while
    messages flow: it was most of the 99th percentile of a step's latency (docs/LOG.md). Nearly all that a message
    leaves behind dies by its reference count; cycles are still found, later. The same holds of a
    simulation, whose plans are many and live until its end.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
