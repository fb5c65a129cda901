"""Tasks of Harbor as they are read: limits, images that are here, short Dockerfiles, and why others are refused."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.agent_tasks import load_agent_tasks
from heddle_dask.environments.task_sets.dockerfile import MOST_COPIED_BYTES, NotCarriedOut, carried_out
from heddle_dask.environments.task_sets.harbor import HarborTasks, _reward
from heddle_dask.environments.task_sets.local_images import LocalImages

TASK = """
version = "1.0"
[metadata]
category = "sums"
[agent]
timeout_sec = 90.0
[environment]
docker_image = "python:3.13-slim"
memory = "2G"
storage_mb = 512
cpus = 2
workdir = "/app"
env = { KEY = "${NOT_SET_HERE:-plain}" }
"""


def written(folder: Path, text: str = TASK, **files: str) -> Path:
    for name, content in {"task.toml": text, "instruction.md": "Add.", "tests/test.sh": "true", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_a_task_says_where_and_how_long(tmp_path: Path) -> None:
    written(tmp_path / "set" / "sums" / "one")
    (tmp_path / "set" / "images.toml").write_text('"python:*" = "files/{name}.tar"\n')
    loaded = load_agent_tasks(str(tmp_path / "set"))
    (task,) = loaded.tasks(1, 0)
    assert (loaded.name, task.task_id, task.prompt, task.domain) == ("set", "sums/one", "Add.", "sums")
    box = loaded.sandbox(task)
    assert box["image"] == str(tmp_path / "set" / "files" / "python_3.13-slim.tar")
    assert (box["memory"], box["disk"], box["setup"]) == (2 << 30, 512 << 20, [])
    assert (loaded.limit_s(task), loaded.work_directory(task), loaded.variables(task)) == (90, "/app", {"KEY": "plain"})
    # A change of the tests is a change of the task.
    (tmp_path / "set" / "sums" / "one" / "tests" / "test.sh").write_text("false")
    assert load_agent_tasks(str(tmp_path / "set")).tasks(1, 0)[0].payload != task.payload


def test_an_image_beside_the_task_is_its_own(tmp_path: Path) -> None:
    one = written(tmp_path / "one", **{"environment/image.tar": "", "environment/Dockerfile": "FROM a AS b\n"})
    tasks = HarborTasks(str(one))
    assert tasks.sandbox(tasks.tasks(1, 0)[0])["image"] == str(one / "environment" / "image.tar")


@pytest.mark.parametrize(
    ("text", "files", "reason"),
    [
        (TASK, {}, "its image python:3.13-slim is not here: name its path in images.toml"),
        ("[environment]", {"environment/Dockerfile": "FROM ubuntu:24.04"}, "its image ubuntu:24.04 is not here"),
        ("[environment]\ngpus = 1", {}, "it needs GPUs"),
        ("[environment]", {"environment/docker-compose.yaml": ""}, "it has services"),
        ('[verifier]\nenvironment_mode = "separate"', {}, "it is verified in an environment of its own"),
        ('[[steps]]\nname = "a"', {}, "it has several steps"),
        ('[agent]\nuser = "nobody"', {}, "it has users of its own"),
    ],
)
def test_tasks_that_cannot_be_run_here_say_why(text: str, files: dict[str, str], reason: str, tmp_path: Path) -> None:
    written(tmp_path / "set" / "bad", text, **files)
    with pytest.raises(BadInput, match=f"none can be run here: bad: {reason}"):
        load_agent_tasks(str(tmp_path / "set"))
    written(tmp_path / "set" / "good", image="an image")
    tasks = HarborTasks(str(tmp_path / "set"))
    assert list(tasks.refused) == ["bad"] and [task.task_id for task in tasks.tasks(1, 0)] == ["good"]
    with pytest.raises(BadInput, match=f"1 of its tasks cannot be run here, such as bad: {reason.split(':')[0]}"):
        tasks.tasks(2, 0)


def test_a_task_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    written(tmp_path / "one", "[agent]\ntimeout_sec = -1")
    with pytest.raises(BadInput, match=r"one/task.toml: timeout_sec is -1: use seconds above 0"):
        HarborTasks(str(tmp_path / "one"))


def test_a_short_dockerfile_is_a_setup(tmp_path: Path) -> None:
    for name in ("data/a.txt", "data/deep/b.txt", "main.py", "extra.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(
        "# a comment\nARG TAG=3.13\nFROM python:${TAG}\nENV A=1 B='two words'\nENV C three\nWORKDIR /app\nWORKDIR sub\n"
        'COPY data ./in\nCOPY *.py main.py /src/\nRUN echo $A \\\n  && ls\nRUN ["touch", "a b"]\nCMD ["sleep"]\n'
    )
    made = carried_out(tmp_path / "Dockerfile")
    assert (made.image, made.directory) == ("python:3.13", "/app/sub")
    assert made.variables == {"A": "1", "B": "two words", "C": "three"}
    names = []
    for content in made.files.values():
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            names.append(archive.getnames())
    assert names[0] == ["app/sub/in/a.txt", "app/sub/in/deep", "app/sub/in/deep/b.txt"]
    assert set(names[1]) == {"src/extra.py", "src/main.py"}
    assert made.commands[0] == "mkdir -p /app" and made.commands[-1].endswith("touch 'a b'")
    assert "export B='two words'" in made.commands[-2] and "echo $A    && ls" in made.commands[-2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("FROM a\nFROM b", "several stages"),
        ("FROM a\nCOPY --from=uv /uv /bin/uv", "has COPY --from=uv"),
        ("FROM a\nRUN apt-get update", "runs apt-get, which needs a network"),
        ("FROM a\nRUN --mount=type=cache true", "has RUN --mount"),
        ("FROM a\nCOPY ../up .", "outside its folder"),
        ("FROM a\nCOPY missing .", "missing, which is not there"),
        ("FROM a\nUSER agent", "has USER agent"),
        ("RUN true", "does not begin with FROM"),
        ("", "has no FROM"),
    ],
)
def test_what_needs_a_builder_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(NotCarriedOut, match=reason):
        carried_out(tmp_path / "Dockerfile")


def test_large_files_need_an_image(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(MOST_COPIED_BYTES))
    (tmp_path / "Dockerfile").write_text("FROM a\nCOPY large .")
    with pytest.raises(NotCarriedOut, match="more than 8 MiB"):
        carried_out(tmp_path / "Dockerfile")


def test_a_folder_of_images_has_their_names(tmp_path: Path) -> None:
    (tmp_path / "org_name_1.tar").touch()
    (tmp_path / "org_other_latest.tar").touch()
    images = LocalImages(tmp_path, tmp_path)
    assert images.path_of("org/name:1") == str(tmp_path / "org_name_1.tar")
    assert images.path_of("org/other") == str(tmp_path / "org_other_latest.tar") and images.path_of("org/name") is None
    with pytest.raises(BadInput, match="there is no such file or folder"):
        LocalImages(tmp_path / "missing", tmp_path)


@pytest.mark.parametrize(
    ("as_json", "as_text", "value", "parts", "unknown"),
    [
        (None, "1\n", 1.0, {}, ""),
        ("0.5", "1", 0.5, {}, ""),
        (json.dumps({"reward": 0.25, "style": 1}), None, 0.25, {"style": 1.0}, ""),
        (json.dumps({"score": 1}), None, 1.0, {"score": 1.0}, ""),
        (json.dumps({"a": 1, "b": 0}), None, None, {"a": 1.0, "b": 0.0}, "none is named reward"),
        ("{", "1", None, {}, "no reward can be read"),
        (None, "nan", None, {}, "no reward can be read"),
        (None, None, None, {}, "the tests wrote no reward"),
    ],
)
def test_rewards_are_read_as_harbor_does(
    as_json: str | None, as_text: str | None, value: float | None, parts: dict[str, float], unknown: str
) -> None:
    reward = _reward(as_json, as_text, {"tests_exit_code": 0})
    assert (reward.value, dict(reward.parts)) == (value, parts)
    assert unknown in reward.metadata.get("unknown", "") and ("unknown" in reward.metadata) == bool(unknown)
