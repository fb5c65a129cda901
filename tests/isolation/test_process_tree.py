"""What is below a process is found, stopped and ended, wherever it has gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from heddle_dask.isolation import process_tree

# Leaves a child in its group, one in a session of its own, and one whose parent has ended.
LEAVES_THREE = """
import os, subprocess, sys, time
from heddle_dask.isolation import process_tree
process_tree.become_subreaper()
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.run(["sh", "-c", "setsid sleep 600 & setsid sleep 600 &"])
assert process_tree.has_children()
print(*process_tree.below(os.getpid()), flush=True)
found = process_tree.end_children()
print(found, process_tree.has_children(), process_tree.below(os.getpid()))
"""


def test_children_end_wherever_they_have_gone() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_THREE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    pids, ended = done.stdout.splitlines()
    assert len(pids.split()) >= 3 and ended == "True False []"
    assert not any(process_tree.start_of(int(pid)) for pid in pids.split())


def test_a_session_is_killed() -> None:
    command = ["sh", "-c", "sh -c 'while :; do :; done' & wait"]
    with subprocess.Popen(command, start_new_session=True) as shell:
        try:
            while len(process_tree.below(shell.pid)) < 1:
                time.sleep(0.01)
        finally:
            process_tree.kill_sessions({shell.pid})
    assert process_tree.below(shell.pid) == []


def test_a_process_is_known_by_its_start() -> None:
    assert process_tree.start_of(os.getpid()) > 0
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert process_tree.start_of(ended.pid) == 0
