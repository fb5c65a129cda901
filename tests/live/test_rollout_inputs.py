"""The values that `Rollout` takes: shorthand and full form are one, defaults stay, wrong values get one line."""

from __future__ import annotations

import inspect
import shutil
import sys
from dataclasses import FrozenInstanceError, asdict, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dask.config
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.live_agents import ToolAgent
from worlds.live_world import emulated

import heddle_dask
from heddle_dask import (
    Budget,
    ChatModel,
    Engines,
    EngineSpec,
    Output,
    Patience,
    Pools,
    RetryPolicy,
    Rollout,
    Sampling,
    ServiceSpec,
    Strategy,
    VllmOptions,
)
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.environments.base import Task
from heddle_dask.live.driver.files.continuation import check_continues
from heddle_dask.live.driver.inputs.meant_arguments import PLACES
from heddle_dask.live.driver.inputs.rollout_inputs import tasks_of
from heddle_dask.live.driver.session.open_session import check_logprobs
from heddle_dask.live.wire.driver_messages import ReadyEngine
from heddle_dask.weights.model_directory import model_digest

CLIENT: Any = None  # the constructor only keeps it


def rollout(model: str, **chosen: Any) -> Rollout:
    return Rollout(CLIENT, env=ToolAgent(), model=model, **chosen)


def test_the_constructor_takes_at_most_thirteen_parameters() -> None:
    names = list(inspect.signature(Rollout).parameters)
    assert len(names) <= 13
    assert names[:3] == ["client", "env", "model"]


@pytest.mark.parametrize(
    "value",
    [Budget, ChatModel, Engines, EngineSpec, Output, Patience, Pools, RetryPolicy, Sampling, Strategy],
)
def test_the_values_are_public_frozen_and_documented(value: type) -> None:
    assert value.__name__ in heddle_dask.__all__
    assert is_dataclass(value)
    assert value.__doc__ is not None and not value.__doc__.startswith(f"{value.__name__}(")
    made = Output("runs/x.zarr") if value is Output else EngineSpec("emulated", "m", 4, 64)
    made = ChatModel("m") if value is ChatModel else made
    made = made if value in (Output, EngineSpec, ChatModel) else value()
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        made.seed = 1


def test_the_default_engine_is_vllm_on_every_tagged_worker(model_dir: str) -> None:
    assert Engines() == Engines("vllm", count=None, slots=None, kv_transfer=False, tp_degrees=None, cost=None)
    assert rollout(model_dir).spec == EngineSpec("vllm", model_dir)
    assert Strategy() == Strategy("sticky-forecast", ())
    assert Output("x.zarr").mode == "create"


def test_shorthand_is_the_full_form(model_dir: str, tmp_path: Path) -> None:
    spec = emulated(model_dir)
    assert Engines.of("emulated") == Engines(kind="emulated") == Engines.of(Engines("emulated"))
    assert Engines.of(spec) == Engines(spec=spec)
    assert Engines(tp_degrees=[2, 1, 1]) == Engines(tp_degrees=(2, 1, 1))
    assert Output.of(str(tmp_path)) == Output(tmp_path) == Output.of(Output(tmp_path, "create", {}))
    assert Output.of(None) is None
    short = rollout(model_dir, engines="emulated", seed=3)
    full = rollout(model_dir, engines=Engines(kind="emulated"), seed=3)
    assert short.spec == full.spec
    assert rollout(model_dir, engines=spec).spec is spec
    assert rollout(model_dir, engines=Engines(spec=spec, count=2)).spec is spec


