"""An emulated engine that first "compiles", as vLLM's log tells it, until a file is there."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.kinds.emulated import EmulatedKind
from heddle_dask.engines.spec import EngineCommand, EngineSpec

_FIRST = """
import os, sys, time
allowed, argv = sys.argv[1], sys.argv[2:]
print("(EngineCore pid=7) INFO 11-28 04:10:00 [gpu_model_runner.py:5040] Starting to load model m...", flush=True)
print("(EngineCore pid=7) INFO 11-28 04:10:02 [monitor.py:40] Starting torch.compile", flush=True)
while not os.path.exists(allowed):
    time.sleep(0.02)
print("(EngineCore pid=7) INFO 11-28 04:10:09 [monitor.py:53] torch.compile took 7.00 s in total", flush=True)
os.execv(argv[0], argv)
"""


@dataclass(frozen=True, slots=True)
class CompilingKind(EmulatedKind):
    """The directory of the model has the file ``compiled`` when compilation may end."""

    name: str = "compiling"

    def command(self, spec: EngineSpec, address: EngineAddress) -> EngineCommand:
        own = super(CompilingKind, self).command(spec, address)
        return EngineCommand((sys.executable, "-c", _FIRST, f"{spec.model}/compiled", *own.argv), own.env, "one")


COMPILING = CompilingKind()
