"""``python -m benchmarks NAME …``, in a checkout."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.command import bench


def main() -> None:
    """Run a measurement; the processes that it starts find this folder too."""
    checkout = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([checkout, *filter(None, [os.environ.get("PYTHONPATH")])])
    bench(prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
