"""``heddle train``: what is refused, in one line, before anything starts or is overwritten; what options come to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner, Result

from heddle_dask.cli.main import heddle
from heddle_dask.cli.rollout.command import rollout
from heddle_dask.cli.rollout.run import RolloutRun
from heddle_dask.cli.train import run as training_run
from heddle_dask.cli.train.command import NOT_OF_ROLLOUT, train
from heddle_dask.cli.train.order import engine_dtype
from heddle_dask.cli.train.run import TrainRun
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.run_description import StalenessBound
from heddle_dask.environments.loading import held_out_name, training_name
from heddle_dask.live.training.going_on import OpenedTraining, check_store
from heddle_dask.training.loop import LoopStart
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.sample_buffer import BatchRule
from heddle_dask.training.stored_samples import StoredSamples
from heddle_dask.weights.manifest import ModelFacts
from heddle_dask.weights.store import WeightStore
from heddle_dask.weights.tensor_files import RawTensor

RULE = BatchRule(1, StalenessBound(3, "cancel", 2))


def run(*options: str, out: Path) -> Result:
    return CliRunner().invoke(heddle, ["train", "--out", str(out), *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alpha", "-1"], "alpha is -1"),
        (["--alpha", "0"], "use mode sync"),
        (["--mode", "sync", "--alpha", "1"], "alpha 1 in mode sync"),
        (["--batch", "30", "--samples", "8"], "cannot be made of groups of 8: use 24 or 32"),
        (["--samples", "1"], "group size"),
        (["--temperature", "0"], "temperature is 0"),
        (["--top-p", "0.9"], "top_p is 0.9"),
        (["--top-k", "5"], "top_k is 5"),
        (["--min-p", "0.1"], "min_p is 0.1"),
        (["--env", "math:test"], "held-out tasks"),
        (["--env", "replay:tau_dialogues"], "no policy to train"),
        (["--env", "math=0"], "finite number above 0"),
        (["--env", "math,search", "--set", "affinity=map,maths=A"], "names 'maths', of which there is no task"),
        (["--env", "math:hard,search", "--set", "affinity=map,easy=A"], "the names are math:hard:train, search:train"),
        (["--engine", "emulated", "--tp", "2"], "--tp 2 need 2 workers, and --engines 1 says"),
        (["--report-to", "paper"], "tensorboard, wandb, trackio"),
        (["--trainer", "speed=2"], "use KEY=VALUE with one of"),
        (["--trainer", "passes=0"], "trainer passes is 0"),
        (["--resume"], "has no run.json"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--model", "no/such"], "does not exist"),
        (
            ["--prefix-sampling", "--engine-arg", "tool-call-parser=hermes"],
            "prefixes are not replayed where engines read",
        ),
        (["--store", "collective://"], "name the trainer's network address"),
        (["--store", "collective://10.0.0.7"], "such as collective://10.0.0.7:29600"),
        (["--store", "collective://0.0.0.0:29600"], "engines cannot connect to 0.0.0.0"),
        (["--store", "collective://10.0.0.7:29600", "--engine", "emulated"], "use --engine vllm"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(options: list[str], message: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(*options, out=out)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        ("torch", [], "heddle train needs PyTorch"),
        ("transformers", [], "needs transformers, which is not installed"),
        ("peft", ["--lora", "8"], "--lora needs peft"),
    ],
)
def test_a_trainer_that_cannot_start_is_refused(
    module: str, options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heddle_dask.cli.train import run as training

    monkeypatch.setattr(training, "find_spec", lambda name: None if name == module else True)
    result = run("--engine", "emulated", *options, out=tmp_path / "run")
    assert (result.exit_code, len(result.output.strip().splitlines())) == (2, 1), result.output
    assert said in result.output and not (tmp_path / "run").exists()


def test_a_training_that_exists_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "run"
    TrainingDirectory(out).begin({"steps": 3}, "create", "a")
    before = (out / "run.json").read_bytes()
    assert "--resume" in run(out=out).output
    assert run(out=out).exit_code == 2
    assert (out / "run.json").read_bytes() == before
    assert [path.name for path in out.iterdir()] == ["run.json"]


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    result = run("--store", str(tmp_path / "file" / "store"), "--engine", "emulated", out=tmp_path / "run")
    assert result.exit_code == 2, result.output
    assert "cannot be written" in result.output
    assert not (tmp_path / "run").exists()


def test_a_store_with_weights_of_another_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store" / "other" / "00000001").mkdir(parents=True)
    store = WeightStore(str(tmp_path / "store"))
    with pytest.raises(BadInput, match=r"weights of another training \(other\)"):
        check_store(store, ["mine"])
    check_store(store, ["other"])


def test_a_training_that_is_replaced_leaves_nothing_in_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: RolloutRun) -> int:
        return 0

    monkeypatch.setattr(RolloutRun, "run", nothing)
    out, store = tmp_path / "run", WeightStore(str(tmp_path / "store"))
    TrainingDirectory(out).begin({"steps": 3}, "create", "replaced")
    tensor = RawTensor("w", "F32", (1,), np.zeros(1, np.float32))
    store.write(PolicyVersion("replaced", 1), [tensor], ModelFacts("digest"))
    options = ("--store", str(tmp_path / "store"), "--engine", "emulated")
    assert run("--overwrite", *options, out=out).exit_code == 0
    assert store.lineages() == ()
    for mode in ("--resume", "--overwrite"):
        assert run(mode, *options, out=out).exit_code == 0


async def _interrupted(started: asyncio.Event, what: Coroutine[Any, Any, object], stack: AsyncExitStack) -> None:
    async with stack:
        task = asyncio.create_task(what)
        await started.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_an_interrupted_start_ends_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Starting:
        def __init__(self, *_: object) -> None:
            pass

        async def state(self) -> None:
            started.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            ended.append("trainer")

    monkeypatch.setattr(training_run, "RemoteTrainer", Starting)
    started, stack = asyncio.Event(), AsyncExitStack()
    order = Mock(directory=TrainingDirectory(tmp_path), rule=RULE, trainer={}, mode="create")
    order.directory.begin({}, "create", "a")
    opening = TrainRun._opened(Mock(train=order, model="m"), Mock(status="running"), stack)
    asyncio.run(_interrupted(started, opening, stack))
    assert ended == ["trainer"]


def test_an_interrupted_start_ends_its_rollout(tmp_path: Path) -> None:
    class Opening:
        watch = open_batches = Mock()
        ended = False

        async def __aiter__(self) -> AsyncIterator[None]:
            started.set()
            await asyncio.Event().wait()
            yield

        async def aclose(self) -> None:
            self.ended = True

    started, stack, stream = asyncio.Event(), AsyncExitStack(), Opening()
    rollout = Mock(session_id=None)
    rollout.stream_groups.return_value = stream
    with StoredSamples.create(tmp_path, RULE, "a") as samples:
        opened = OpenedTraining(Mock(), samples, "a", LoopStart())
        opening = TrainRun._train_on(Mock(), Mock(), rollout, opened, stack)
        asyncio.run(_interrupted(started, opening, stack))
    assert stream.ended


def test_every_option_of_a_rollout_is_one_of_a_training_or_left_out_by_name() -> None:
    names = {option.name for option in train.params}
    missing = {option.name for option in rollout.params} - names
    assert missing <= NOT_OF_ROLLOUT
    assert len(names) == len(train.params)


@pytest.mark.parametrize(
    ("given", "trained", "judged"),
    [
        ("math", "math:train", "math"),
        ("math:hard", "math:hard:train", "math:hard"),
        ("code:hard:train", "code:hard:train", "code:hard"),
        ("my.module:solve", "my.module:solve", "my.module:solve"),
    ],
)
def test_training_and_held_out_tasks_differ(given: str, trained: str, judged: str) -> None:
    assert training_name(given) == trained
    assert held_out_name(trained) == judged


@pytest.mark.parametrize(
    ("asked", "engine", "stored", "runs"),
    [
        ("auto", "vllm", "float32", "float32"),
        ("auto", "vllm", "bfloat16", "auto"),
        ("bfloat16", "vllm", "float32", "bfloat16"),
        ("auto", "emulated", "float32", "auto"),
    ],
)
def test_engines_of_a_training_run_a_model_in_the_type_in_which_it_is_stored(
    asked: str, engine: str, stored: str, runs: str, model_dir: str, tmp_path: Path
) -> None:
    for file in Path(model_dir).iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text()) | {"dtype": stored}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert engine_dtype(asked, engine, str(tmp_path)) == runs


def test_show_knows_a_training(tmp_path: Path) -> None:
    directory = TrainingDirectory(tmp_path)
    directory.begin({"steps": 3, "environment": "math:train"}, "create", "a")
    result = CliRunner().invoke(heddle, ["show", "--json", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 0
