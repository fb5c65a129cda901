"""Runs a shell block of a page with bash, beside a cluster that is there.

`heddle` of the block is called in this process, with options behind those of the page that make it small. `dask` starts
processes that live until the block ends, and each must register. What installs does nothing.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner
from worlds.markdown_blocks import ROOT

from heddle_dask.cli.main import heddle
from heddle_dask.live.clusters.worker_command import QUICK_LOOP

NOT_CALLED = {
    "pip": "it installs: tests/repository/test_install.py",
    "train": "it takes minutes: tests/live/test_training_live.py",
    "top": "it watches a rollout until it ends: tests/cli/test_cli_top.py",
}
"""Lines of mixed blocks that do nothing here, and why."""

_PRELUDE = r"""
set -euo pipefail
heddle() { registered; printf '%s\0' "$@" > requests; IFS= read -r code < answers; return "$code"; }
.venv/bin/heddle() { heddle "$@"; }
pip() { :; }
started=()
dask() {
    command dask "$@" --host 127.0.0.1 --dashboard-address 127.0.0.1:0 > "dask-${#started[@]}.log" 2>&1 &
    started+=($!)
}
registered() {
    for number in "${!started[@]}"; do
        until grep -qE 'Registered to:|Scheduler at:' "dask-$number.log"; do
            kill -0 "${started[number]}" || { cat "dask-$number.log" >&2; return 1; }
            sleep 0.05
        done
    done
}
ended() {
    status=$?
    ((status)) || registered || status=1
    ((${#started[@]})) && kill "${started[@]}" && wait "${started[@]}" || true
    printf 'exit\0%s\0' "$status" > requests
}
trap ended EXIT
"""


@dataclass(frozen=True)
class Shell:
    """Where blocks run.

    Attributes
    ----------
    place
        The working directory.
    address
        Of the scheduler that commands without one of their own are sent to.
    """

    place: Path
    address: str
    model: str

    def run(self, text: str) -> None:
        """Raise AssertionError with what was printed where a line of the block fails."""
        for name in ("requests", "answers"):
            if not (self.place / name).exists():
                os.mkfifo(self.place / name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            free_port = free.getsockname()[1]
        # What the reader fills in.
        if "dask scheduler " in text:
            text = text.replace("dask scheduler ", f"dask scheduler --port {free_port} ")
            text = text.replace("HOST:8786", f"127.0.0.1:{free_port}")
        text = re.sub(r"\bSCHEDULER\b|tcp://scheduler:8786|(tls|tcp)://HOST:8786", self.address, text).replace(
            " … ", " "
        )
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = {**os.environ, **QUICK_LOOP, "PATH": path, "PYTHONPATH": str(ROOT)}
        (self.place / "block.sh").write_text(text)
        told = self.place / "shell.log"
        with told.open("w") as log:
            script = ["bash", "-c", _PRELUDE + "source ./block.sh\n"]
            bash = subprocess.Popen(script, cwd=self.place, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            said = self._serve()
        finally:
            os.killpg(bash.pid, signal.SIGKILL)
            bash.wait()
        assert said.pop() == "0", "\n".join([*said, told.read_text()])

    def _serve(self) -> list[str]:
        """What the commands printed, then the exit status of the block."""
        said = []
        while True:
            *words, _ = (self.place / "requests").read_bytes().decode().split("\0")
            if words[0] == "exit":
                return [*said, words[1]]
            result = CliRunner().invoke(heddle, [*words, *self._smaller(words)]) if words[0] not in NOT_CALLED else None
            if result is not None:
                said.append(f"heddle {' '.join(words)}\n{result.output}")
                if result.exception is not None and not isinstance(result.exception, SystemExit):
                    raise result.exception
            (self.place / "answers").write_text(f"{result.exit_code if result else 0}\n")

    def _smaller(self, words: list[str]) -> list[str]:
        own = any(word.startswith("--scheduler") for word in words)
        cluster = [] if own else ["--scheduler", self.address]
        match words[0]:
            case "rollout":
                small = ["--engine", "emulated", "--model", self.model, "--samples", "2", "--max-steps", "2"]
                tasks = [] if "--agent" in words else ["--tasks", "1"]  # of an agent: a set of tasks
                return [*small, *tasks, "--engines", "1", *cluster]
            case "eval":
                return ["--engine", "emulated", "--model", self.model, "--max-steps", "2", "--engines", "1", *cluster]
            case "plan":
                return ["--trajectories", "16", "--cold"]
            case "simulate":
                return ["--trajectories", "16", "--seeds", "1", "--cold"]
        return []
