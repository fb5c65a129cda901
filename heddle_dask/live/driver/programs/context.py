"""The context that an agent program is given: through it the program reaches the model and tools.

It owns the token record. Sampled tokens are kept as they were sampled; a message is rendered once. Results of steps
and actions are journalled when they arrive, so that a program can be run again up to where it was.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.chat.reply_parts import OPEN
from heddle_dask.chat.tool_calls import ReadReply
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.needs import Needs
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.engines.contract import GenerateResult, ReplyReading, SamplingParams, VersionSpan
from heddle_dask.environments.actions import FunctionCall, ServiceCall
from heddle_dask.environments.base import NO_PROGRESS, Context, Reply, Role
from heddle_dask.environments.function_tools import ToolTurns
from heddle_dask.gateway.session import GatewaySession
from heddle_dask.live.driver.connection.gateway_orders import TEXT_TO
from heddle_dask.live.driver.programs.action_calls import ActionCalls
from heddle_dask.live.driver.programs.branch import Branch, BranchPort, Recorded, Services, fork_seed
from heddle_dask.live.driver.programs.gateway import LiveGateway
from heddle_dask.live.driver.programs.pending_input import PendingInput
from heddle_dask.live.driver.programs.prefix_replay import PrefixReplay
from heddle_dask.live.driver.programs.resting import Resting, StepEnds
from heddle_dask.live.driver.programs.sandbox_calls import LiveSandbox
from heddle_dask.live.driver.programs.service_calls import service_call
from heddle_dask.live.driver.programs.steps import (
    BudgetExhausted,
    OpenStep,
    StepAnswers,
    StepOptions,
    cut_at_stop,
    side_by_side,
    tokens_to_stop,
    with_seed_of,
)
from heddle_dask.live.wire.gateway_messages import TextTarget
from heddle_dask.live.wire.messages import StepResult
from heddle_dask.records.journal_lines import GATEWAY_OPENED
from heddle_dask.records.token_record import TokenRecord
from heddle_dask.records.trajectory import ActionRecord, StepRecord
from heddle_dask.records.trajectory_prefix import TrajectoryPrefix
from heddle_dask.sandbox.stateful.contract import SandboxSpec

NO_TOOLS_SHOWN = (
    "the chat template of the model shows no tools: the model does not know of them unless the system message does"
)
_TAIL_TOKENS = 8  # in which a generation prompt opens the thinking


class LiveContext(Context):
    def __init__(
        self,
        services: Services,
        spec: TrajectorySpec,
        seed: int,
        recorded: Recorded | None = None,
        branch: Branch | None = None,
        prefix: TrajectoryPrefix | None = None,
    ) -> None:
        self._services = services
        self._spec = spec
        self._seed = seed
        self.prefix = prefix
        self._replay = PrefixReplay(prefix)
        self._port = BranchPort(services, spec, recorded, branch)
        self._branch = self._port.branch
        self._answers = StepAnswers(self._port, seed)
        self._calls = ActionCalls(self._port)
        self._sandboxes = itertools.count()
        self._forks: list[LiveContext] = []
        self._gateway: LiveGateway | None = None
        self._input = PendingInput(services.template)
        self._tools = ToolTurns()
        self._variables: dict[str, Any] = {}
        self._ends = StepEnds(services.template)
        self._told_done = False
        # The step that is awaited.
        self._open: OpenStep | None = None
        # Attempts at the next step that were cancelled or have failed.
        self._given_up = 0
        self.record = TokenRecord()
        self.steps: list[StepRecord] = []
        self._generated = 0
        self._dropped = 0
        self._seen = 0  # tokens of the record that an engine has seen or sampled

    # -- what the program may ask ------------------------------------------------------------------

    @property
    def seed(self) -> int:
        # The environment begins as in the attempt that is replayed; sampling has the seed of this one.
        return self._seed if self.prefix is None else self.prefix.seed

    @property
    def max_context_tokens(self) -> int:
        return self._services.max_context_tokens

    @property
    def context_tokens(self) -> int:
        return len(self.record) + self._input.tokens(len(self.record))

    @property
    def done(self) -> bool:
        if self._exhausted() or self._tools.is_stuck:
            self._told_done = True
        return self._told_done

    @property
    def was_stopped(self) -> bool:
        """Whether the program was told that its budget is used up."""
        return self._told_done or any(fork.was_stopped for fork in self._forks)

    @property
    def metadata(self) -> dict[str, Any]:
        """Facts that are stored with the trajectory; all its branches share them."""
        return self._branch.tree.metadata

    def fork(self, *, after_step: int | None = None) -> LiveContext:
        self._replay.refuse_before_end("it forks before the end of its prefix")
        at = self._resting("fork()", after_step)
        number = len(self._forks) + 1
        branch = self._branch.forked(number, at.steps)
        recorded = branch.recorded
        spec = replace(
            self._spec,
            trajectory_id=TrajectoryId(f"{self._spec.trajectory_id}#{number}"),
            prompt_tokens=at.context_tokens,
            resumed_tokens=recorded.generated_tokens,
        )
        fork = LiveContext(self._services, spec, fork_seed(self._seed, number), recorded, branch)
        fork.record = self.record.shared(at.record_tokens)
        fork._input, fork._seen = at.input.copy(), at.seen
        fork._tools, fork._variables = replace(at.tools), dict(at.variables)
        self._forks.append(fork)
        return fork

    def _resting(self, what: str, after_step: int | None) -> Resting:
        """The state of the context now, or as it was behind one of its steps."""
        if after_step is not None:
            self._port.check_goes_on(what)
            return self._ends.behind(after_step, self._branch.steps)
        self._check_rests(what)
        return Resting(self._next_step, len(self.record), self._seen, self._input, self._tools, self._variables)

    @property
    def template_variables(self) -> dict[str, Any]:
        return dict(self._variables)

    async def gateway(self) -> LiveGateway:
        self._port.check_goes_on("gateway()")
        if not self._branch.is_first:
            raise BadInput("gateway(): open it on the context that the program was given, not on a fork")
        self._replay.refuse_before_end("its agent asks through a gateway")
        orders = self._services.gateways
        if orders is None:
            raise BadInput("gateway(): this context belongs to no cluster, and only tool workers have gateways")
        if self._gateway is None or not self._gateway.is_open:
            place = await orders.place()
            steps = len(self.steps)
            self._port.journal(GATEWAY_OPENED, {})
            self._gateway = LiveGateway(
                orders,
                GatewaySession(self),
                lambda: sum(len(branch.steps) for branch in self.branches()) - steps,
                self.metadata,
                place,
            )
        return self._gateway

    def set_template(self, **variables: Any) -> None:
        if self.context_tokens:
            raise BadInput("set_template: set variables of the chat template before anything is appended")
        if "tools" in variables:
            variables["tools"] = self._tools.given(variables["tools"])
        self._variables |= variables
        self._input.template = self._input.template.with_variables(variables)
        if variables.get("tools") and not self._input.template.shows_tools:
            self._services.note_once(NO_TOOLS_SHOWN)

    async def run_tools(
        self, reply: Reply, *, timeout_s: float | None = None, needs: Needs | None = None, most_chars: int = 10_000
    ) -> list[str]:
        texts = await self._tools.run(self, reply, most_chars, timeout_s=timeout_s, needs=needs)
        if self._tools.is_stuck and self._branch.is_first:
            self.metadata[NO_PROGRESS] = f"{self._tools.useless} replies in a row called no tool that there is"
        return texts

    def append(self, role: Role, text: str) -> None:
        self._input.append(self.record, role, text, first_step=self._next_step == 0)

    def append_message(self, message: ChatMessage) -> None:
        self._input.append_message(self.record, message, first_step=self._next_step == 0)

    def prompt_tokens(
        self,
        messages: Sequence[ChatMessage],
        *,
        after_step: int | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> int:
        at = self._resting("prompt_tokens()", after_step)
        return at.with_messages(self.record, messages, template or {})

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        self._input.append_tokens(self.record, token_ids, first_step=self._next_step == 0)

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        structured: StructuredOutput | None = None,
        seed: int | None = None,
        n: int = 1,
        ignore_eos: bool = False,
    ) -> Reply:
        """Run one LLM step over everything appended so far, `n` times; the parameters are those of `Context`.

        Raises
        ------
        BadInput
            A parameter that is not allowed.
        BudgetExhausted
            No further step is allowed; `done` says so before.
        StepLost
            The engine refuses the step, or it was lost too often.
        RuntimeError
            The step before is still awaited: a context is one conversation.

        A step that is cancelled (by ``asyncio.timeout``, for instance) leaves no token behind: the engine stops, and
        the next step starts from the same messages. Messages that are appended in between follow an empty answer. Of
        `n` continuations, one that fails cancels the others.
        """
        self._check_rests("generate()")
        options = StepOptions(max_tokens, temperature, top_p, top_k, min_p, stop, structured, seed, n, ignore_eos)
        if self._exhausted():
            self._told_done = True
            raise BudgetExhausted(self._why_exhausted())
        self._render()
        if (recorded := self._replay.next_reply(self.record, options.n)) is not None:
            return self._recorded_reply(recorded)
        sampling = options.completed(
            self._services.sampling,
            self._services.budget,
            self.max_context_tokens - len(self.record),
            self._input.template.end_token_ids,
        )
        contexts = [self, *(self.fork() for _ in range(1, options.n))]
        for number, context in enumerate(contexts):
            context._open_step(with_seed_of(sampling, number), number)
        try:
            with self._branch.tree.waiting():
                await side_by_side([context._finish_step() for context in contexts])
        except (Exception, asyncio.CancelledError):
            # A context whose step has failed has no open step any more.
            for context in contexts:
                context._give_up()
            raise
        first, *others = [context._close() for context in contexts]
        return replace(first, alternatives=tuple(others))

    async def _perform(self, call: FunctionCall) -> Any:
        return await self._calls.run(call, self._next_step - 1)

    async def _ask_service(self, asked: ServiceCall) -> Any:
        call = service_call(asked, self._services.pools, self.record.token_ids)
        return await self._perform(call)

    def _open_sandbox(self, spec: SandboxSpec) -> LiveSandbox:
        self._port.check_goes_on("sandbox()")
        if not spec.kind and self._services.budget.sandbox != "weak":
            spec = replace(spec, kind="bubblewrap")
        return LiveSandbox(self._port, self._calls, lambda: next(self._sandboxes), lambda: self._next_step - 1, spec)

    # -- steps -------------------------------------------------------------------------------------

    def _open_step(self, sampling: SamplingParams, choice: int) -> None:
        text_to = TEXT_TO.get()
        self._open = OpenStep(
            index=self._next_step,
            start=len(self.record),
            sampling=sampling,
            submitted_s=self._services.clock(),
            came_from=self.steps[-1].engine_id if self.steps else "",
            attempt=self._given_up,
            send_all=self._given_up > 0,
            reading=self._reading(),
            text_to=None if text_to is None else self._opened(text_to, choice),
        )

    def _opened(self, text_to: TextTarget, choice: int) -> TextTarget:
        return replace(text_to, choice=choice, opening=OPEN if self._thinking_opened(len(self.record)) else "")

    async def _finish_step(self) -> None:
        step = self._open
        assert step is not None
        try:
            while not step.finished:
                self._open = step = self._take(step, await self._answers.next(step, self.record))
        except Exception:
            self._drop_step()
            raise

    def _give_up(self) -> None:
        """The open step, if there is one, is cancelled, or the run is interrupted."""
        step = self._open
        if step is None:
            return
        self._drop_step()
        self._answers.give_up(step)

    def _drop_step(self) -> None:
        """The open step ends without a reply: tokens that it sampled are dropped."""
        step, self._open = self._open, None
        assert step is not None
        self._given_up = step.attempt + (not step.finished)
        self.record = self.record.fork(step.start)
        self._generated -= step.generated
        self._dropped += step.generated

    def _take(self, step: OpenStep, result: StepResult) -> OpenStep:
        if result.status == "refused":
            raise self._answers.lost(step, f"step {step.index}: {result.message}")
        attempt = step.attempt + 1
        if result.status in ("engine-lost", "context-missing"):
            lost = attempt - self._given_up
            if lost >= self._services.retries.max_step_attempts:
                raise self._answers.lost(step, f"step {step.index} was lost {lost} times: {result.message}")
            # With the engine, the worker's copy of the context may be gone: send everything.
            return step.asked_again()
        if result.status == "aborted" and step.sampling.structured is not None:
            return step.begun_again(result)
        self._seen = step.start
        if step.sampling.stop:
            result = self._ended_at_stop(step, result)
        ids = np.asarray(result.generated.token_ids, dtype="<i4")
        self._append_sampled(ids, result.generated)
        self._answers.held.answered(self.record, ids.tobytes())
        self._generated += len(ids)
        step = step.with_part(result, len(ids))
        if result.status == "aborted" and step.tokens_left <= 0:
            ended = replace(result.generated, finish_reason="length")
            return replace(step, last=replace(result, status="ok", generated=ended))
        return step

    def _ended_at_stop(self, step: OpenStep, result: StepResult) -> StepResult:
        """The answer up to the token that completes a stop string, if one does."""
        whole = [*self.record.token_ids[step.start :].tolist(), *result.generated.token_ids]
        tokens = tokens_to_stop(self._input.template.decode, whole, step.sampling.stop)
        if tokens is None:
            return result
        if tokens < len(whole):
            self._answers.held.not_sent()  # the worker holds more than the record
        return cut_at_stop(result, tokens - step.generated)

    def _append_sampled(self, ids: Any, made: GenerateResult) -> None:
        if not len(ids):
            return  # stopped before its first token: no policy has sampled anything
        logprobs = np.asarray(made.logprobs, dtype="<f4")
        for span in made.version_spans or (VersionSpan(made.policy_version, 0, len(ids)),):
            part = slice(span.start, span.stop)
            self.record.append_sampled(ids[part], logprobs[part], span.policy_version)

    def _close(self) -> Reply:
        step, self._open = self._open, None
        assert step is not None and step.last is not None, step
        last = step.last
        self._given_up = 0
        self.steps.append(step.as_record(len(self.record), self._services.clock()))
        return replace(
            self._reply(step.index, step.start, last.generated.finish_reason),
            engine_s=step.engine_s,
            read=ReadReply.of_message(json.loads(last.read)) if last.read else None,
            cached_tokens=step.cached_tokens,
        )

    def _recorded_reply(self, step: StepRecord) -> Reply:
        """A step of the prefix: no engine is asked, nothing is journalled, and it is no step of this trajectory."""
        return self._reply(step.step_index, step.token_start, step.finish_reason)

    def _reply(self, index: int, start: int, finish_reason: str) -> Reply:
        """The reply that the record ends with; the context rests behind it."""
        ids = self.record.token_ids[start:]
        self._seen = len(self.record)
        text = self._input.template.decode(ids.tolist())
        self._input.replied(text, int(ids[-1]) if len(ids) else None)
        self._ends.add(self._resting("generate()", None))
        return Reply(
            text=text,
            token_ids=tuple(ids.tolist()),
            logprobs=tuple(self.record.logprobs[start:].tolist()),
            finish_reason="stop" if finish_reason == "stop" else "length",
            thinking_opened=self._thinking_opened(start),
            step_index=index,
            policy_version=int(self.record.policy_version[start]) if len(ids) else -1,
            context=self,
        )

    def _reading(self) -> ReplyReading | None:
        if not (self._services.engine_reads_calls and self._tools.schemas):
            return None
        return ReplyReading(self._tools.schemas, thinking_end=self._input.template.thinking_end_ids)

    def _thinking_opened(self, start: int) -> bool:
        tail = self.record.token_ids[max(0, start - _TAIL_TOKENS) : start].tolist()
        return self._input.template.decode(tail).rstrip().endswith(OPEN)

    def _exhausted(self) -> bool:
        return self._next_step >= self._services.budget.max_steps or self.context_tokens >= self.max_context_tokens

    def _why_exhausted(self) -> str:
        budget = self._services.budget
        if self._next_step >= budget.max_steps:
            return f"it used its {budget.max_steps} steps"
        return f"its context of {self.context_tokens} tokens fills the limit of {self.max_context_tokens}"

    def _render(self) -> None:
        self._input.render(self.record, first_step=self._next_step == 0)

    @property
    def _next_step(self) -> int:
        """Number of the next step: of all steps that led here, those before a fork included."""
        return self._branch.steps + self._replay.steps + len(self.steps)

    def _check_rests(self, what: str) -> None:
        self._port.check_goes_on(what)
        if self._open is not None:
            raise RuntimeError(f"{what} while the step before is awaited: await one step after the other")

    # -- of the driver -----------------------------------------------------------------------------

    @property
    def actions(self) -> list[ActionRecord]:
        """The actions of this branch, in the order of their calls."""
        return self._calls.records

    @property
    def generated_tokens(self) -> int:
        return self._generated + sum(fork.generated_tokens for fork in self._forks)

    @property
    def dropped_tokens(self) -> int:
        """Tokens that answered parts of steps had sampled which then ended without a reply, in all branches."""
        return self._dropped + sum(fork.dropped_tokens for fork in self._forks)

    def interrupt(self) -> None:
        """The run is ending: steps that are cancelled from now on are not the program's doing."""
        self._branch.tree.interrupted = True

    def check_prefix(self) -> None:
        """The program has returned: it must have replayed its prefix.

        Raises
        ------
        PrefixDiverged
        """
        self._replay.check_ended()

    def end(self) -> None:
        """The program has ended: what it has left running is cancelled."""
        if self._gateway is not None:
            self._gateway.close()
        self._branch.tree.end()

    def branches(self) -> Iterator[LiveContext]:
        """This context and all that were forked from it, each before its own forks."""
        yield self
        for fork in self._forks:
            yield from fork.branches()

    def transcript_texts(self) -> tuple[tuple[str, ...], str]:
        """The texts of its steps, and the whole of it decoded."""
        decode, record = self._input.template.decode, self.finished_record
        ids = record.token_ids
        spans = self._replay.spans + [(step.token_start, step.token_stop) for step in self.steps]
        replies = tuple(decode(ids[start:stop].tolist()) for start, stop in spans)
        return replies, decode(ids.tolist())

    @property
    def announced(self) -> TrajectoryId | None:
        """The name by which the scheduler knows this branch; None before its first request."""
        return self._spec.trajectory_id if self._port.announced else None

    @property
    def finished_record(self) -> TokenRecord:
        """The record without the tokens of a step that has not ended, and those that no engine has seen."""
        return self.record if self._seen == len(self.record) else self.record.fork(self._seen)
