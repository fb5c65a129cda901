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
from heddle_dask.workloads.planned import is_replayable, plan_replay, scaled_tokens, tool_waits_s
from heddle_dask.workloads.recorded import trace_file
from heddle_dask.workloads.traces import TracedTrajectory, read_traces

logger = logging.getLogger(__name__)

# In a byte-level vocabulary these ids are the printable ASCII characters; other vocabularies have ordinary tokens
# there. No known model has a special token with an id below 127.
_FIRST_ID, _LAST_ID = 33, 126


async def wait_like_tool(seconds: float) -> None:
    """The tool of a replay: sleeps for `seconds`."""
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
    salt
        Part of the seed of all synthetic tokens: a replay with another salt finds nothing in a prefix cache.

    Attributes
    ----------
    skipped
        Number of trajectories of the file that are left out because a token count is not known.
    clipped_trajectories, clipped_tokens
        Numbers of trajectories clipped to fit the context so far, and of the removed tokens.

    Raises
    ------
    BadInput
        The file is no trace file, none of it can be replayed, or a scale is out of range.
    """

    def __init__(
        self, path: Path | str, *, token_scale: float = 1.0, tool_scale: float = 1.0, salt: str = ""
    ) -> None:
        if not (math.isfinite(token_scale) and token_scale > 0):
            raise BadInput(f"token scale {token_scale!r}: must be greater than 0")
        if not (math.isfinite(tool_scale) and tool_scale >= 0):
            raise BadInput(f"tool scale {tool_scale!r}: must be 0 or greater")
        self._path = trace_file(path)
        self._token_scale = token_scale
        self._tool_scale = tool_scale
        self._salt = salt
        self._traces: dict[str, TracedTrajectory] = {}
        self.skipped = 0
        self.clipped_trajectories = 0
        self.clipped_tokens = 0
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
        """See `Environment.name`."""
        return f"replay:{self._path.name}"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` different trajectories, chosen by the seed. The payload has the trace's group.

        Raises
        ------
        BadInput
            The file has fewer than `count` trajectories.
        """
        if count > len(self._traces):
            raise BadInput(
                f"{count} tasks asked of trace file {str(self._path)!r}, which has "
                f"{len(self._traces)} trajectories to replay"
            )
        chosen = random.Random(f"replay tasks {seed}").sample(list(self._traces), count)
        return [self._task(name, self._traces[name]) for name in chosen]

    def _task(self, name: str, trace: TracedTrajectory) -> Task:
        known = sum(scaled_tokens(step.generated_tokens, self._token_scale, 1) for step in trace.steps)
        prompt = scaled_tokens(trace.prompt_tokens, self._token_scale, 1)
        return Task(
            name,
            "",
            {"group": trace.group_id},
            group=trace.group_id,
            known_tokens=known,
            known_tools_s=sum(tool_waits_s(trace, self._tool_scale)),
            known_observed_tokens=sum(
                scaled_tokens(step.observation_tokens, self._token_scale, 0) for step in trace.steps[:-1]
            ),
            prompt_tokens=prompt,
            domain=trace.kind,
            message_tokens=scaled_tokens(trace.message_tokens, self._token_scale, 0),
            max_steps=trace.max_steps,
        )

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Replay one trajectory. Returns None: sampled tokens of a replay have no meaning."""
        trace = self._traces[task.task_id]
        plan = plan_replay(
            trace,
            token_scale=self._token_scale,
            tool_scale=self._tool_scale,
            max_context_tokens=ctx.max_context_tokens,
        )
        if plan.clipped_tokens:
            self.clipped_trajectories += 1
            self.clipped_tokens += plan.clipped_tokens
            logger.info(
                "trajectory %s: clipped %d prompt and observation tokens to fit %d",
                *(trace.trajectory_id, plan.clipped_tokens, ctx.max_context_tokens),
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


def _tokens(seed: str, count: int) -> list[int]:
    # A seed of type str is hashed by SHA-512, not by `hash`: the same in every process.
    return random.Random(seed).choices(range(_FIRST_ID, _LAST_ID + 1), k=count)
