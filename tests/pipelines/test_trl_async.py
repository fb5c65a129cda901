"""The classes that TRL's AsyncGRPOTrainer asks for, with TRL's own types and its own queue reader."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds.training_builders import finished_group

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.weights.store import WeightStore

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = pytest.mark.slow  # TRL takes ten seconds to import

MODEL = Path(__file__).parents[2] / "pipelines/tiny_agent/checkpoint"


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL's module; it warns of the version of vLLM that is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import PartialState
        from trl.experimental.async_grpo import async_grpo_trainer

        PartialState(cpu=True)  # accelerate's logger asks for it
    return async_grpo_trainer


def groups() -> Iterator[Any]:
    for number, version in enumerate((1, 1, 3)):
        yield trajectory_group(finished_group(f"g{number}", version=version), "trl")


def test_the_classes_have_the_methods_of_the_protocols(trl):
    from pipelines.any_trainer.trl_async import TrlRolloutWorker, TrlWeightTransfer

    for protocol, ours in (
        (trl.RolloutWorkerProtocol, TrlRolloutWorker),
        (trl.WeightTransferProtocol, TrlWeightTransfer),
    ):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                theirs, own = inspect.signature(method), inspect.signature(getattr(ours, name))
                assert list(theirs.parameters) == list(own.parameters), name
    worker = TrlRolloutWorker(groups)
    assert set(trl.RolloutWorkerProtocol.__annotations__) <= set(vars(worker))


def test_trls_reader_takes_the_samples_and_drops_what_is_too_old(trl):
    from pipelines.any_trainer.trl_async import TrlRolloutWorker, WorkerStopped

    worker = TrlRolloutWorker(groups)
    worker.start()
    worker.update_model_version(3)
    reader = trl.RolloutQueueDataset(
        worker.rollout_buffer,
        model_version_fn=lambda: worker.model_version,
        check_health_fn=worker.check_health,
        stale_after_s=60.0,
        metrics=defaultdict(list),
        max_staleness=1,
        poll_interval_s=0.05,
    )
    found = []
    with pytest.raises(WorkerStopped, match="the rollout has ended"):
        for sample in reader:
            found.append(sample)
    assert len(found) == 2  # two members of the third group; those of the others are two versions old
    assert found[0]["completion_mask"].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert found[0]["old_log_probs"].tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1.0]
    assert [sample["advantage"] for sample in found] == [-0.5, 0.5]
    assert found[0]["metrics"] == {"reward": 0.0, "truncated": 0.0}


def test_a_full_queue_holds_the_rollout_back_until_it_is_stopped(trl):
    from pipelines.any_trainer.trl_async import TrlRolloutWorker

    taken = []

    def endless() -> Iterator[Any]:
        while True:
            taken.append(1)
            yield from groups()

    worker = TrlRolloutWorker(endless, most_waiting=3)
    worker.start()
    while not worker.rollout_buffer.full():
        pass
    worker.check_health(60.0)
    worker.stop()
    worker._thread.join(timeout=60)
    assert not worker._thread.is_alive()
    assert worker.rollout_buffer.qsize() == 3
    assert len(taken) == 1


def test_a_failure_of_the_rollout_reaches_the_trainer(trl):
    from pipelines.any_trainer.trl_async import TrlRolloutWorker, WorkerStopped

    def failing() -> Iterator[Any]:
        yield from groups()
        raise OSError("the cluster is gone")

    worker = TrlRolloutWorker(failing)
    worker.start()
    worker._thread.join()
    with pytest.raises(WorkerStopped, match="the rollout has failed: the cluster is gone"):
        worker.check_health(60.0)
    waiting = threading.Event()
    silent = TrlRolloutWorker(lambda: iter(waiting.wait, True))
    silent.start()
    with pytest.raises(WorkerStopped, match="no group for"):
        silent.check_health(-1.0)
    waiting.set()


def test_weights_are_published_before_the_engines_are_told(trl, tmp_path):
    from safetensors.torch import load_file

    from pipelines.any_trainer.trl_async import TrlWeightTransfer

    told: list[tuple[PolicyVersion, str]] = []
    transfer = TrlWeightTransfer(str(tmp_path), MODEL, lambda version, uri: told.append((version, uri)))
    state = load_file(MODEL / "model.safetensors")
    transfer.init_weight_transfer()
    for number in (1, 2):
        transfer.pause()
        transfer.send_weights(iter({name: tensor + number for name, tensor in state.items()}.items()))
        store = WeightStore(str(tmp_path))
        assert store.versions("trl")[-1] == PolicyVersion("trl", number)
        assert len(told) == number - 1
        transfer.resume()
        assert told[-1] == (PolicyVersion("trl", number), store.manifest_uri(PolicyVersion("trl", number)))
    transfer.destroy()
    manifest = store.manifest(PolicyVersion("trl", 2))
    assert manifest is not None and manifest.nbytes == (MODEL / "model.safetensors").stat().st_size
