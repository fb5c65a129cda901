"""scripts/install.sh with real pip on small wheels: two indexes in folders stand for PyPI and PyTorch's own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH = "2.13.0"

# A build backend without requirements: the project of these tests is as small as its wheels.
BACKEND = """
import shutil
def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("heddle_dask-0.1.0-py3-none-any.whl", folder).rpartition("/")[2]
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "heddle-dask"
version = "0.1.0"
"""


def make_wheel(folder: Path, name: str, version: str, origin: str) -> Path:
    """A wheel with one module, which says where the wheel came from."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"ORIGIN = {origin!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def add_to_index(index: Path, name: str, version: str, origin: str) -> Path:
    page = index / name
    page.mkdir(parents=True)
    wheel = make_wheel(page, name, version, origin)
    (page / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>', encoding="utf-8")
    return wheel


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass
class Site:
    """A checkout of a project as small as can be, and what pip can reach from there."""

    folder: Path
    environment: dict[str, str]

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    def install(self, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "scripts/install.sh"],
            cwd=self.folder,
            env=self.environment | settings,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def origin(self, module: str) -> str:
        code = f"import {module}; print({module}.ORIGIN)"
        done = subprocess.run(
            [self.venv / "bin/python", "-c", code],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    def lock(self, hash_of_tabulate: str) -> None:
        line = f"tabulate==0.9.0 \\\n    --hash=sha256:{hash_of_tabulate}\n"
        (self.folder / "requirements-lock.txt").write_text(line, encoding="utf-8")


@pytest.fixture(scope="module")
def new_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip; copies of it work, since pip is called as a module."""
    folder = tmp_path_factory.mktemp("venv") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "project"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (folder / "backend.py").write_text(BACKEND, encoding="utf-8")
    (folder / "constraints.txt").write_text(f"tabulate==0.9.0\ntorch=={TORCH}\n", encoding="utf-8")
    make_wheel(folder, "heddle_dask", "0.1.0", "checkout")

    pypi, pytorch = tmp_path / "pypi", tmp_path / "pytorch"
    tabulate = add_to_index(pypi, "tabulate", "0.9.0", "pypi")
    add_to_index(pytorch, "tabulate", "0.9.0", "pytorch")
    torch = add_to_index(pytorch, "torch", f"{TORCH}+cpu", "pytorch")
    (folder / "scripts" / "torch-cpu.sha256").write_text(f"{sha256(torch)}  {torch.name}\n", encoding="utf-8")

    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "bwrap").write_text("#!/bin/sh\n", encoding="utf-8")
    (programs / "bwrap").chmod(0o755)
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": pypi.as_uri(),
        "PYTHON": sys.executable,
        "TMPDIR": str(tmp_path),
        "TORCH_CPU_INDEX": pytorch.as_uri(),
    }
    here = Site(folder, environment)
    here.lock(sha256(tabulate))
    return here


@pytest.mark.slow
def test_a_first_call_makes_the_environment_and_a_second_changes_nothing(site: Site) -> None:
    first = site.install()
    assert first.returncode == 0, first.stderr
    assert site.origin("torch") == "pytorch"
    assert site.origin("tabulate") == "pypi"
    assert site.origin("heddle_dask") == "checkout"
    torch = next((site.venv / "lib").glob("*/site-packages/torch.py"))
    written = torch.stat().st_mtime_ns
    assert site.install().returncode == 0
    assert torch.stat().st_mtime_ns == written


def test_a_sites_own_torch_is_taken_before_pytorchs_index(site: Site, new_venv: Path, tmp_path: Path) -> None:
    shutil.copytree(new_venv, site.venv, symlinks=True)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    torch = make_wheel(wheels, "torch", f"{TORCH}+cpu", "site")
    with (site.folder / "scripts" / "torch-cpu.sha256").open("a", encoding="utf-8") as hashes:
        hashes.write(f"{sha256(torch)}  {torch.name}\n")
    done = site.install(PIP_FIND_LINKS=str(wheels), TORCH_CPU_INDEX="file:///nowhere")
    assert done.returncode == 0, done.stderr
    assert site.origin("torch") == "site"


def test_torch_with_another_hash_is_not_installed(site: Site, new_venv: Path, tmp_path: Path) -> None:
    shutil.copytree(new_venv, site.venv, symlinks=True)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "torch", f"{TORCH}+cpu", "stranger")
    done = site.install(PIP_FIND_LINKS=str(wheels), TORCH_CPU_INDEX="file:///nowhere")
    assert done.returncode == 1
    assert "TORCH_CPU_INDEX=file:///nowhere" in done.stderr
    assert "No module named 'torch'" in site.origin("torch")


def test_an_archive_with_another_hash_is_refused_unless_hashes_are_off(site: Site, new_venv: Path) -> None:
    shutil.copytree(new_venv, site.venv, symlinks=True)
    site.lock("0" * 64)
    refused = site.install()
    assert refused.returncode == 1
    assert "HEDDLE_NO_HASHES=1" in refused.stderr
    assert "No module named 'tabulate'" in site.origin("tabulate")
    taken = site.install(HEDDLE_NO_HASHES="1")
    assert taken.returncode == 0, taken.stderr
    # Without hashes too, PyTorch's index brings torch and nothing else.
    assert (site.origin("torch"), site.origin("tabulate")) == ("pytorch", "pypi")


def test_without_ensurepip_one_line_says_what_to_install_and_nothing_is_left(site: Site, tmp_path: Path) -> None:
    without = tmp_path / "without"
    without.mkdir()
    (without / "ensurepip.py").write_text("raise ModuleNotFoundError('ensurepip')\n", encoding="utf-8")
    done = site.install(PYTHONPATH=str(without))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "python3-venv" in line
    assert not site.venv.exists()


def test_a_python_that_the_lock_does_not_serve_is_refused(site: Site) -> None:
    done = site.install(PYTHON="false")  # what the check of a Python 3.14 says
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "3.11 to 3.13" in line
    assert not site.venv.exists()


@pytest.mark.long
def test_a_half_made_environment_is_made_again(site: Site) -> None:
    """What `python -m venv` leaves behind on Debian without python3-venv: an interpreter without pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", site.venv], check=True, timeout=60)
    done = site.install(TORCH_CPU_INDEX="file:///nowhere")
    assert "torch 2.13.0+cpu comes neither" in done.stderr
    subprocess.run([site.venv / "bin/python", "-m", "pip", "--version"], check=True, timeout=60)


def test_a_folder_that_is_no_environment_is_left_alone(site: Site) -> None:
    site.venv.mkdir()
    (site.venv / "thesis.txt").write_text("years of work", encoding="utf-8")
    done = site.install()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert ".venv" in line
    assert (site.venv / "thesis.txt").read_text(encoding="utf-8") == "years of work"


def test_make_installs_again_only_when_what_it_reads_has_changed(site: Site) -> None:
    shutil.copy(ROOT / "Makefile", site.folder)
    site.venv.mkdir()
    (site.venv / ".installed").touch()
    inputs = ("pyproject.toml", "constraints.txt", "requirements-lock.txt")
    paths = [site.folder / name for name in inputs]
    paths += [site.folder / "scripts" / "install.sh", site.folder / "scripts" / "torch-cpu.sha256"]
    for path in paths:
        os.utime(path, (1, 1))

    def planned() -> str:
        done = subprocess.run(["make", "-n", "rollout"], cwd=site.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "install.sh" not in planned()
    for path in paths:
        path.touch()
        assert "install.sh" in planned(), path
        os.utime(path, (1, 1))
