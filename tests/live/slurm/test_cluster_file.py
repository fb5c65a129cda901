"""The cluster file and the groups in it: what is read, and what is refused in one line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.slurm.cluster_file import (
    _GROUP_KEYS,
    _plan_keys,
    cluster_plan,
    read_cluster_file,
)
from heddle_dask.live.clusters.slurm.job_script import job_script, srun_arguments
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, Container, WorkerGroup
from heddle_dask.live.wire.messages import POOL_VARIABLE
from heddle_dask.live.worker.service_worker import ServiceWorker
from heddle_dask.live.worker.tool_worker import ToolWorker

FULL = """
backend = "slurm"
interface = "ib0"
worker-ports = "40000:40100"
scheduler-port = 8786
scratch = "$TMPDIR"
caches = "/local/$USER/caches"
stage-weights = true
shared = "shared"
logs = "/project/logs"
python = "/project/env/bin/python"
tls = false
offline = false
adaptive = false
export = "HOME,PATH"
poll = "1min"
dashboard-address = "127.0.0.1:8787"

[groups.gpu]
role = "rollout"
partition = "gpu,gpu-short"
account = "project1"
qos = "high"
reservation = "course"
gres = "gpu:h100:4"
constraint = "nvlink"
cpus = 32
memory = "256GB"
walltime = "08:00:00"
engines = 2
tp-degree = 2
minimum = 1
maximum = 4
initial = 2
start-timeout = "15min"
drain = "5min"
prologue = ["module load cuda/12.4"]
directives = ["--exclusive"]
env = { NCCL_DEBUG = "WARN", OMP_NUM_THREADS = 8 }

[groups.gpu.container]
runtime = "apptainer"
image = "/images/heddle.sif"
binds = ["/data"]
options = ["--cleanenv"]
python = "/opt/env/bin/python"

