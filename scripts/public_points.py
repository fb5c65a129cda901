"""Compares the cost formula with the 16 public measurements to which its factors were fitted.

``python -m scripts.public_points`` prints the table of `docs/cost.md`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.cost.engine_cost import engine_cost_for


@dataclass(frozen=True, slots=True)
class PublicPoint:
    """One public measurement, and the value of the formula.

    Attributes
    ----------
    context_per_sequence
        Resident tokens of each sequence: an estimate from output lengths.
    """

    model: str
    degree: int
    batch: int
    context_per_sequence: int
    measured_ms: float
    formula_ms: float

    @property
    def error(self) -> float:
        """Signed relative error of the formula."""
        return self.formula_ms / self.measured_ms - 1


def public_points() -> list[PublicPoint]:
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    points = []
    for point in content["points"]:
        cost = engine_cost_for(point["model"], content["gpu"], point["degree"])
        # Resident tokens cannot exceed the capacity.
        resident = min(point["batch"] * point["context_per_sequence"], cost.capacity_tokens)
        points.append(PublicPoint(**point, formula_ms=1e3 * cost.decode_token_s(point["batch"], resident)))
    return points


def table_lines() -> list[str]:
    """The table in Markdown, with mean and worst error below."""
    points = public_points()
    lines = [
        "| model | TP | batch | context each | measured ms | formula ms | error |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {p.model} | {p.degree} | {p.batch} | {p.context_per_sequence} | {p.measured_ms:.2f} | {p.formula_ms:.2f} | "
        f"{p.error:+.1%} |"
        for p in points
    ]
    errors = [abs(p.error) for p in points]
    return [*lines, "", f"Mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}."]


if __name__ == "__main__":
    print("\n".join(table_lines()))
