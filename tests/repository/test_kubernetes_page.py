"""The page about Kubernetes: its YAML is valid for the CRDs of dask-kubernetes, its arguments start our workers."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from distributed import Client
from jsonschema import Draft202012Validator

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "build" / "crds"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
RESOURCES = [yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]


@cache
def crd_schema(kind: str) -> dict[str, Any]:
    """The schema of a resource as the operator installs it, read from the wheel: it is not imported."""
    wheel = next(WHEELS.glob("dask_kubernetes-*.whl"), None)
    if wheel is None:
        pytest.skip("the wheel of dask-kubernetes is not in build/crds: `make test` brings it")
    name = f"helm/dask-kubernetes-operator/crds/{kind.lower()}.yaml"
    with zipfile.ZipFile(wheel) as archive:
        (file,) = [file for file in archive.namelist() if file.endswith(name)]
        crd = yaml.safe_load(archive.read(file))
    assert crd["spec"]["names"]["kind"] == kind
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"].update(apiVersion={"const": f"{crd['spec']['group']}/v1"}, kind={"const": kind}, metadata={})
    return schema


def strict(schema: Any) -> Any:
    """The schema with which an unknown field fails; the API server would drop it without a word."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def errors(resource: dict[str, Any]) -> list[str]:
    return [error.message for error in Draft202012Validator(crd_schema(resource["kind"])).iter_errors(resource)]


def containers(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = resource["spec"]
    yield from (pod["spec"]["containers"][0] for pod in (spec.get("scheduler"), spec["worker"]) if pod)


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource["metadata"]["name"])
def test_a_resource_is_valid(resource):
    assert errors(resource) == []


def test_an_unknown_or_wrong_field_anywhere_fails():
    cluster, group = RESOURCES[0], RESOURCES[1]
    for change in (
        lambda r: r["spec"].update(workers={}),
        lambda r: r["spec"]["worker"].update(replica=2),
        lambda r: r["spec"]["worker"].update(replicas="2"),
        lambda r: r["spec"]["worker"]["spec"].update(nodeselector={}),
        lambda r: r["spec"]["worker"]["spec"]["containers"][0].update(arguments=[]),
        lambda r: r["spec"]["worker"]["spec"]["containers"][0].update(args=[1]),
        lambda r: r["spec"]["worker"]["spec"]["containers"][0].pop("name"),
        lambda r: r["spec"]["worker"].pop("spec"),
    ):
        for resource in (cluster, group):
            changed = copy.deepcopy(resource)
            change(changed)
            assert errors(changed), changed


def test_groups_belong_to_the_cluster_and_its_service_finds_the_scheduler():
    cluster, *groups = RESOURCES
    name = cluster["metadata"]["name"]
    assert cluster["kind"] == "DaskCluster" and all(group["kind"] == "DaskWorkerGroup" for group in groups)
    assert all(group["spec"]["cluster"] == name for group in groups)
    scheduler = cluster["spec"]["scheduler"]
    assert scheduler["service"]["selector"]["dask.org/cluster-name"] == name
    ports = {port["name"] for port in scheduler["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in scheduler["service"]["ports"]} == ports


@pytest.mark.cluster
def test_the_arguments_start_a_scheduler_and_tagged_workers(tmp_path: Path):
    """Here with other ports: the containers' own are those of a pod."""
    scheduler, *workers = [container for resource in RESOURCES for container in containers(resource)]
    file = tmp_path / "scheduler.json"
    with ExitStack() as stack:
        here = {"8786": "0", ":8787": "127.0.0.1:0", "/scratch": str(tmp_path)}

        def start(container: dict[str, Any], name: str, *more: str) -> None:
            program, *words = [here.get(word, word).replace("$(DASK_WORKER_NAME)", name) for word in container["args"]]
            assert program == "dask"
            env = {each["name"]: str(each["value"]) for each in container.get("env", ())}
            command = [sys.executable, "-m", "dask", *words, "--scheduler-file", str(file), *more]
            process = subprocess.Popen(
                command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)

        start(scheduler, "", "--host", "127.0.0.1")
        for number, container in enumerate(workers):
            start(container, f"pod-{number}", "--dashboard-address", "127.0.0.1:0")
        with Client(scheduler_file=str(file), timeout=30) as client:
            client.wait_for_workers(len(workers), timeout=60)
            identity = client.scheduler_info(n_workers=-1)
            plugins = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins))
            found = {worker["name"]: worker["resources"] for worker in identity["workers"].values()}
    assert found == {"pod-0": {"TOOL": 16}, "pod-1": {"ENGINE": 1}, "pod-2": {"TOOL": 64}}
    assert any("heddle" in name for name in plugins)
