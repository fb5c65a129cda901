"""BM25: ranks texts by the words of a query (Robertson and Zaragoza 2009, with Lucene's weight of a word)."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

K1 = 1.5
"""How slowly further occurrences of a word in a text stop counting."""
B = 0.75
"""Share by which a text that is longer than others counts less."""

_WORD = re.compile(r"\b\w\w+\b")
# Lucene's list for English.
_STOP_WORDS = frozenset(
    _WORD.findall(
        "an and are as at be but by for if in into is it no not of on or such that the their then there these they "
        "this to was will with"
    )
)


class Bm25:
    """An index of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_words(text)) for text in texts]
        lengths = [each.total() for each in counts]
        mean = sum(lengths) / len(lengths)
        texts_with = Counter(word for each in counts for word in each)
        # What a word of a query adds to the score of each text that has it.
        self._scores: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, (each, length) in enumerate(zip(counts, lengths, strict=True)):
            damping = K1 * (1 - B + B * length / mean)
            for word, count in each.items():
                rarity = math.log(1 + (len(texts) - texts_with[word] + 0.5) / (texts_with[word] + 0.5))
                self._scores[word].append((number, rarity * count / (count + damping)))

    def scores(self, query: str) -> dict[int, float]:
        """The score of each text that has a word of the query, by its number."""
        totals: dict[int, float] = defaultdict(float)
        for word in _words(query):
            for number, score in self._scores.get(word, ()):
                totals[number] += score
        return dict(totals)

    def best(self, query: str, most: int) -> list[int]:
        """Numbers of the texts with a word of the query, best first; of equal ones the earlier first."""
        scores = self.scores(query)
        return sorted(scores, key=lambda number: (-scores[number], number))[:most]


def _words(text: str) -> list[str]:
    return [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]
