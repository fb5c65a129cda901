"""Directories of a node that are made once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from heddle_dask.engines.node_cache import HeldDirectory, NodeCache


def test_whoever_found_nothing_beside_the_one_who_made_it_gets_it_while_it_is_in_use(tmp_path: Path) -> None:
    """All look at the same moment; the first one holds the directory until the end."""
    together, made, looked = threading.Barrier(3), [], threading.local()

    def is_whole(path: Path) -> bool:
        found = path.is_dir()
        if not hasattr(looked, "once"):
            looked.once = True
            together.wait()  # all have the shared lock
        return found

    def hold(_number: int) -> HeldDirectory:
        stop = threading.Event()
        watch = threading.Timer(60.0, stop.set)  # for a hang only
        watch.start()
        try:
            return NodeCache(tmp_path / "node").hold("model", is_whole, made.append, stop)
        finally:
            watch.cancel()

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(hold, range(3)))
    assert len(made) == 1 and {each.path for each in found} == {tmp_path / "node" / "model"}
    for each in found:
        each.release()
