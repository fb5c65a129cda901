"""A small world of invented people, towns, rivers and companies, with BM25 search over it.

A world is built from its number alone: equal in every process, without a download. Each entity has one page, a line
with its relations to other entities; questions follow such relations.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOWNS, RIVERS, COMPANIES = 60, 40, 60


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
    """An index of texts by BM25 (Robertson and Zaragoza 2009, with Lucene's weight of a word)."""

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


@dataclass(frozen=True, slots=True)
class Page:
    """One entity of a world.

    Attributes
    ----------
    kind
        ``person``, ``town``, ``river`` or ``company``.
    relations
        Value by relation: ``{"home town": "Oskel", ...}``.
    links
        The relations with a value that has its own page.
    """

    title: str
    kind: str
    relations: Mapping[str, str]
    links: tuple[str, ...]

    @property
    def text(self) -> str:
        facts = " ".join(f"{relation}: {value}." for relation, value in self.relations.items())
        return f"{self.title} ({self.kind}). {facts}"


@dataclass(frozen=True, slots=True)
class World:
    """All pages by title, in the order of the index."""

    pages: Mapping[str, Page]


@functools.lru_cache(maxsize=16)
def build_world(world: int) -> World:
    """The world of that number; kept per process, since building it takes milliseconds."""
    rng = random.Random(f"world-{world}")
    # One pool of names for all kinds: first names may repeat, titles are unique.
    words = _names(rng, 40 + 120 + TOWNS + RIVERS + COMPANIES + 30)
    firsts, lasts = words[:40], words[40:160]
    people = [f"{rng.choice(firsts)} {last}" for last in lasts]
    towns, words = words[160 : 160 + TOWNS], words[160 + TOWNS :]
    rivers, words = words[:RIVERS], words[RIVERS:]
    companies = [f"{word} {rng.choice(_COMPANY_FORMS)}" for word in words[:COMPANIES]]
    mountains = [f"Mount {word}" for word in words[COMPANIES:]]
    pages = [
        *(_person(rng, name, towns, companies, people) for name in people),
        *(_town(rng, name, rivers, people) for name in towns),
        *(_river(rng, name, mountains, towns) for name in rivers),
        *(_company(rng, name, people, towns) for name in companies),
    ]
    return World({page.title: page for page in pages})


@functools.lru_cache(maxsize=16)
def _index(world: int) -> Bm25:
    # The title counts twice; otherwise pages that mention an entity rank above its own page.
    return Bm25([f"{page.title} {page.text}" for page in build_world(world).pages.values()])


def search_world(query: str, world: int, results: int) -> list[str]:
    """Texts of the best matching pages, best first; only pages with a word of the query."""
    pages = list(build_world(world).pages.values())
    return [pages[number].text for number in _index(world).best(query, results)]


_COMPANY_FORMS = ("Works", "Trading", "Mills", "Press")
_ONSETS = ("b", "br", "d", "dr", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "st", "t", "v")
_VOWELS = ("a", "e", "i", "o", "u", "ia", "ei")
_CODAS = ("", "n", "r", "l", "s", "k", "m", "nd")


def _names(rng: random.Random, count: int) -> list[str]:
    """`count` different invented words of two syllables."""
    names: dict[str, None] = {}
    while len(names) < count:
        parts = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS)
        word = "".join(rng.choice(part) for part in parts).capitalize()
        if 4 <= len(word) <= 8:
            names.setdefault(word)
    return list(names)


def _person(rng: random.Random, name: str, towns: list[str], companies: list[str], people: list[str]) -> Page:
    relations = {
        "home town": rng.choice(towns),
        "employer": rng.choice(companies),
        "teacher": rng.choice([other for other in people if other != name]),
    }
    return Page(name, "person", relations, ("home town", "employer", "teacher"))


def _town(rng: random.Random, name: str, rivers: list[str], people: list[str]) -> Page:
    relations = {
        "river": rng.choice(rivers),
        "mayor": rng.choice(people),
        "founding year": str(rng.randint(1100, 1899)),
    }
    return Page(name, "town", relations, ("river", "mayor"))


def _river(rng: random.Random, name: str, mountains: list[str], towns: list[str]) -> Page:
    relations = {
        "source": rng.choice(mountains),
        "length": f"{rng.randint(20, 999)} km",
        "port": rng.choice(towns),
    }
    return Page(name, "river", relations, ("port",))


def _company(rng: random.Random, name: str, people: list[str], towns: list[str]) -> Page:
    relations = {
        "founder": rng.choice(people),
        "seat": rng.choice(towns),
        "product": rng.choice(("boats", "bells", "paper", "clocks", "glass", "tea", "wool")),
    }
    return Page(name, "company", relations, ("founder", "seat"))
