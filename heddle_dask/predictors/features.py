"""Facts about a trajectory at a decision point, and the feature matrix of the trees.

No feature uses the future: a `Progress` is made when a step is about to be queued, and group facts count a sibling as
finished only if it had ended by then (`groups.facts_then`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NAN = math.nan


@dataclass(frozen=True, slots=True)
class Progress:
    """A trajectory at a decision point: before its first step, or after a finished step and its tool.

    Attributes
    ----------
    policy_version
        Version of the policy that generates; any integer that differs between policies.
    message_tokens
        Length of the task itself, without the part of the prompt that all tasks share; 0: not known.
    prompt_tokens, context_tokens, generated_tokens
        Length of the first prompt, of the context now, and of all tokens generated so far.
    steps_finished, max_steps
        Finished steps, and the limit (0: no limit known).
    step_tokens, observed_tokens, tool_labels, tool_times_s
        Of the last `RECENT` steps, newest last: generated tokens, tokens added by the tool, its label and time (nan:
        not known yet).
    tools_s, tool_errors, last_tool_failed
        Sums over all tools so far, and whether the last one failed.
    elapsed_s
        Seconds since the trajectory began; nan when not measured.
    at_s
        Time of the decision point, on the clock of `Finished.ended_at_s`; nan without a clock.
    prompt_key
        Identity of the prompt over epochs and runs; empty: the group stands for it.
    lineage
        The line of training that `policy_version` counts in; empty: not known.
    """

    trajectory_id: str
    group_id: str
    domain: str = ""
    policy_version: int = 0
    prompt_tokens: int = 0
    message_tokens: int = 0
    context_tokens: int = 0
    generated_tokens: int = 0
    steps_finished: int = 0
    max_steps: int = 0
    step_tokens: tuple[int, ...] = ()
    observed_tokens: tuple[int, ...] = ()
    tool_labels: tuple[str, ...] = ()
    tool_times_s: tuple[float, ...] = ()
    tools_s: float = 0.0
    tool_errors: int = 0
    last_tool_failed: bool = False
    elapsed_s: float = NAN
    at_s: float = NAN
    prompt_key: str = ""
    lineage: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """A trajectory that has ended, with the decision points it went through.

    Attributes
    ----------
    generated_tokens, observed_tokens, tools_s, duration_s
        Totals: generated tokens, tokens that tools added to the context, seconds of tools, and seconds from start to
        end; `duration_s` is nan when not measured.
    censored
        True: it did not end by itself (cut off, aborted, still running), so the totals are lower bounds.
    started_at_s, ended_at_s
        On one clock for all attempts of one run; nan without a clock: then every other attempt at the prompt counts
        as an earlier one.
    steps_finished
        Its LLM steps; 0: not known.
    prompt_key, lineage
        As in `Progress`.
    run
        Number of the run of the predictor in which it ended; later runs have larger numbers.
    """

    trajectory_id: str
    group_id: str
    domain: str = ""
    policy_version: int = 0
    prompt_tokens: int = 0
    message_tokens: int = 0
    max_steps: int = 0
    generated_tokens: int = 0
    observed_tokens: int = 0
    tools_s: float = 0.0
    duration_s: float = NAN
    censored: bool = False
    started_at_s: float = NAN
    ended_at_s: float = NAN
    points: tuple[Progress, ...] = ()
    steps_finished: int = 0
    prompt_key: str = ""
    lineage: str = ""
    run: int = 0


class GroupFacts(NamedTuple):
    """Facts about other attempts at the prompt: those that have ended, and siblings of the group that still run.

    Logarithms of total tokens; *excess*: above the expectation from prompt and policy. nan: no attempt.

    Attributes
    ----------
    finished
        Ended attempts, as a number of attempts by the present policy that would tell as much.
    same_excess
        Of attempts by the present policy only.
    excess_s
        Of seconds.
    past_tokens, past_tools_s, past_observed_tokens
        Sums over the ended attempts: generated tokens, seconds of tools, tokens that tools added.
    """

    finished: float = 0.0
    mean_excess: float = NAN
    same_excess: float = NAN
    largest: float = NAN
    latest_excess: float = NAN
    excess_s: float = NAN
    running: int = 0
    running_mean: float = NAN
    running_largest: float = NAN
    past_tokens: float = 0.0
    past_tools_s: float = 0.0
    past_observed_tokens: float = 0.0


NO_SIBLINGS = GroupFacts()

# Number of latest steps in a `Progress`; every function that makes one must use it.
RECENT = 4

# Features that enter as logarithms.
_LOGARITHMIC = (
    "prompt_tokens",
    "message_tokens",
    "context_tokens",
    "generated_tokens",
    "last_tokens",
    "last_but_one_tokens",
    "recent_mean_tokens",
    "mean_tokens",
    "largest_recent_tokens",
    "observed_tokens",
    "last_observed_tokens",
    "tools_s",
    "last_tool_s",
    "elapsed_s",
    "step_s",
)
_PLAIN = (
    "steps_finished",
    "steps_left",
    "tool_errors",
    "last_tool_failed",
    "label",
    "label_before",
    "label_mean",
    "label_largest",
    "policy_version",
    "location",
    "history",
    "history_same",
    "history_left",
    "siblings_finished",
    "sibling_largest",
    "sibling_latest",
    "sibling_seconds",
    "siblings_running",
    "sibling_running_mean",
    "sibling_running_largest",
)
FEATURES = (*_LOGARITHMIC, *_PLAIN)
# The features before "location" come from the row alone, the others from its location and its siblings.
_pack = struct.Struct(f"{FEATURES.index('location')}d").pack


def facts_array(facts: Sequence[GroupFacts]) -> Floats:
    """Group facts as an array, (n, fields), columns as in `GroupFacts`."""
    width = len(GroupFacts._fields)
    return np.fromiter(chain.from_iterable(facts), np.float64, width * len(facts)).reshape(-1, width)


def matrix(
    rows: Sequence[Progress],
    known: Floats,
    location: Floats,
    history: Floats,
    labels: Mapping[str, float],
) -> npt.NDArray[np.float32]:
    """One line of `FEATURES` per row; nan where a value is not known.

    Parameters
    ----------
    known
        Group facts of each row, from `facts_array`.
    location, history
        Expected log total of each row without and with its siblings.
    labels
        Effect of the last tool's label on the log of the tokens left, learnt from finished trajectories.
    """
    # `struct` converts the values to floats faster than NumPy.
    raw = np.frombuffer(b"".join([_pack(*_line(row, labels)) for row in rows])).reshape(len(rows), -1)
    cut = len(_LOGARITHMIC)
    logs = np.log1p(np.maximum(raw[:, :cut], 0.0))
    left = np.log1p(np.maximum(np.exp(history) - raw[:, 3], 1.0))
    told = [
        location,
        history,
        location + known[:, 2],
        left,
        known[:, 0],
        known[:, 3],
        location + known[:, 4],
        known[:, 5],
        known[:, 6],
        known[:, 7],
        known[:, 8],
    ]
    return np.ascontiguousarray(np.column_stack([logs, raw[:, cut:], *told]), dtype=np.float32)


def _line(row: Progress, labels: Mapping[str, float]) -> tuple[float, ...]:
    steps, generated = row.steps_finished, row.generated_tokens
    recent, names, times = row.step_tokens, row.tool_labels, row.tool_times_s
    each = 1.0 / steps if steps else NAN
    effects = [labels.get(name, 0.0) for name in names]
    return (
        row.prompt_tokens,
        row.message_tokens or NAN,
        row.context_tokens,
        generated,
        recent[-1] if recent else NAN,
        recent[-2] if len(recent) > 1 else NAN,
        sum(recent) / len(recent) if recent else NAN,
        generated * each,
        max(recent) if recent else NAN,
        row.context_tokens - row.prompt_tokens - generated,
        row.observed_tokens[-1] if row.observed_tokens else NAN,
        row.tools_s,
        times[-1] if times else NAN,
        row.elapsed_s,
        row.elapsed_s * each,
        steps,
        row.max_steps - steps if row.max_steps else NAN,
        row.tool_errors,
        row.last_tool_failed,
        effects[-1] if names else NAN,
        effects[-2] if len(names) > 1 else NAN,
        sum(effects) / len(effects) if names else NAN,
        max(effects) if names else NAN,
        row.policy_version,
    )
