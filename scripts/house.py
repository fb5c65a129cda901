"""How large the house is, and what a start costs: ``python scripts/house.py [--json] [--start]``.

Lines are those of Python files, blank ones included. A function is as long as from its first line, without decorators,
to its last. With ``--start``, a cluster of one engine slot and one tool worker is started twice on this machine: once
for the CPU seconds of its processes, once for the modules that each kind of process has loaded before its first work.
"""

from __future__ import annotations

import argparse
import ast
import json
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ("heddle_dask", "workers", "pipelines")
LONG_FUNCTION, LONG_FILE, SHORT_FILE = 60, 400, 60
HELP = """
import sys
from heddle_dask.cli.main import heddle
try:
    heddle(["--help"])
except SystemExit:
    pass
print(len(sys.modules), file=sys.stderr)
"""


@dataclass(frozen=True)
class PythonFile:
    """What is counted of one file."""

    lines: int
    classes: int
    functions: tuple[int, ...]
    import_lines: int


def python_files(folders: Iterable[str]) -> Iterator[PythonFile]:
    """The Python files below these folders of the checkout; a folder that is not there has none."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield python_file(path.read_text(encoding="utf-8"))


def python_file(text: str) -> PythonFile:
    """Count one file."""
    nodes = list(ast.walk(ast.parse(text)))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return PythonFile(
        lines=len(text.splitlines()),
        classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        functions=tuple(length(node) for node in functions),
        import_lines=sum(length(node) for node in imports),
    )


def length(node: ast.stmt) -> int:
    """Lines from the first to the last of a statement."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def size() -> dict[str, int]:
    """Sizes of package, benchmarks, tests and documentation."""
    package = list(python_files(PACKAGE))
    return {
        "package lines": sum(each.lines for each in package),
        "package files": len(package),
        "classes": sum(each.classes for each in package),
        "functions": sum(len(each.functions) for each in package),
        f"functions over {LONG_FUNCTION} lines": sum(one > LONG_FUNCTION for each in package for one in each.functions),
        "import lines": sum(each.import_lines for each in package),
        f"files over {LONG_FILE} lines": sum(each.lines > LONG_FILE for each in package),
        f"files under {SHORT_FILE} lines": sum(each.lines < SHORT_FILE for each in package),
        "benchmarks lines": sum(each.lines for each in python_files(["benchmarks"])),
        "tests lines": sum(each.lines for each in python_files(["tests"])),
        "docs words": sum(len(page.read_text(encoding="utf-8").split()) for page in ROOT.glob("docs/**/*.md")),
    }


def start() -> dict[str, float]:
    """Modules of each kind of process, and CPU seconds of the smallest cluster; takes about half a minute."""
    from distributed import Client

    from heddle_dask import LocalRolloutCluster

    shown = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, float] = {"modules of heddle --help": int(shown.stderr.split()[-1])}
    before_s = children_s()
    with LocalRolloutCluster(engines=1, tool_cpus=1, dashboard=False):
        pass
    found["CPU seconds of the smallest cluster"] = round(children_s() - before_s, 1)
    with (
        LocalRolloutCluster(engines=1, tool_cpus=1, dashboard=False) as cluster,
        Client(cluster) as client,
    ):
        tags = {
            address: set(worker["resources"])
            for address, worker in client.scheduler_info(n_workers=-1)["workers"].items()
        }
        found["modules of the scheduler"] = client.run_on_scheduler(lambda: len(sys.modules))
        for address, modules in client.run(lambda: len(sys.modules)).items():
            kind = "rollout worker" if "ENGINE" in tags[address] else "tool worker"
            found[f"modules of a {kind}"] = modules
    return found


def children_s() -> float:
    """CPU seconds of the processes that this one has started, and those of their own, once they have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str]) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument("--start", action="store_true", help="also start the smallest cluster")
    chosen = parser.parse_args(arguments)
    figures: dict[str, float] = {**size(), **(start() if chosen.start else {})}
    if chosen.json:
        print(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, figure in figures.items():
        print(f"{name:<{width}}  {figure:>10,}")


if __name__ == "__main__":
    main(sys.argv[1:])
