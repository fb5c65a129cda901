"""Colours of pages and charts, light and dark, as CSS variables; the values are the fallback outside of a page.

The first eight are those of Okabe and Ito, which are distinct for colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Mapping

LIGHT: Mapping[str, str] = {
    "paper": "#ffffff",
    "panel": "#f7f7f8",
    "ink": "#1c1d21",
    "soft": "#5d606a",
    "grid": "#dcdde2",
    "accent": "#0072b2",
    "c0": "#0072b2",
    "c1": "#d55e00",
    "c2": "#009e73",
    "c3": "#cc79a7",
    "c4": "#e69f00",
    "c5": "#56b4e9",
    "c6": "#000000",
    "c7": "#999999",
    "admission": "#a9adb8",
    "llm_queue": "#e69f00",
    "migration": "#cc79a7",
    "prefill": "#56b4e9",
    "decode": "#0072b2",
    "generation": "#3a6ea5",
    "tool_queue": "#d9c52e",
    "quota": "#c77cff",
    "service_load": "#8c6d1f",
    "tool": "#009e73",
    "reward": "#7fbf7b",
    "lost": "#d55e00",
    "driver": "#dfe1e6",
}

DARK: Mapping[str, str] = {
    **LIGHT,
    "paper": "#16181d",
    "panel": "#1f2229",
    "ink": "#e6e7ea",
    "soft": "#9da2ae",
    "grid": "#363a44",
    "accent": "#56b4e9",
    "c0": "#4aa3df",
    "c1": "#f08030",
    "c2": "#2fc59a",
    "c6": "#e6e7ea",
    "admission": "#767c8a",
    "decode": "#3d8fd1",
    "generation": "#6d93bf",
    "tool": "#1fb58a",
    "lost": "#f0702a",
    "driver": "#454a56",
}


def colour(name: str) -> str:
    """A colour for an attribute of SVG: the variable of the page, or the light value where there is none."""
    return f"var(--{name},{LIGHT[name]})"


SERIES = tuple(colour(f"c{number}") for number in range(8))
"""For lines and bars, in this order."""


def variables(values: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())
