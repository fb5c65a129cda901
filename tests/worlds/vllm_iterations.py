"""A process that plays requests on real vLLM and says what each iteration of its scheduler ran.

vLLM runs inside the process, so that a request arrives between two iterations and not at some time. What an iteration
ran is vLLM's own log of it (`enable_logging_iteration_details`). Reads a JSON list of plays from the standard input:

``{"model", "options": {…EngineArgs…}, "requests": [{"arrives", "prompt", "length", "priority"}, …]}``

and writes for each ``{"iterations": [[requests, tokens], …], "ends": [iteration of each request]}`` to
the file that is named as argument.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any


class IterationLog(logging.Handler):
    """Takes vLLM's lines about iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "Iteration(%d)" in record.msg:
            assert isinstance(record.args, tuple)
            _, _, prompts, prompt_tokens, samples, sample_tokens, *_ = record.args
            # To vLLM a preempted request that is prefilled again is one that samples.
            self.rows.append([prompts + samples, prompt_tokens + sample_tokens])


def play(number: int, wanted: dict[str, Any]) -> dict[str, Any]:
    from vllm import EngineArgs, SamplingParams  # type: ignore[import-not-found]
    from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found]

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=wanted["model"],
            dtype="float32",
            seed=0,
            scheduling_policy="priority",
            disable_log_stats=False,
            enable_logging_iteration_details=True,
            **wanted["options"],
        )
    )
    # Only now: vLLM sets its loggers up again when an engine is made.
    logger, log = logging.getLogger("vllm.v1.metrics.loggers"), IterationLog()
    logger.addHandler(log)
    requests = wanted["requests"]
    waiting = sorted(range(len(requests)), key=lambda index: requests[index]["arrives"])
    ends = [0] * len(requests)
    iteration = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and requests[waiting[0]]["arrives"] <= iteration:
            index = waiting.pop(0)
            request = requests[index]
            length = request["length"]
            engine.add_request(
                f"{number}-{index}",
                {"prompt_token_ids": request["prompt"]},
                SamplingParams(max_tokens=length, min_tokens=length, ignore_eos=True, temperature=0),
                priority=request["priority"],
            )
        outputs = engine.step()
        iteration += 1
        for output in outputs:
            if output.finished:
                ends[int(output.request_id.partition("-")[2])] = iteration
    logger.removeHandler(log)
    return {"iterations": log.rows, "ends": ends}


def main(out: Path) -> None:
    # In this process: requests of another one would arrive during an iteration. One thread, which waits for no other.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    # Whatever the environment asks for: other packages lower the level for their subprocesses.
    os.environ |= {"VLLM_CONFIGURE_LOGGING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    plays = json.load(sys.stdin)
    out.write_text(json.dumps([play(number, wanted) for number, wanted in enumerate(plays)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
