"""Replays recorded trajectories: their token counts and tool times, with synthetic tokens.

Each step samples exactly the recorded number of tokens (`ignore_eos`), each tool is an action that takes its recorded
seconds, and observations are printable bytes drawn from a seed. Prompts are drawn by group, so trajectories of one
group share their prompt as a prefix, as in the recording.

Unknown token counts are never estimated: such trajectories are left out. An unknown tool time, and a wait for a
person, count 0 seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Context, Task
from heddle_dask.workloads.planned import PlannedTrajectory, is_replayable, planned_trace
from heddle_dask.workloads.recorded import trace_file
from heddle_dask.workloads.traces import TracedTrajectory, read_traces

logger = logging.getLogger(__name__)

# In a byte-level vocabulary these ids are the printable ASCII characters; other vocabularies have ordinary tokens
# there. No known model has a special token with an id below 127.
_FIRST_ID, _LAST_ID = 33, 126
_NO_LIMIT = 1 << 62


async def wait_like_tool(seconds: float) -> None:
    await asyncio.sleep(seconds)


class ReplayEnvironment:
    """Replays a trace file. Use one sample per task: all samples of a task are equal.

    Parameters
    ----------
    path
        A ``.jsonl`` or ``.jsonl.gz`` file of trajectories (`workloads.traces`), or the name of a recorded trace
        (`workloads.recorded`).
    token_scale, tool_scale
        Factors on all token counts and on all tool seconds.
    max_context_tokens
        Context of the engines, for which tasks know what their replay will generate [default: it holds every
        trajectory].
    salt
        Part of the seed of all synthetic tokens: a replay with another salt finds nothing in a prefix cache.

    Attributes
    ----------
    skipped
        Number of trajectories of the file that are left out because a token count is not known.
    cut_trajectories, cut_tokens
        Numbers of trajectories that have reached the end of the context so far, and of the tokens that were recorded
        behind it.

    Raises
    ------
    BadInput
        The file is no trace file, none of it can be replayed, or a scale is out of range.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        token_scale: float = 1.0,
        tool_scale: float = 1.0,
        salt: str = "",
        max_context_tokens: int | None = None,
    ) -> None:
        if not (math.isfinite(token_scale) and token_scale > 0):
            raise BadInput(f"token scale {token_scale!r}: must be greater than 0")
        if not (math.isfinite(tool_scale) and tool_scale >= 0):
            raise BadInput(f"tool scale {tool_scale!r}: must be 0 or greater")
        self._path = trace_file(path)
        self._token_scale = token_scale
        self._tool_scale = tool_scale
        self._salt = salt
        self._max_context_tokens = max_context_tokens or _NO_LIMIT
        self._traces: dict[str, TracedTrajectory] = {}
        self.skipped = 0
        self.cut_trajectories = 0
        self.cut_tokens = 0
        for trace in read_traces(path):
            if trace.trajectory_id in self._traces:
                raise BadInput(f"trace file {str(path)!r}: id {trace.trajectory_id!r} comes twice")
            if is_replayable(trace):
                self._traces[trace.trajectory_id] = trace
            else:
                self.skipped += 1
        if not self._traces:
            raise BadInput(f"trace file {str(path)!r}: no trajectory with known token counts")
        if self.skipped:
            logger.warning("%s: left out %d trajectories with unknown tokens", path, self.skipped)

    @property
    def name(self) -> str:
        return f"replay:{self._path.name}"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` different trajectories, chosen by the seed. The payload has the trace's group."""
        if count > len(self._traces):
            raise BadInput(
                f"{count} tasks asked of trace file {str(self._path)!r}, which has "
                f"{len(self._traces)} trajectories to replay"
            )
        chosen = random.Random(f"replay tasks {seed}").sample(list(self._traces), count)
        return [self._task(name, self._traces[name]) for name in chosen]

    def _task(self, name: str, trace: TracedTrajectory) -> Task:
        plan = self._plan(trace, self._max_context_tokens)
        return Task(
            name,
            "",
            replay_payload(trace),
            group=trace.group_id,
            known_tokens=plan.generated_tokens,
            known_tools_s=plan.tools_s,
            known_observed_tokens=sum(step.observation_tokens for step in plan.steps),
            prompt_tokens=plan.prompt_tokens,
            domain=trace.kind,
            message_tokens=plan.message_tokens,
            max_steps=trace.max_steps,
        )

    def _plan(self, trace: TracedTrajectory, max_context_tokens: int) -> PlannedTrajectory:
        return planned_trace(
            trace,
            domain=self.name,
            token_scale=self._token_scale,
            tool_scale=self._tool_scale,
            max_context_tokens=max_context_tokens,
        )

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Replay one trajectory. Returns None: sampled tokens of a replay have no meaning."""
        trace = self._traces[task.task_id]
        plan = self._plan(trace, ctx.max_context_tokens)
        cut_tokens = self._plan(trace, _NO_LIMIT).context_tokens - plan.context_tokens
        if cut_tokens:
            self.cut_trajectories += 1
            self.cut_tokens += cut_tokens
            logger.info(
                "trajectory %s: ends %d tokens early, at the end of a context of %d",
                *(trace.trajectory_id, cut_tokens, ctx.max_context_tokens),
            )
        ctx.append_tokens(_tokens(f"{self._salt}prompt of {trace.group_id}", plan.prompt_tokens))
        for index, step in enumerate(plan.steps):
            if ctx.done:
                return None
            await ctx.generate(max_tokens=step.generated_tokens, ignore_eos=True)
            if step.tool is not None:
                await ctx.call(wait_like_tool, step.tool_s, cpus=(0, 0), label=step.tool, timeout_s=math.inf)
            if step.observation_tokens:
                seed = f"{self._salt}observation {index} of {trace.trajectory_id}"
                ctx.append_tokens(_tokens(seed, step.observation_tokens))
        return None


def replay_payload(trace: TracedTrajectory) -> dict[str, str]:
    """The payload of a replay's task, equal for all attempts at one prompt."""
    return {"group": trace.group_id}


def _tokens(seed: str, count: int) -> list[int]:
    # A seed of type str is hashed by SHA-512, not by `hash`: the same in every process.
    return random.Random(seed).choices(range(_FIRST_ID, _LAST_ID + 1), k=count)
