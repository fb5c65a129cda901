"""Tasks of other projects on a real cluster: the solutions of their authors are run and verified in sandboxes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from worlds.image_files import ImageFiles, layer_of, small_root
from worlds.live_world import descendants, emulated, run
from worlds.openenv_server import openenv_server
from worlds.shared_cluster import shared_cluster

from heddle_dask.apis.rewarded import rewarded
from heddle_dask.chat.tool_calls import format_call
from heddle_dask.core.needs import Needs
from heddle_dask.environments.agent_tasks import load_agent_tasks
from heddle_dask.environments.base import Context, Reply, Task
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.mcp_tools import McpServer, mcp_tools
from heddle_dask.environments.reference_agent import ReferenceAgent
from heddle_dask.environments.task_sets.harbor import HarborTasks
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.trajectory import TrajectoryRecord

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(not shutil.which("bwrap"), reason="no bwrap")]
# Workers cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
HARBOR = Path(__file__).parents[2] / "build" / "peers" / "site" / "harbor" / "cli"
TOOLS = ("bash", "chmod", "grep", "sed", "diff", "patch", "git")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What a task would take from ``python:3.13-slim``, of this machine's own files."""
    folder = tmp_path_factory.mktemp("image")
    root = small_root(folder / "root", tools=TOOLS)
    yield str(ImageFiles([layer_of(root)], {"Env": ["PATH=/bin"]}).docker_tar(folder / "image.tar"))
    shutil.rmtree(folder)


def annotating(folder: Path, answer: str) -> None:
    """A task as Harbor's own command `annotate` assembles it, with a solution."""
    template = HARBOR / "annotator" / "annotate-task-template"
    shutil.copytree(template, folder)
    shutil.copytree(HARBOR / "template-task", folder / "environment" / "task")
    told = (HARBOR / "annotator" / "annotate-task.md").read_text()
    parts = {
        "task_path": "/app/task",
        "file_tree": "",
        "result_filename": "annotate-result.json",
        "output_schema": "{}",
    }
    (folder / "instruction.md").write_text(told.format(**parts))
    (folder / "solution").mkdir()
    # The files of the environment are where the instruction says.
    check = "#!/bin/bash\nset -e\ngrep -q schema_version /app/task/task.toml\n"
    (folder / "solution" / "solve.sh").write_text(f"{check}cat > annotate-result.json <<'END'\n{answer}\nEND\n")