def test_variables_of_the_template_are_those_of_every_trajectory(model_dir: str) -> None:
    assert ChatModel.of(model_dir) == ChatModel(model_dir) == ChatModel.of(ChatModel(model_dir, {}))
    made = rollout(ChatModel(model_dir, {"enable_thinking": False}))  # type: ignore[arg-type]
    assert made.model == model_dir
    assert made.template._variables == {"enable_thinking": False} == made.chat_template_kwargs
    assert made._describe()["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(BadInput, match="'tokenize' is no variable"):
        rollout(ChatModel(model_dir, {"tokenize": True}))  # type: ignore[arg-type]


def test_the_rollout_gives_its_engines_its_context_and_seed(model_dir: str) -> None:
    engines = Engines("emulated", count=4, slots=16, kv_transfer=True, cost={"seconds_per_token": 0.5})
    made = rollout(model_dir, engines=engines, budget=Budget(max_context_tokens=512), seed=7)
    assert made.spec == EngineSpec(
        "emulated",
        model_dir,
        slots=16,
        max_model_len=512,
        seed=7,
        kv_transfer=True,
        options=EmulatedOptions(cost={"seconds_per_token": 0.5}),
    )


def test_options_of_a_kind_and_the_type_reach_the_engine_and_the_stored_facts(model_dir: str) -> None:
    options = VllmOptions(gpu_memory_utilization=0.8, quantization="fp8", logprobs="processed")
    made = rollout(model_dir, engines=Engines(options=options, dtype="bfloat16"))
    assert (made.spec.options, made.spec.dtype) == (options, "bfloat16")
    assert made._describe()["logprobs"] == "processed"
    assert rollout(model_dir, engines="emulated")._describe()["logprobs"] == "raw"
    cost = {"seconds_per_token": 0.5}
    slow = Engines("emulated", options=EmulatedOptions(time_scale=2.0), cost=cost)
    assert rollout(model_dir, engines=slow).spec.options == EmulatedOptions(cost, time_scale=2.0)


def test_a_run_is_continued_with_the_same_kind_of_logprobs_only(tmp_path: Path) -> None:
    raw, processed = {"logprobs": "raw"}, {"logprobs": "processed"}
    for resumes, verb in ((False, "appended to"), (True, "resumed")):
        check_continues(tmp_path, raw, raw, resumes=resumes)
        check_continues(tmp_path, {}, raw, resumes=resumes)
        with pytest.raises(BadInput, match=f"with logprobs raw, not processed: it can only be {verb} with the same"):
            check_continues(tmp_path, raw, processed, resumes=resumes)


def test_sampling_that_an_older_run_did_not_store_is_not_taken_from_todays_settings(tmp_path: Path) -> None:
    recorded = {"sampling": {"temperature": 1.0, "top_p": 1.0}}
    with dask.config.set({"heddle.sampling.min_p": 0.25}):
        check_continues(tmp_path, recorded, {"sampling": asdict(Sampling(min_p=0.0))}, resumes=True)
        with pytest.raises(BadInput, match=r"was made with sampling .*, not .*'min_p': 0\.25"):
            check_continues(tmp_path, recorded, {"sampling": asdict(Sampling())}, resumes=True)


def test_another_kind_of_engine_is_refused_and_seeds_of_steps_are_not_compared(tmp_path: Path) -> None:
    vllm, emulated = ({"engine": {"kind": kind, "slots": 4}} for kind in ("vllm", "emulated"))
    check_continues(tmp_path, vllm, {"engine": {"kind": "vllm", "slots": 8}}, resumes=False)
    with pytest.raises(BadInput, match="was made with engine vllm, not emulated: it can only be appended to"):
        check_continues(tmp_path, vllm, emulated, resumes=False)
    unseeded, seeded = ({"sampling": asdict(Sampling(seeded=seeded))} for seeded in (False, True))
    check_continues(tmp_path, unseeded, seeded, resumes=True)


def test_a_resumed_batch_has_the_seed_and_the_samples_of_that_batch(tmp_path: Path) -> None:
    recorded = {
        "seed": 1,
        "samples": 2,
        "batch_facts": [{"seed": 1, "samples": 2}, {"seed": 5, "samples": 4}],
    }
    check_continues(tmp_path, recorded, {"seed": 5, "samples": 4}, resumes=True)
    check_continues(tmp_path, recorded, {"seed": 7, "samples": 3}, resumes=False)
    for other in ({"seed": 1, "samples": 4}, {"seed": 5, "samples": 2}):
        with pytest.raises(BadInput, match="it can only be resumed with"):
            check_continues(tmp_path, recorded, other, resumes=True)


def test_a_run_without_a_context_limit_is_resumed_with_the_limit_that_its_engines_had(tmp_path: Path) -> None:
    recorded = {"limits": Budget().replayed, "context_tokens": 4096}
    check_continues(tmp_path, recorded, {"limits": Budget().replayed}, resumes=True)
    check_continues(tmp_path, recorded, {"limits": Budget(max_context_tokens=4096).replayed}, resumes=True)
    with pytest.raises(BadInput, match="was made with limits"):
        check_continues(tmp_path, recorded, {"limits": Budget(max_context_tokens=512).replayed}, resumes=True)


def test_engines_that_run_already_must_return_the_logprobs_that_are_recorded() -> None:
    ready = ReadyEngine(EngineDescription(EngineId("w/1-1"), 4, 4096), "vllm", "model", "processed")
    check_logprobs(EngineSpec("vllm", "model", options=VllmOptions(logprobs="processed")), [ready])
    with pytest.raises(BadInput, match="engine w/1-1 runs already and returns processed logprobs, not raw: ask for"):
        check_logprobs(EngineSpec("vllm", "model"), [ready])


def test_contexts_beyond_the_engines_are_refused_before_anything_starts(model_dir: str) -> None:
    with pytest.raises(BadInput, match="max_context_tokens is 65, and an engine takes 64: use at most that"):
        rollout(model_dir, engines=SPEC, budget=Budget(max_context_tokens=65))


COUNTS = st.integers(max_value=2**31 - 1)  # larger counts are refused: test_bad_values


@given(st.sampled_from(["vllm", "emulated"]), COUNTS, st.none() | COUNTS, st.booleans())
def test_engines_are_refused_where_a_count_is_below_one_and_else_described_as_given(
    kind: str, slots: int, count: int | None, kv_transfer: bool
) -> None:
    if slots < 1 or (count is not None and count < 1):
        with pytest.raises(BadInput, match="use a whole number of at least 1"):
            Engines(kind, count, slots, kv_transfer)
        return
    spec = Engines(kind, count, slots, kv_transfer).spec_for("model", 64, 3)
    assert (spec.kind, spec.slots, spec.kv_transfer) == (kind, slots, kv_transfer)
    assert (spec.model, spec.max_model_len, spec.seed) == ("model", 64, 3)


SPEC = EngineSpec("emulated", "model", slots=4, max_model_len=64)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"kind": "sglang"}, "sglang"),
        ({"count": 0}, "count is 0: use a whole number of at least 1"),
        ({"count": 2.0}, "count is 2.0"),
        ({"count": True}, "count is True"),
        ({"slots": "8"}, "slots is '8'"),
        ({"options": {"quantization": "fp8"}}, r"options is .* use VllmOptions\("),
        ({"kind": "emulated", "options": VllmOptions()}, r"options is .* use EmulatedOptions\("),
        ({"spec": SPEC, "dtype": "bfloat16"}, "dtype is 'bfloat16', in the spec 'auto': set it in the spec"),
        ({"kv_transfer": "yes"}, "kv_transfer is 'yes': use True or False"),
        ({"tp_degrees": 2}, "tp_degrees is 2: use 'auto' or a list"),
        ({"tp_degrees": "2,1"}, "tp_degrees is '2,1': use 'auto' or a list"),
        ({"cost": "h100"}, "cost is 'h100': use a mapping"),
        ({"patience": 30}, "patience is 30: use Patience"),
        ({"spec": "vllm"}, "spec is 'vllm': use an EngineSpec"),
        ({"spec": SPEC, "slots": 16}, "slots is 16, in the spec 4: set it in the spec"),
        ({"spec": SPEC, "kv_transfer": True}, "kv_transfer is True, in the spec False"),
    ],
)
def test_engines_that_cannot_be_are_refused_in_one_line(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        Engines(**chosen)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (("",), "path is ''"),
        ((None, "append"), "path is None"),
        (("x.zarr", "replace"), "mode is 'replace': use one of create, append, overwrite, resume"),
        (("x.zarr", "create", ["a"]), "metadata is .* use a mapping"),
    ],
)
def test_an_output_that_cannot_be_is_refused_in_one_line(chosen: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        Output(*chosen)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"engines": 2}, "engines is 2: use a kind such as 'vllm', an EngineSpec or Engines"),
        ({"strategy": ["heddle"]}, "use the name of a preset or Strategy"),
        ({"strategy": "slimy"}, "unknown strategy 'slimy'"),
        ({"out": 5}, "out: path is 5: use a path"),
        ({"samples": 0}, "samples is 0: use a whole number of at least 1"),
        ({"samples": "8"}, "samples is '8'"),
        ({"budget": 512}, r"budget is 512: use Budget\("),
        ({"sampling": {"top_p": 1}}, r"sampling is .* use Sampling\("),
        ({"pools": 3}, r"pools is 3: use Pools\("),
    ],
)
def test_a_rollout_refuses_a_wrong_value_in_one_line(chosen: dict[str, Any], message: str, model_dir: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        rollout(model_dir, **chosen)
    assert "\n" not in str(raised.value)


def test_a_template_that_rewrites_history_is_told_and_recorded(model_dir: str, tmp_path: Path) -> None:
    """The stored run says so too: progress lines are gone when somebody reads it."""
    model = shutil.copytree(model_dir, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
        "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' }}{% else %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    told: list[str] = []
    described = rollout(str(model), progress=told.append)._describe()
    assert "rewrites an earlier assistant turn" in described["template_note"]
    assert told == [f"note: {described['template_note']}"]
    assert "template_note" not in rollout(model_dir)._describe()


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (lambda: [], "gave none"),
        (lambda: [1], "gave a int"),
        (lambda: 1 / 0, "failed: ZeroDivisionError: division by zero"),
        (lambda: sys.exit(3), "failed: SystemExit: 3"),
    ],
)
def test_tasks_of_a_users_environment_that_cannot_be_used_are_one_line(drawn: Any, said: str) -> None:
    class Broken(ToolAgent):
        name = "broken"

        def tasks(self, count: int, seed: int) -> Any:
            return drawn()

    with pytest.raises(BadInput, match=rf"^environment 'broken': tasks\(2, 0\) {said}"):
        tasks_of(2, Broken(), 0)


