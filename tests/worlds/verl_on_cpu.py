"""Runs a program that trains with verl on CPUs, and notes what each of its processes got: `python FILE PROGRAM`.

verl's code is as it comes. It is told of a platform by its registry of them (VERL_PLATFORM=cpu), and that TRL is not
installed, which it needs in another version.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from worlds.published_weights import published_are


class CpuDevice(types.ModuleType):
    """`torch.cpu` with the calls of a GPU's module that have nothing to do here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, None) or (lambda *_, **__: (0, 0) if name == "mem_get_info" else 0)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDevice("torch_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


def main(program: str) -> None:
    sys.modules["trl"] = None  # type: ignore[assignment]
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.padding import no_padding_2_padding

    from pipelines.any_trainer.verl_rollouts import VerlRollouts

    train, publish = FSDPEngineWithLMHead.train_batch, VerlRollouts.publish
    rank = int(os.environ["RANK"])
    steps: list[dict[str, Any]] = []

    def watched(self: Any, data: Any, loss_function: Any) -> Any:
        output = self.infer_batch(data.clone())
        own = no_padding_2_padding(output["model_output"]["log_probs"], data)
        mask = data["response_mask"].bool()
        tokens = [ids.tolist() for ids in data["input_ids"].unbind()]
        trained = [tokens[row] for row in range(len(tokens)) if mask[row].any()]
        difference = float((own - data["rollout_log_probs"])[mask].abs().max())
        result = train(self, data, loss_function)
        pieces = sorted({type(one).__name__ for one in self.module.parameters()})
        norm = float(result["metrics"]["grad_norm"])
        steps.append({"trained": trained, "difference": difference, "parameters": pieces, "grad_norm": norm})
        return result

    def published(self: Any, weights: Any, step: int) -> None:
        whole = dict(weights)
        publish(self, iter(whole.items()), step)
        steps[-1]["published"] = published_are(whole, Path("runs/verl/weights")) if rank == 0 else True

    FSDPEngineWithLMHead.train_batch, VerlRollouts.publish = watched, published  # type: ignore[method-assign]
    runpy.run_path(program, run_name="__main__")
    Path(f"rank-{rank}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main(sys.argv[1])
