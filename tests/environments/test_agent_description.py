"""Descriptions of agents: those of the package, and what a user's own may say."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.agent_description import agent_named, description_of, known_agents
from heddle_dask.environments.loading import load_environment


def described(**given: Any) -> Any:
    return description_of({"name": "one", "command": ["run"], **given}, "agent one.toml")


def test_each_known_agent_has_a_description() -> None:
    assert known_agents() == ("claude-code", "codex", "mini-swe-agent", "openai-agents")
    for name in known_agents():
        found = agent_named(name, folder="/agents/here")
        assert found.name == name and found.version and found.dialect and found.install
        assert found.folder == "/agents/here"
        text = found.shell_text("do it", {"A": "1"}, url="http://u", key="k")
        assert "do it" in text and "{model}" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"comand": ["a"]}, "unknown key 'comand' .did you mean 'command'"),
        ({"command": []}, "command is empty"),
        ({"command": "run"}, "command is 'run': use a list"),
        ({"command": ["run", 3]}, "use a list of texts"),
        ({"command": ["run", "{task}"]}, "{task} is none of {instruction}"),
        ({"command": ["{folder}/run"]}, "give the folder in which it is installed"),
        ({"name": "a b"}, "use letters, digits"),
        ({"environment": {"A B": "1"}}, "'A B' is no name of a variable"),
        ({"environment": {"A": 1}}, "environment: use a table of texts"),
        ({"files": {"x": ""}}, "'x' is no absolute path"),
        ({"files": ["x"]}, "files: use a table of texts"),
        ({"answer": "x"}, "'x' is no absolute path"),
        ({"dialect": "own"}, "dialect is 'own': use chat, responses, messages"),
        ({"limit_s": 0}, "limit_s is 0: use seconds above 0"),
        ({"limit_s": "1"}, "limit_s is '1'"),
        ({"memory": "much"}, "memory is 'much'"),
        ({"stdin": 3}, "stdin is 3: use a text"),
    ],
)
def test_what_is_wrong_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message.replace("{", r"\{").replace("}", r"\}")) as told:
        described(**given)
    assert "\n" not in str(told.value) and "agent one.toml" in str(told.value)


def test_unknown_agents_and_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no agent 'other': allowed are claude-code, codex"):
        agent_named("other")
    with pytest.raises(BadInput, match="No such file"):
        agent_named(str(tmp_path / "none.toml"))
    (tmp_path / "a.toml").write_text("name = 'a'\n")
    with pytest.raises(BadInput, match=r"agent a.toml has no command"):
        agent_named(str(tmp_path / "a.toml"))


def test_the_shell_gives_the_agent_what_the_description_says(tmp_path: Path) -> None:
    odd = 'it\'s "odd" $HOME `x` {model}\n\\ end\nEND-OF-THIS-FILE'
    found = described(
        command=[
            "sh",
            "-c",
            'pwd; echo "$A-$B-$C"; cat "$0" "$1"; cat; tool',
            "{instruction_file}",
            f"{tmp_path}/f/own",
        ],
        stdin="in: {instruction}",
        environment={"B": "{key}", "C": "{url} {model}"},
        files={f"{tmp_path}/f/own": "a = {\"b\": '{key}'}\n"},
        folder=str(tmp_path),
        path=["bin"],
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "bin" / "tool").chmod(0o755)
    text = found.shell_text(odd, {"A": "o'k", "B": "no"}, url="http://u", key="k1", directory=str(tmp_path / "bin"))
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own = "a = {\"b\": 'k1'}\n"
    assert done.stdout == f"{tmp_path}/bin\no'k-k1-http://u heddle\n{odd}\n{own}in: {odd}\ntool\n"
    missing = found.shell_text("", {}, url="", key="", directory="/no/such")
    assert subprocess.run(["sh", "-c", missing], capture_output=True).returncode == 125
    with pytest.raises(BadInput, match="of 120,000"):
        found.shell_text("x" * 200_000, {}, url="", key="")


def test_an_own_file_may_begin_with_a_known_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.toml"
    own.write_text('like = "codex"\nname = "mine"\nfolder = "/shared/codex"\n[environment]\nA = "1"\n')
    found, known = agent_named(str(own)), agent_named("codex")
    assert (found.name, found.folder, found.command) == ("mine", "/shared/codex", known.command)
    assert found.environment == {**known.environment, "A": "1"} and found.files == known.files
    own.write_text('like = "other"\n')
    with pytest.raises(BadInput, match=r"agent own.toml: like is 'other': use claude-code"):
        agent_named(str(own))
    # Where people install it, it is found.
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".heddle" / "agents" / "codex").mkdir(parents=True)
    assert agent_named("codex").folder == str(tmp_path / ".heddle" / "agents" / "codex")
    assert agent_named("codex", folder="/other").folder == "/other"


def test_a_pair_of_agent_and_tasks_is_an_environment(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    made = load_environment(f"agent:codex:{rows}")
    assert made.name == "codex:rows" and len(made.tasks(2, 0)) == 2
    assert load_environment(f"agent:oracle:{rows}").name == "oracle:rows"
    for pair in ("codex", "codex:", ":x", ""):
        with pytest.raises(BadInput, match="agent"):
            load_environment(f"agent:{pair}")
    with pytest.raises(BadInput, match="no agent 'none'"):
        load_environment(f"agent:none:{rows}")