CONTENTS = {
    "weights": "1",
    "model": "m",
    "rewards": {"reward": "1"},
    "services": [ServiceSpec("judge", "/m").to_mapping()],
    "service_models": {"judge": "1"},
    "task_list": {"count": 1, "digest": "1", "payload": "1"},
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"weights": "2"}, "other weights than those that are now in m"),
        ({"rewards": {}}, "another reward function"),
        ({"services": [ServiceSpec("judge", "/m", max_tokens=9).to_mapping()]}, "declared otherwise"),
        ({"service_models": {"judge": "2"}}, "model services of other weights"),
        ({"task_list": {"count": 1, "digest": "1", "payload": "2"}}, "other payloads of the same tasks"),
    ],
)
def test_changed_contents_are_refused_or_accepted(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    for resumes in (False, True):
        check = partial(check_continues, tmp_path, CONTENTS, resumes=resumes)
        assert check(CONTENTS) == []
        with pytest.raises(BadInput, match=f"{said}.*--accept-changes"):
            check({**CONTENTS, **changed})
        (line,) = check({**CONTENTS, **changed}, accepts=True)
        assert said in line
        recorded = {"batch_facts": [{}, {**CONTENTS, **changed}], **CONTENTS}
        assert check_continues(tmp_path, recorded, {**CONTENTS, **changed}, resumes=resumes) == []


def test_the_same_model_and_services_may_lie_elsewhere(tmp_path: Path) -> None:
    moved = {**CONTENTS, "model": "n", "services": [ServiceSpec("judge", "/n", gpus=(2,)).to_mapping()]}
    assert check_continues(tmp_path, CONTENTS, moved, resumes=True) == []
    with pytest.raises(BadInput, match="made with model m, not n"):
        check_continues(tmp_path, {"model": "m"}, {"model": "n", "weights": "1"}, resumes=True)


def test_attempts_are_added_to_a_batch_unless_its_groups_are_rewarded_as_a_whole(tmp_path: Path) -> None:
    assert check_continues(tmp_path, {"samples": 2}, {"samples": 5}, resumes=True) == []
    with pytest.raises(BadInput, match="samples 5, not 2: it can only be resumed with 5 or more"):
        check_continues(tmp_path, {"samples": 5}, {"samples": 2}, resumes=True)
    with pytest.raises(BadInput, match="no attempt can be added"):
        check_continues(tmp_path, {"samples": 2}, {"samples": 5, "rewards": {"group_reward": "1"}}, resumes=True)


def test_a_model_is_known_by_its_content(model_dir: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy)
    digest = model_digest(copy)
    assert digest == model_digest(model_dir) != ""
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-400] + bytes(400))
    assert model_digest(copy) != digest
    assert model_digest(tmp_path) == ""
    # Of a file that is too long to be read, samples are.
    with (copy / "long.safetensors").open("wb") as long:
        long.truncate(40 << 20)
    before = model_digest(copy)
    with (copy / "long.safetensors").open("r+b") as long:
        for place in range(0, 40 << 20, 1 << 19):
            long.seek(place)
            long.write(b"1")
    assert model_digest(copy) != before


