"""When an engine has generated all that its trajectories still need: a batch that shrinks as they end, in closed steps.

All of an engine decode together; between two ends the batch is constant, so that n ends are n segments. Tools are added
to each trajectory's end and not taken out of the batch, which makes full engines look slower than they are and leaves
engines with few trajectories, the tail, nearly exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.cost.engine_cost import EngineCost


@dataclass(frozen=True, slots=True)
class TailTrajectory:
    """What a trajectory still needs.

    Attributes
    ----------
    tokens
        Predicted tokens that it has to generate from now on.
    context_tokens
        Tokens in front of the model now: what another engine would have to prefill.
    tool_s
        Seconds that its tools will take.
    """

    trajectory_id: TrajectoryId
    tokens: float
    context_tokens: float
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TailEngine:
    """An engine, and where it is.

    Attributes
    ----------
    observed
        Tokens that tools add to a context, and that are prefilled, for each that is generated.
    """

    engine_id: EngineId
    node: str
    degree: int
    cost: EngineCost
    slots: int
    observed: float = 0.0

    @property
    def growth(self) -> float:
        """Tokens by which a context grows with each that is generated."""
        return 1.0 + self.observed

    def token_s(self, batch: int, context_tokens: float) -> float:
        """Seconds in which each of `batch` trajectories gets a token, those that must take turns included."""
        if batch < 1:
            return 0.0
        held = min(batch, self.slots)
        if context_tokens > self.cost.capacity_tokens:
            held = max(1, min(held, int(batch * self.cost.capacity_tokens / context_tokens)))
        turns = batch / held
        decode_s = turns * self.cost.iteration_s(held, round(context_tokens / turns))
        return decode_s + batch * self.observed * self.cost.prefill_token_s


def end_s(engine: TailEngine, rows: Sequence[TailTrajectory], prefill_tokens: Sequence[float] = ()) -> float:
    """Seconds until the last of `rows` has ended on the engine, which first prefills contexts of so many tokens."""
    now_s = sum(engine.cost.prefill_s(round(tokens)) for tokens in prefill_tokens)
    done, latest_s = 0.0, 0.0
    ordered = sorted(rows, key=lambda row: row.tokens)
    context = sum(row.context_tokens for row in ordered)
    for ended, row in enumerate(ordered):
        batch, each = len(ordered) - ended, row.tokens - done
        if each > 0:
            grown = batch * each * engine.growth
            now_s += each * engine.token_s(batch, context + grown / 2)
            context += grown
            done = row.tokens
        latest_s = max(latest_s, now_s + row.tool_s)
        context -= row.context_tokens + row.tokens * engine.growth
    return latest_s


def left_after(
    engine: TailEngine, rows: Sequence[TailTrajectory], seconds: float, prefill_tokens: Sequence[float] = ()
) -> list[TailTrajectory]:
    """Those of `rows` that have not ended after so many seconds, with what they then need."""
    left_s = seconds - sum(engine.cost.prefill_s(round(tokens)) for tokens in prefill_tokens)
    alive = sorted(rows, key=lambda row: row.tokens)
    context = sum(row.context_tokens for row in alive)
    done = 0.0
    while alive and left_s > 0:
        batch, each = len(alive), alive[0].tokens - done
        grown = batch * max(0.0, each) * engine.growth
        segment_s = each * engine.token_s(batch, context + grown / 2) if each > 0 else 0.0
        if segment_s > left_s:
            done += each * left_s / segment_s
            break
        left_s -= segment_s
        done = max(done, alive[0].tokens)
        context += grown - alive[0].context_tokens - alive[0].tokens * engine.growth
        alive = alive[1:]
    # Whoever calls tools has generated less by then: the share of its time that it decodes.
    return [_aged(row, done, seconds, engine.growth) for row in alive]


def _aged(row: TailTrajectory, done: float, seconds: float, growth: float) -> TailTrajectory:
    tool_s_per_token = row.tool_s / row.tokens if row.tokens else 0.0
    made = done * seconds / (seconds + done * tool_s_per_token) if seconds > 0 else 0.0
    return TailTrajectory(
        row.trajectory_id,
        row.tokens - made,
        row.context_tokens + made * growth,
        max(0.0, row.tool_s - made * tool_s_per_token),
    )
