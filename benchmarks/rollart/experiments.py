"""The experiments of the benchmark ``rollart`` by name; sections and figures are RollArt's (arXiv 2512.22560)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.code_digest import DECIDING
from benchmarks.experiments import Experiment, Experiments, experiment
from benchmarks.rollart.affinity import equal_cost_duel, mixed_pools
from benchmarks.rollart.arms import (
    GROUPS,
    OPPONENTS,
    OURS,
    SHARES,
    TrainingBench,
    base_job,
    colocated,
    ladder,
    shipped,
    sync,
    with_rules,
)
from benchmarks.rollart.prefill_decode import separated
from benchmarks.rollart.rows import RollartRow
from benchmarks.rollart.training_job import TP_DEGREES, StepFigures
from benchmarks.rollart.workload import SAME_REWARD_SHARE, TaskMix

MODELS = tuple(TP_DEGREES)
SIGMAS_S = {1.0: "1.23", 3.0: "1.51", 5.0: "1.69", 7.0: "2.18", 10.0: "2.27"}
ALPHAS = (1, 2, 4, 6)


def rollout_s(figures: StepFigures) -> float:
    """Seconds of a synchronous rollout."""
    return figures.rollout_s


def step_times(bench: TrainingBench, model: str, ours: Sequence[str]) -> list[RollartRow]:
    """Seconds of a training step of every arm; ratio: Sync+ over the arm (7.2, Figure 10)."""
    paper = {
        "Sync": "1/1.40 to 1/2.40",
        "One-off": "1.31 to 1.47; 32B 1.52",
        "AReaL-like, 1": "1.35 to 1.56; 32B 1.56",
        "RollArt's rules, 1 (n of the engines)": "1.65 to 2.12; 32B 2.05",
    }
    arms = {name: bench.tuned(of(base_job(model))) for name, of in ladder(*ours).items()}
    return bench.rows(f"step of {model}", arms, "Sync+", paper=paper)


def trainer_shares(bench: TrainingBench, alpha: int) -> list[RollartRow]:
    """The command's defaults beside other choices under this bound, by trainer GPUs; ratio: as shipped over the arm."""
    rows = []
    for count in SHARES:
        job = replace(base_job(), trainer_gpus=count)
        shipped_here = with_rules(shipped(job), alpha=alpha, depth=alpha)
        others = {name: of(job) for name, of in OURS.items() if name.startswith(f"alpha {alpha},")}
        arms = {"as shipped": shipped_here}
        arms |= {name: other for name, other in others.items() if other != shipped_here}
        rows += bench.rows(f"bound {alpha}", arms, "as shipped", parameter=f"{count} of {job.gpus} train")
    return rows


def spreads(bench: TrainingBench) -> list[RollartRow]:
    """Groups without a spread of rewards, which no batch takes; ratio: Sync+ over the arm, at the same share."""
    rows = []
    for share in (0.0, SAME_REWARD_SHARE):
        base = base_job()
        base = replace(base, mix=replace(base.mix, same_reward_share=share))
        chosen = {"Sync+": colocated, "One-off": OPPONENTS["One-off"], "AReaL-like, 1": OPPONENTS["AReaL-like, 1"]}
        arms = {name: of(base) for name, of in {**chosen, "as shipped": shipped}.items()}
        rows += bench.rows("spread", arms, "Sync+", parameter=f"{share:.0%} without a spread")
    return rows


def gpu_counts(bench: TrainingBench) -> list[RollartRow]:
    """Qwen3-14B on 8, 12 and 16 GPUs, an eighth of 64, 96 and 128 (7.2, Figure 10c); ratio: Sync+ over the arm."""
    rows = []
    chosen = [*OPPONENTS, "as shipped"]
    for gpus in (8, 12, 16):
        job = with_rules(base_job("qwen3-14b", gpus), groups=GROUPS)
        arms = {name: bench.tuned(ladder()[name](job)) for name in chosen}
        paper = {"RollArt's rules, 1 (n of the engines)": "1.33 to 2.08 over baselines"}
        rows += bench.rows("gpus", arms, "Sync+", parameter=f"{8 * gpus} GPUs", paper=paper)
    return rows


def alphas(bench: TrainingBench) -> list[RollartRow]:
    """The bound from 1 to 6, for three models (7.3, Figure 13); ratio: alpha 1 over the arm."""
    rows = []
    for model in MODELS:
        for mode in ("cancel", "pace"):
            first = with_rules(base_job(model), staleness=mode)
            arms = {f"{mode}, alpha {alpha}": with_rules(first, alpha=alpha) for alpha in ALPHAS}
            paper = {name: "up to 1.22" for name in list(arms)[1:]} if mode == "cancel" else {}
            rows += bench.rows("alpha", arms, f"{mode}, alpha 1", paper=paper)
    return rows


def switch_orders(bench: TrainingBench) -> list[RollartRow]:
    """Engines switch before a batch is formed, or after it (RollArt's order); ratio: after over before."""
    rows = []
    for model in MODELS:
        before = with_rules(base_job(model), alpha=2)
        arms = {
            "switch after the batch": with_rules(before, switch="after-batch"),
            "switch before the batch": before,
            "switch before, KV kept": with_rules(before, keep_kv=True),
        }
        rows += bench.rows("switch", arms, "switch after the batch")
    return rows