@pytest.mark.parametrize(
    ("given_", "error", "said"),
    [
        ({"engines": Budget()}, BadInput, r"engines is Budget\(…\): .*; this one goes to budget=Budget\(…\)"),
        ({"budget": Sampling()}, BadInput, r"this one goes to sampling=Sampling\(…\)"),
        ({"strategy": Patience()}, BadInput, r"this one goes to engines=Engines\(patience=Patience\(…\)\)"),
        ({"out": RetryPolicy()}, BadInput, r"this one goes to budget=Budget\(retries=RetryPolicy\(…\)\)"),
        ({"temperature": 0.5}, TypeError, r"no argument 'temperature': use sampling=Sampling\(temperature=…\)"),
        ({"max_steps": 5}, TypeError, r"no argument 'max_steps': use budget=Budget\(max_steps=…\)"),
        ({"sample": 5}, TypeError, r"no argument 'sample': did you mean 'samples'\?"),
        ({"progress": "yes"}, BadInput, r"progress is 'yes': use True, False or a function"),
        ({"on_progress": 3}, BadInput, r"progress is 3: use True, False or a function"),
        ({"tools": [3]}, BadInput, r"tools is \[3\]: use a list of functions"),
    ],
)
def test_settings_in_a_wrong_place_say_where_they_go(
    model_dir: str, given_: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        rollout(model_dir, **given_)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([{"prompt": "1+1?"}], "tasks has {'prompt': '1.1.'}: use texts, or Task"),
        ([Task("a", "1+1?", "2")], "task 'a': id and prompt are texts, and the payload is a mapping"),  # type: ignore[arg-type]
        ([Task(3, "1+1?")], "task 3: id and prompt are texts"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_task_is_refused(tasks: list[Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        tasks_of(tasks, ToolAgent(), 0)


def search(query: str) -> str:
    return query


def test_tools_and_a_score_are_an_environment(model_dir: str) -> None:
    def score(task: Task, answer: str) -> float:
        return float(answer == task.payload)

    made = Rollout(CLIENT, env=score, model=model_dir, tools=[search], engines="emulated")
    assert made.environment.name == "score"
    assert Rollout(CLIENT, env=ToolAgent(), model=model_dir, tools=[search]).environment.name == "tool-agent"
    with pytest.raises(BadInput, match=r"env is a function: .*with tools= a function `score\(task, answer\)`"):
        Rollout(CLIENT, env=score, model=model_dir)


def test_every_setting_has_its_place() -> None:
    for name in PLACES:
        assert is_dataclass(getattr(heddle_dask, name)), name
    with pytest.raises(BadInput, match=r"use Engines\(spec=EngineSpec\(…\)\)"):
        Engines(EngineSpec("emulated", "m"))  # type: ignore[arg-type]


def test_the_model_that_comes_along_is_the_default() -> None:
    made = Rollout(CLIENT, env=ToolAgent(), engines="emulated")
    assert Path(made.model).is_dir() and made.model == str(ChatModel("tiny-agent").path)
    assert "environment=tool-agent" in repr(made) and "strategy=sticky-forecast" in repr(made)


def test_bad_input_is_a_value_error_and_the_package_has_a_version() -> None:
    assert issubclass(BadInput, ValueError)
    assert heddle_dask.__version__ == "0.1.0" and "__version__" in dir(heddle_dask)