[groups.cpu]
role = "tool"
partition = "cpu"
cpus = 16
tool-cpus = 14
minimum = 0
maximum = 8
"""


def plan_of(text: str) -> ClusterPlan:
    return cluster_plan(tomllib.loads(text), "cluster file c.toml")


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as raised:
        plan_of(text)
    assert "\n" not in str(raised.value) and str(raised.value).startswith("cluster file c.toml: ")
    return str(raised.value).removeprefix("cluster file c.toml: ")


def group(lines: str, top: str = "", role: str = "rollout") -> str:
    """A cluster file with one group that has these lines."""
    return f'{top}\n[groups.gpu]\nrole = "{role}"\npartition = "gpu"\n{lines}\n'


def test_every_key_is_read(tmp_path: Path):
    path = tmp_path / "c.toml"
    path.write_text(FULL)
    plan = read_cluster_file(path)
    assert plan == ClusterPlan(
        groups={
            "gpu": WorkerGroup(
                "gpu",
                "rollout",
                partition="gpu,gpu-short",
                account="project1",
                qos="high",
                reservation="course",
                gres="gpu:h100:4",
                constraint="nvlink",
                cpus=32,
                memory_bytes=256 * 10**9,
                walltime_s=8 * 3600,
                engines=2,
                tp_degree=2,
                minimum=1,
                maximum=4,
                initial=2,
                prologue=("module load cuda/12.4",),
                directives=("--exclusive",),
                container=Container(
                    "apptainer", "/images/heddle.sif", ("/data",), ("--cleanenv",), "/opt/env/bin/python"
                ),
                start_timeout_s=900,
                drain_s=300,
                env={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "8"},
            ),
            "cpu": WorkerGroup("cpu", "tool", partition="cpu", cpus=16, tool_cpus=14, minimum=0, maximum=8),
        },
        backend="slurm",
        interface="ib0",
        worker_ports=(40000, 40100),
        scheduler_port=8786,
        scratch="$TMPDIR",
        caches="/local/$USER/caches",
        stage_weights=True,
        shared=tmp_path / "shared",
        logs=Path("/project/logs"),
        python="/project/env/bin/python",
        tls=False,
        offline=False,
        adaptive=False,
        export="HOME,PATH",
        poll_s=60,
        dashboard_address="127.0.0.1:8787",
    )


def test_what_is_left_out_follows_from_the_role():
    engines = WorkerGroup("gpu", "rollout", partition="gpu")
    tools = WorkerGroup("cpu", "tool", partition="cpu", cpus=8)
    assert (engines.engines, engines.tp_degree, engines.tool_cpus) == (1, 1, 0)
    assert (tools.engines, tools.tp_degree, tools.tool_cpus) == (0, 0, 8)
    assert (tools.minimum, tools.first, tools.most) == (1, 1, 1)
    several = WorkerGroup("cpu", "tool", minimum=3)
    assert (several.first, several.most) == (3, 3)
    waiting = WorkerGroup("cpu", "tool", minimum=0, maximum=5)
    assert (waiting.first, waiting.most) == (0, 5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            'gres = "gpu:2"\nengines = 4',
            "4 engines of TP degree 1 need 4 GPUs, and a job asks for 2: raise gres",
        ),
        (
            'gres = "gpu:a100:4"\ntp-degree = 8',
            "over several nodes is not supported, lower tp-degree or raise gres",
        ),
        ("tp-degree = 2", "needs GPUs of one node, and a job asks for none: give gres = 'gpu:2'"),
        ("tool-cpus = 4", "tool-cpus belongs to a group with role = 'tool': leave it out"),
        ('walltime = "00:11:00"', "walltime 00:11:00 leaves no time to work after an engine's start"),
        ('walltime = "02:00"', "walltime 00:02:00 leaves no time"),
        ('walltime = "soon"', "groups.gpu.walltime is 'soon': give HH:MM:SS"),
        ("minimum = 3\nmaximum = 2", "minimum 3 exceeds maximum 2: raise maximum"),
        ("initial = 4\nmaximum = 2", "initial 4 is not between minimum 1 and maximum 2"),
        ("maximum = 0", "maximum is 0: use a whole number of at least 1"),
        ("cpus = 0", "cpus is 0: use a whole number of at least 1"),
        ("cpus = '8'", "groups.gpu.cpus is '8': use a whole number"),
        ("engines = 0", "groups.gpu.engines is 0: use a whole number of at least 1, or leave it out"),
        ("memory = 64", "groups.gpu.memory is 64: give a number with a unit"),
        ("prologue = 'module load'", "groups.gpu.prologue is 'module load': use a list of texts"),
        ('prologue = ["a\\nb"]', "prologue is 'a\\nb': use a text of one line"),
        ('account = ""', "account is empty: give a value, or leave it out"),
        ('account = "a\\n#SBATCH --uid=0"', "use a text of one line"),
        ('directives = ["--array=0-9"]', "job arrays are not supported: raise maximum instead"),
        ('directives = ["-a 0-9"]', "job arrays are not supported: raise maximum instead"),
        (
            'directives = ["--nodes=2"]',
            "a job has one node, since an engine over several nodes is not supported",
        ),
        ('directives = ["-N 1-4"]', "a job has one node"),
        ('directives = ["--requeue"]', "a lost job is replaced by a new one: leave it out"),
        ('directives = ["exclusive"]', "give options of sbatch, such as --exclusive"),
        (
            "tp_degree = 2",
            "[groups.gpu] has unknown key 'tp_degree' (did you mean 'tp-degree'?); allowed: role,",
        ),
        ("[groups.gpu.env]\n'A B' = 'x'", "env has 'A B', which is no name of a variable"),
        ("[groups.gpu.env]\nA = true", "groups.gpu.env.A is True: use a text in quotes"),
        (
            "[groups.gpu.container]\nruntime = 'docker'\nimage = 'x'",
            "runtime is 'docker': use apptainer, pyxis",
        ),
        ("[groups.gpu.container]\nruntime = 'pyxis'", "[groups.gpu.container] has no image"),
        ("[groups.gpu.container]\nimages = 'x'", "unknown key 'images' (did you mean 'image'?)"),
        ("drain = '19h'\nwalltime = '2d'", "longer than SLURM warns a job before its end (65535 s)"),
    ],
)
def test_a_group_is_refused(lines, message):
    line = refusal(group(lines))
    assert message in line
    assert "gpu" in line


def test_a_tool_group_is_refused():
    assert "engines belongs to a group with role = 'rollout'" in refusal(group("engines = 2", role="tool"))
    assert "tool-cpus 9 exceed the 8 cpus of a job" in refusal(group("cpus = 8\ntool-cpus = 9", role="tool"))
    assert "leaves no time to work after the drain (00:02:00)" in refusal(group("walltime = 60", role="tool"))
    assert "role is 'tools' (did you mean 'tool'?): use rollout, tool, trainer" in refusal(group("", role="tools"))
    assert "tool-cpus belongs to a group with role = 'tool'" in refusal(group("tool-cpus = 2", role="trainer"))


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ('backend = "slrum"', "backend is 'slrum' (did you mean 'slurm'?): use slurm, srun, local"),
        ("pool = 3", "the file has unknown key 'pool' (did you mean 'poll'?); allowed: backend"),
        ('interface = "ib0"\nhost = "login1"', "interface and host exclude each other"),
        ('worker-ports = "40000-40100"', "worker-ports is '40000-40100': give FIRST:LAST"),
        ('worker-ports = "40100:40000"', "ports are from 1 to 65535"),
        ("scheduler-port = 70000", "ports are from 1 to 65535"),
        ('scratch = "tmp"', "scratch is 'tmp': give an absolute path"),
        ('scratch = "/tmp/$(id)"', "scratch is '/tmp/$(id)': give an absolute path"),
        ("scratch = '/tmp/\"'", "give an absolute path"),
        ('caches = "/a b"', "caches is '/a b': give an absolute path"),
        ('dashboard-address = "8787"', "give HOST:PORT, such as 127.0.0.1:8787"),
        ('tls = "yes"', "tls is 'yes': use true or false"),
        ("poll = 0", "poll is 0: use more than 0"),
        ('export = "A=1"', "export is 'A=1': use ALL, NONE, or names of variables"),
        ("backend = 3", "backend is 3: use a text in quotes"),
    ],
)
def test_what_groups_share_is_refused(top, message):
    assert message in refusal(group("", top))


def test_groups_are_needed():
    assert refusal('backend = "slurm"') == "there are no groups: give at least one table [groups.NAME]"
    assert refusal("groups = 3") == "groups is 3: give tables [groups.NAME]"
    assert refusal("[groups]\ngpu = 3") == "groups.gpu is 3: use a table"
    assert "has no role" in refusal("[groups.gpu]")
    assert refusal('[groups.gpu]\nrole = "rollout"') == (
        "group gpu has no partition: give partition = NAME (`sinfo` lists them)"
    )


def test_only_slurm_needs_a_partition():
    for backend in ("srun", "local"):
        plan = plan_of(f'backend = "{backend}"\n[groups.gpu]\nrole = "rollout"\n')
        assert plan.groups["gpu"].partition is None


@pytest.mark.parametrize("name", ["gpu-1", "1gpu", "", "a b", "a--b", "x" * 41, "ü", "a/b"])
def test_names_that_could_be_those_of_other_jobs_are_refused(name):
    with pytest.raises(BadInput, match="a name is at most 40 letters"):
        WorkerGroup(name, "tool")


def test_only_apptainer_outside_sbatch():
    container = '\n[groups.gpu.container]\nruntime = "pyxis"\nimage = "x"'
    for backend in ("srun", "local"):
        assert "starts no Pyxis container" in refusal(group(container, f'backend = "{backend}"'))
    assert plan_of(group(container)).groups["gpu"].container == Container("pyxis", "x")


@pytest.mark.parametrize(
    ("gres", "directives", "gpus"),
    [
        ("gpu", (), 1),
        ("gpu:3", (), 3),
        ("gpu:h100:3", (), 3),
        ("gpu:a100:1,gpu:h100:2", (), 3),
        ("gres/gpu:2", (), 2),
        ("gpu:h100", (), 1),
        ("shard:2", (), None),
        (None, (), None),
        (None, ("--gpus-per-node=4",), 4),
        (None, ("--gpus h100:2",), 2),
        (None, ("-G 2",), 2),
        (None, ("--exclusive",), None),
    ],
)
def test_gpus_of_a_job(gres, directives, gpus):
    assert WorkerGroup("gpu", "tool", gres=gres, directives=directives).gpus == gpus


def test_a_file_that_is_none(tmp_path: Path):
    with pytest.raises(BadInput, match=r"cluster file .*missing.toml.*: No such file"):
        read_cluster_file(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(BadInput, match=r"bad.toml is no TOML"):
        read_cluster_file(tmp_path / "bad.toml")


_VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["slurm", "local", "gpu:4", "16GB", "02:00:00", "/tmp", "rollout", "tool", "1:2"]),
    st.lists(st.text(max_size=4), max_size=2),
    st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
    st.dates(),
)


@given(
    top=st.dictionaries(st.sampled_from(sorted(_plan_keys(Path()))) | st.text(max_size=5), _VALUES, max_size=3),
    group=st.dictionaries(st.sampled_from(sorted(_GROUP_KEYS)) | st.text(max_size=5), _VALUES, max_size=4),
)
def test_whatever_a_file_says_is_a_plan_with_scripts_or_one_line(top, group):
    named = {"role": "rollout", "partition": "gpu", **group}
    try:
        plan = cluster_plan({**top, "groups": {"gpu": named}})
    except BadInput as error:
        assert str(error).startswith("cluster: ") and "\n" not in str(error)
        return
    script = job_script(plan, plan.groups["gpu"], "gpu-0", "tcp://10.0.0.1:8786", None)
    assert script.splitlines()[-1].startswith("exec ")
    assert all(word for word in srun_arguments(plan, plan.groups["gpu"], "gpu-0"))


def test_a_group_of_tool_workers_may_be_a_pool_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(POOL_VARIABLE, raising=False)
    judges = WorkerGroup("judges", "tool", cpus=8, tool_cpus=8, env={POOL_VARIABLE: "judge"})
    plain = WorkerGroup("cpu", "tool", cpus=8, tool_cpus=8)
    maxima = [group.maximum_of_pool for group in (judges, plain)]
    assert [each.pool for each in maxima if each is not None] == ["judge", "cpu"]
    assert WorkerGroup("gpu", "rollout").maximum_of_pool is None
    assert (ToolWorker().pool, ServiceWorker().pool) == ("cpu", "gpu")
    monkeypatch.setenv(POOL_VARIABLE, "judge")
    assert (ToolWorker().pool, ServiceWorker().pool) == ("judge", "gpu")