def transfers(bench: TrainingBench) -> list[RollartRow]:
    """Weights behind the rollout against weights while it stands still (7.4, Figure 14a and Table 4)."""
    papers = {"qwen3-8b": "exposed 1.4 s", "qwen3-14b": "exposed 5.1 s", "qwen3-32b": "exposed 9.6 s"}
    rows = []
    for model in MODELS:
        hidden = with_rules(base_job(model), alpha=2)
        arms = {
            "broadcast at line rate, blocking": replace(hidden, transfer="broadcast"),
            "push and pull, blocking": replace(hidden, transfer="store-blocking"),
            "push and fetch behind the rollout": hidden,
        }
        times = hidden.times
        share = 1 - times.install_s / (times.fetch_s + times.install_s)
        rows += bench.rows(
            "transfer",
            arms,
            "broadcast at line rate, blocking",
            paper={"push and fetch behind the rollout": f"1.10 to 1.16; {papers[model]}, 67 to 78 % hidden"},
            note=f"with fetch in the background {share:.0%} of fetch and load is hidden",
        )
    return rows


def sigmas(bench: TrainingBench) -> list[RollartRow]:
    """Turns of N(10 s, sigma): environments in lockstep over each by itself (7.3, Figure 11b); seconds of a rollout."""
    rows = []
    for sigma_s, paper in SIGMAS_S.items():
        mix = TaskMix(0, ("webshop", "frozenlake"), tool_s=10.0, tool_sd_s=sigma_s)
        base = replace(base_job(gpus=32), mix=mix, steps=3, warm=0)
        arms = {"lockstep": replace(sync(base), reward_places=0), "each by itself": colocated(base)}
        rows += bench.rows(
            "sigma",
            arms,
            "lockstep",
            parameter=f"sigma {sigma_s:g} s",
            paper={"each by itself": paper},
            seconds=rollout_s,
        )
    return rows


def redundancies(bench: TrainingBench) -> list[RollartRow]:
    """More groups and members than a batch needs, on 32 GPUs with math (7.4, Figure 14b); seconds of a rollout."""
    papers = {(0, 2): "1.11", (0, 4): "1.24", (2, 0): "1.16", (2, 2): "1.38", (2, 4): "1.51"}
    papers |= {(4, 0): "1.30", (4, 2): "1.52", (4, 4): "1.62"}
    base = colocated(replace(base_job(gpus=32), mix=TaskMix(0, ("math",)), steps=3, warm=0), groups=32)
    arms = {"32 x 8": base}
    paper = {}
    for (groups, members), ratio in papers.items():
        name = f"{32 + groups} x {8 + members}"
        arms[name] = with_rules(base, more_groups=groups, more_members=members)
        paper[name] = ratio
    arms["36 x 8, late groups kept"] = with_rules(base, more_groups=4, keep_losers=True)
    return bench.rows("redundancy", arms, "32 x 8", parameter="math", paper=paper, seconds=rollout_s)


def failing(bench: TrainingBench) -> list[RollartRow]:
    """Good iterations of SWE-bench, and iterations with hanging resets (2.2 and 2.3); ratio: without any help over it.

    A tail share of 2 % gives a hanging reset in nearly every iteration of 128.
    """
    swe = replace(base_job(gpus=32), mix=TaskMix(0, ("swe",), reset_tail_share=0.0), warm=1, steps=5)
    good = colocated(swe)
    bad = replace(good, mix=replace(good.mix, reset_tail_share=0.02))
    limited = replace(bad, mix=replace(bad.mix, reset_limit_s=90.0))
    arms = {
        "good iterations": good,
        "good, no resets": replace(good, mix=replace(good.mix, reset_mean_s=0.0)),
        "hanging resets": bad,
        "hanging resets, fresh environment after 90 s": limited,
        "hanging resets, 10 members": with_rules(bad, more_members=2),
        "hanging resets, 10 % of the resets fail": replace(bad, mix=replace(bad.mix, reset_failure_share=0.1)),
    }
    background = replace(bad, transfer="store", trainer_gpus=12)
    arms["hanging resets, asynchronous, alpha 2"] = with_rules(background, mode="async", alpha=2)
    paper = {"good iterations": "366 s", "hanging resets": "513 s"}
    return bench.rows("failing", arms, "hanging resets", parameter="swe", paper=paper)


def full_size(bench: TrainingBench) -> list[RollartRow]:
    """The whole batch of 512 on 128 GPUs with 8B, to check the eighth; ratio: Sync+ over the arm."""
    chosen = ("Sync", "Sync+", "One-off", "AReaL-like, 1", "as shipped")
    rows = []
    for gpus in (16, 128):
        arms = {name: ladder()[name](base_job(gpus=gpus)) for name in chosen}
        rows += bench.rows("full-size", arms, "Sync+", parameter=f"{gpus} GPUs")
    return rows


def _training(measure: Callable[..., list[RollartRow]], **options: object) -> Experiment:
    about = (measure.__doc__ or "").splitlines()[0]
    return Experiment(about, lambda study: measure(TrainingBench(study), **options))


EXPERIMENTS = Experiments(
    {
        "step-8b": _training(step_times, model="qwen3-8b", ours=("alpha 2, pace", "alpha 1, cancel", "alpha 3, pace")),
        "step-14b": _training(step_times, model="qwen3-14b", ours=("alpha 2, pace",)),
        "step-32b": _training(step_times, model="qwen3-32b", ours=("alpha 2, pace",)),
        "bound-1": _training(trainer_shares, alpha=1),
        "bound-2": _training(trainer_shares, alpha=2),
        "spread": _training(spreads),
        "gpus": _training(gpu_counts),
        "alpha": _training(alphas),
        "switch": _training(switch_orders),
        "transfer": _training(transfers),
        "sigma": _training(sigmas),
        "redundancy": _training(redundancies),
        "failing": _training(failing),
        "full-size": _training(full_size),
        "mixed-pools": experiment(mixed_pools),
        "duel": experiment(equal_cost_duel),
        "prefill-decode": experiment(separated),
    },
    folders=(*DECIDING, "training"),
)