def built(folder: Path) -> None:
    """A task with a Dockerfile, variables, and several rewards."""
    files = {
        "task.toml": '[verifier]\nenv = { LIMIT = "3" }\n[solution]\nenv = { WORD = "three" }\n',
        "instruction.md": "Write the word into /srv/app/word.",
        "environment/Dockerfile": "FROM python:3.13-slim\nENV KIND=plain\nWORKDIR /srv/app\nCOPY data/ in/\n"
        "RUN cat in/deep/words > known && echo $KIND >> known\n",
        "environment/data/deep/words": "one\ntwo\n",
        "solution/solve.sh": "#!/bin/bash\necho $WORD > word\ncp known seen 2>/dev/null || cat known > seen\n",
        "tests/test.sh": "#!/bin/bash\npython3 /tests/check.py\n",
        "tests/check.py": "import json, os\n"
        "lines = open('seen').read().split() + open('word').read().split()\n"
        "found = {'reward': ' '.join(lines) == 'one two plain three', 'lines': len(lines) / int(os.environ['LIMIT'])}\n"
        "json.dump({k: float(v) for k, v in found.items()}, open('/logs/verifier/reward.json', 'w'))\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def repository(folder: Path) -> tuple[str, Path]:
    """A repository with a bug, and a layer's files with it at ``/testbed`` and pytest for the image's Python."""
    place = folder / "layer" / "testbed"
    (place / "tests").mkdir(parents=True)
    (place / "sums.py").write_text("def add(a, b):\n    return a - b\n\n\ndef zero():\n    return 0\n")
    (place / "tests" / "test_sums.py").write_text(
        "from sums import zero\n\n\ndef test_zero():\n    assert zero() == 0\n"
    )
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "As it is"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    packages = folder / "layer" / "opt" / "packages"
    packages.mkdir(parents=True)
    site = Path(pytest.__file__).parents[1]
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        shutil.copytree(site / name, packages / name, ignore=shutil.ignore_patterns("__pycache__"))
    for info in (site / "py.py", *site.glob("pluggy-*.dist-info"), *site.glob("pytest-*.dist-info")):
        (shutil.copytree if info.is_dir() else shutil.copy)(info, packages / info.name)
    return commit, folder / "layer"


def patch(place: Path, file: str, old: str, new: str) -> str:
    """A change of a file of the repository, as git writes it."""
    before = (place / file).read_text()
    (place / file).write_text(before.replace(old, new))
    made = subprocess.run(["git", "-C", str(place), "diff"], check=True, capture_output=True, text=True).stdout
    (place / file).write_text(before)
    return made


async def uses_mcp(task: Task, ctx: Context) -> float:
    """Calls of the program and of a model, side by side, are actions on one server."""
    (convert,) = mcp_tools(time_server(), only=["convert_time"])
    ctx.set_template(tools=[convert])
    given = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    ctx.append("user", "What time is it in Tokyo?")
    await ctx.generate(max_tokens=4)
    called = format_call("convert_time", given) + format_call("convert_time", {**given, "target_timezone": "Nowhere"})
    answers = await ctx.run_tools(Reply(called, (), (), "stop"), needs=Needs(cpus=0))
    assert "T21:00:00+09:00" in answers[0] and "Invalid timezone" in answers[1]
    many = await asyncio.gather(*(ctx.call(convert, **given, needs=Needs(cpus=0)) for _ in range(20)))
    return float(set(many) == {answers[0]})


def time_server() -> McpServer:
    words = (sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC")
    return McpServer(words, variables={"PYTHONPATH": str(HARBOR.parents[1])})


def test_tools_of_mcp_servers_are_actions(model_dir: str) -> None:
    if not HARBOR.is_dir():
        pytest.skip("the wheel of mcp-server-time is not in build/peers: `make test` brings it")

    async def body() -> None:
        async with shared_cluster(1) as client:
            rollout = Rollout(client, env=uses_mcp, model=model_dir, engines=emulated(model_dir))
            batch = await rollout.run([Task("a", ""), Task("b", "")])
            assert [(each.status, each.detail, each.reward) for each in batch] == [("completed", "", 1.0)] * 2
            assert {len(each.actions) for each in batch} == {22}
            assert len(descendants("mcp_server_time")) == 1

    run(body())


async def attempted(client: Any, tasks: Any, model: str, count: int) -> dict[str, TrajectoryRecord]:
    rollout = Rollout(client, env=ReferenceAgent(tasks), model=model, engines=emulated(model), seed=0)
    batch = await rollout.run(count)
    assert [(each.status, each.detail) for each in batch] == [("completed", "")] * count
    return {each.task_id: each for each in batch}


def test_tasks_of_harbor_are_verified_as_there(model_dir: str, image: str, tmp_path: Path) -> None:
    if not HARBOR.is_dir():
        pytest.skip("Harbor's wheel is not in build/peers: `make test` brings it")
    annotating(tmp_path / "set" / "good", json.dumps({"readme": "# A task", "description": "It does nothing."}))
    annotating(tmp_path / "set" / "bad", json.dumps({"readme": ""}))
    built(tmp_path / "set" / "built")
    built(tmp_path / "set" / "silent")
    (tmp_path / "set" / "silent" / "tests" / "test.sh").write_text("#!/bin/bash\necho no network here\nexit 7\n")
    (tmp_path / "set" / "images.toml").write_text(f'"python:3.13-slim" = "{image}"\n')
    tasks = load_agent_tasks(str(tmp_path / "set"))
    assert isinstance(tasks, HarborTasks) and not tasks.refused

    async def body() -> None:
        async with shared_cluster(1) as client:
            found = await attempted(client, tasks, model_dir, 4)
            assert {name: each.reward for name, each in found.items()} == {
                "bad": 0.0,
                "built": 1.0,
                "good": 1.0,
                "silent": None,
            }
            assert found["built"].reward_parts == {"lines": 4 / 3}
            assert "readme must be a non-empty string" in found["bad"].metadata["tests_said"]
            told = found["silent"].metadata
            assert (told["tests_exit_code"], told["tests_said"].strip()) == (7, "no network here")
            assert told["unknown"] == "the tests wrote no reward"

    run(body())


def test_swe_style_rows_are_judged_by_their_tests(model_dir: str, tmp_path: Path) -> None:
    root = small_root(tmp_path / "root", tools=TOOLS, with_extensions=True)
    commit, layer = repository(tmp_path)
    settings = {"Env": ["PATH=/bin", "PYTHONPATH=/opt/packages"]}
    ImageFiles([layer_of(root), layer_of(layer)], settings).docker_tar(tmp_path / "repo.tar")
    (tmp_path / "images.toml").write_text('"org/sums:1" = "repo.tar"\n')
    place = layer / "testbed"
    added = "zero() == 0\n\n\ndef test_add():\n    from sums import add\n\n    assert add(2, 3) == 5\n"
    row = {
        "instance_id": "org__sums-1",
        "repo": "org/sums",
        "base_commit": commit,
        "image_name": "org/sums:1",
        "problem_statement": "add(2, 3) is -1.",
        "patch": patch(place, "sums.py", "a - b", "a + b"),
        "test_patch": patch(place, "tests/test_sums.py", "zero() == 0\n", added),
        "FAIL_TO_PASS": ["tests/test_sums.py::test_add"],
        "PASS_TO_PASS": ["tests/test_sums.py::test_zero"],
    }
    worse = patch(place, "sums.py", "a - b", "5 if zero is None else 1 / 0")
    cheat = patch(place, "tests/test_sums.py", "test_zero", "test_none")
    rows = [row, row | {"instance_id": "worse", "patch": worse}, row | {"instance_id": "cheat", "patch": cheat}]
    rows.append(row | {"instance_id": "no-python", "test_cmd": "no-such-program"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    tasks = load_agent_tasks(str(tmp_path / "rows.jsonl"))

    async def body() -> None:
        async with shared_cluster(1) as client:
            found = await attempted(client, tasks, model_dir, 4)
            good, bad, cheating = found["org__sums-1"], found["worse"], found["cheat"]
            assert good.reward == 1.0, good.metadata
            assert good.metadata["patch"] == row["patch"]
            assert (bad.reward, bad.reward_parts) == (0.0, {"fail_to_pass": 0.0, "pass_to_pass": 1.0})
            # Its own tests do not count: they are as they were before the tests of the row come in.
            assert (cheating.reward, cheating.reward_parts) == (0.0, {"fail_to_pass": 0.0, "pass_to_pass": 1.0})
            assert (found["no-python"].reward, found["no-python"].metadata["tests_exit_code"]) == (None, 127)

    run(body())


def test_prompts_and_servers_of_openenv_are_environments(model_dir: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def last(task, transcript):\n    return float(transcript.text.count(task.payload['answer']))\n"
    )
    rows = [{"question": f"Say {word}.", "answer": word} for word in ("one", "two", "three")]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "script").write_text(json.dumps({"text": "hello"}))
    (tmp_path / "server").mkdir()

    async def body() -> None:
        with openenv_server(tmp_path / "server") as url:
            async with shared_cluster(1) as client:
                options = {"model": model_dir, "engines": emulated(model_dir)}
                prompts = rewarded(load_environment(f"prompts:{tmp_path}/words.jsonl"), f"{tmp_path}/rewards.py:last")
                batch = await Rollout(client, env=prompts, **options).run(3)
                assert [(each.status, each.reward, len(each.steps)) for each in batch] == [("completed", 1.0, 1)] * 3
                options |= {
                    "engines": emulated(model_dir, script=str(tmp_path / "script")),
                    "budget": Budget(max_steps=3),
                }
                batch = await Rollout(client, env=f"openenv:{url}", **options).run(2)
                for each in batch:
                    assert (each.status, len(each.steps)) == ("truncated", 3), each.detail
                    assert each.reward == pytest.approx(1.5), "each reply of five letters is worth 0.5"

    run(body())
