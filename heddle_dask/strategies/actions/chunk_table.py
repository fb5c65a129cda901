"""Numbers of GPUs by dynamic programming over free buddy chunks, for every prefix of the candidates at once.

ARL-Tangram, appendix B (the GPU operator), with buddy semantics in place of the printed ones: an action takes the
smallest sufficient chunk, which is split where it is larger. Chunks are never composed, which could span two nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from heddle_dask.core.gpu_chunks import FreeChunks
from heddle_dask.strategies.actions.unit_table import UnitOptions

_Counts = tuple[int, ...]


class ChunkTable:
    """The table of the GPUs of a pool; its states are the free chunks by size over all hosts.

    Parameters
    ----------
    options
        Those of each candidate, in order; amounts are GPUs.
    chunks
        The free chunks of all hosts together: a chunk never spans hosts, so counts are all that matters.
    """

    def __init__(self, options: Sequence[UnitOptions], chunks: FreeChunks) -> None:
        self._rows: list[dict[_Counts, tuple[float, _Counts, int]]] = [{chunks.counts: (0.0, (), 0)}]
        after: dict[tuple[_Counts, int], _Counts | None] = {}
        for each in options:
            row: dict[_Counts, tuple[float, _Counts, int]] = {}
            for counts, (cost, _, _) in self._rows[-1].items():
                for gpus, own in zip(each.amounts, each.costs, strict=True):
                    key = (counts, gpus)
                    if key not in after:
                        left = FreeChunks(counts).take(gpus)
                        after[key] = None if left is None else left.counts
                    then = after[key]
                    if then is not None and cost + own < row.get(then, (inf,))[0]:
                        row[then] = (cost + own, counts, gpus)
            self._rows.append(row)

    def cost(self, count: int) -> float:
        """Least total cost of the first `count` candidates; infinite where they do not all fit."""
        return min((cost for cost, _, _ in self._rows[count].values()), default=inf)

    def units(self, count: int) -> list[int]:
        """The numbers of GPUs of the first `count` candidates at that cost; of equal costs that with most GPUs left."""
        row = self._rows[count]
        counts = min(row, key=lambda c: (row[c][0], -FreeChunks(c).gpus, c))
        gpus = []
        for each in reversed(self._rows[1 : count + 1]):
            _, counts, taken = each[counts]
            gpus.append(taken)
        return gpus[::-1]
