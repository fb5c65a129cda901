"""Boosted trees as arrays, which answer few rows sooner than XGBoost does, with the same numbers.

A call of XGBoost takes a quarter of a millisecond for any number of rows, and a session asks about few rows at a time
(experiments.md, predictor start).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xgboost as xgb

Ints = npt.NDArray[np.intp]
Singles = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TreeArrays:
    """Nodes of all trees, one tree after the other; the trees of the targets take turns.

    Attributes
    ----------
    column
        Column that the node compares: `n` columns in which a missing value is above every bound, the same in which it
        is below, and one of zeros.
    bound
        A value below it goes to `lower`, another one to the node after that. A leaf leads to itself.
    value
        Of leaves; else 0.
    roots, depth
        First node of each tree, and the largest number of comparisons.
    start
        What the trees of each target are added to.
    """

    column: Ints
    bound: Singles
    lower: Ints
    value: Singles
    roots: Ints
    depth: int
    start: Singles

    @classmethod
    def of(cls, booster: xgb.Booster) -> TreeArrays:
        """Convert trees with numeric splits."""
        learner = json.loads(booster.save_raw("json"))["learner"]
        shape, model = learner["learner_model_param"], learner["gradient_booster"]["model"]
        columns, targets = int(shape["num_feature"]), int(shape["num_target"])
        if model["tree_info"] != [n % targets for n in range(len(model["trees"]))]:
            raise ValueError("the trees of the targets do not take turns")
        nodes: list[_Node] = []
        roots, depth = [], 0
        for tree in model["trees"]:
            roots.append(len(nodes))
            depth = max(depth, _add_nodes(nodes, tree, columns))
        column, bound, lower, value = zip(*nodes, strict=True)
        return cls(
            column=np.array(column, dtype=np.intp),
            bound=np.array(bound, dtype=np.float32),
            lower=np.array(lower, dtype=np.intp),
            value=np.array(value, dtype=np.float32),
            roots=np.array(roots, dtype=np.intp),
            depth=depth,
            start=np.array(json.loads(shape["base_score"]), dtype=np.float32),
        )

    def ask(self, features: Singles) -> Singles:
        """Predictions, (n, targets), equal to those of XGBoost bit by bit."""
        rows = len(features)
        missing = np.isnan(features)
        above, below = features.copy(), features.copy()
        above[missing], below[missing] = np.inf, -np.inf
        values = np.concatenate([above, below, np.zeros((rows, 1), np.float32)], axis=1)
        width = values.shape[1]
        values, first = values.ravel(), width * np.arange(rows)[:, None]
        node = np.broadcast_to(self.roots, (rows, len(self.roots)))
        for _ in range(self.depth):
            asked = values.take(self.column.take(node) + first)
            node = self.lower.take(node) + (asked >= self.bound.take(node))
        leaves = self.value.take(node).reshape(rows, -1, len(self.start))
        # One after the other, as XGBoost adds them: a sum in another order differs in the last bit.
        leaves[:, 0] += self.start
        return np.asarray(np.add.accumulate(leaves, axis=1)[:, -1])


# Column, bound, lower node, value.
_Node = tuple[int, float, int, float]


def _add_nodes(nodes: list[_Node], tree: Mapping[str, Sequence[Any]], columns: int) -> int:
    """Append a tree's nodes level by level, so that siblings are neighbours; its depth."""
    begin = len(nodes)
    level, depth, placed = [0], 0, 1
    while level:
        below: list[int] = []
        for node in level:
            left, bound = tree["left_children"][node], tree["split_conditions"][node]
            if left < 0:
                nodes.append((2 * columns, 1.0, len(nodes), bound))
                continue
            column = tree["split_indices"][node] + (columns if tree["default_left"][node] else 0)
            nodes.append((column, bound, begin + placed, 0.0))
            placed += 2
            below += [left, tree["right_children"][node]]
        level = below
        depth += bool(below)
    return depth
