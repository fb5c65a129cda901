"""Affinity: the class of a domain while it has room, the fallback, prices, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.core_builders import Stage, engine_of, step_of

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId, GroupId, StepId, TrajectoryId
from heddle_dask.core.nouns import StepRequest, TrajectorySpec
from heddle_dask.cost.engine_cost import ClassCosts, EngineCost
from heddle_dask.strategies.affinity.hardware_map import (
    HardwareMap,
    affinity_override,
    check_classes,
    check_domains,
    has_room,
    keys_of,
    narrowest_key,
)
from heddle_dask.strategies.presets import Strategy, build_strategies, tell_costs

CLASSES = ("H800", "H20", "")


def engine(name: str, hardware: str, *, slots: int = 2, kv_tokens: int = 0, busy: int = 0) -> Engine:
    spec = replace(engine_of(name, slots, kv_tokens=kv_tokens), hardware=hardware)
    made = Engine(spec, number=0)
    made.inflight = {TrajectoryId(f"other {i}"): None for i in range(busy)}
    return made


def trajectory(name: str, domain: str, home: str | None = None) -> Trajectory:
    spec = TrajectorySpec(TrajectoryId(name), GroupId(name), domain=domain)
    return Trajectory(spec, number=0, home=None if home is None else EngineId(home))


_ENGINES = st.lists(
    st.tuples(st.sampled_from(CLASSES), st.integers(1, 3), st.integers(0, 3), st.sampled_from([0, 50, 500])),
    min_size=1,
    max_size=6,
)


@given(_ENGINES, st.sampled_from(CLASSES[:2]), st.integers(0, 5), st.booleans())
def test_a_wanted_class_with_room_is_never_passed_over_and_the_fallback_finds_any_room(
    drawn: list[tuple[str, int, int, int]], wanted: str, homed: int, at_home: bool
) -> None:
    engines = [
        engine(f"e{i}", hardware, slots=slots, kv_tokens=kv, busy=busy)
        for i, (hardware, slots, busy, kv) in enumerate(drawn)
    ]
    home = engines[homed % len(engines)].engine_id if at_home else None
    mine = trajectory("t", "math/hard", home)
    step = step_of("t", context=100)
    route = HardwareMap({"math": wanted, "default": "H800"}).route(mine, step, engines)
    allowed = {e.engine_id for e in route.engines}
    own = [e for e in engines if e.spec.hardware == wanted]
    roomy = [e for e in engines if has_room(e, mine, step)]
    assert allowed, "an engine is always found"
    if any(e.engine_id == home for e in own):
        assert allowed == {e.engine_id for e in own}, "who is at home in the wanted class stays in it"
        assert not route.with_kv
    elif any(e in own for e in roomy):
        assert allowed == {e.engine_id for e in own if e in roomy}
        assert route.with_kv == (home is not None), "who returns brings the KV cache"
    elif own and roomy:
        assert allowed == {e.engine_id for e in roomy}, "another class while the wanted one is full"
    else:
        assert allowed == {e.engine_id for e in own or engines}


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
    st.lists(st.sampled_from("ab"), max_size=3),
    st.sets(
        st.sampled_from(["a", "a:b", "a:b:c", "a/a", "a:b/a", "a:b/a/b", "b", "b/a", "b:a", "a/b/a", "a/ab", "ab"])
    ),
)
def test_the_narrowest_key_covers_a_domain_with_and_without_its_tier(
    names: list[str], kinds: list[str], keys: set[str]
) -> None:
    def covers(key: str) -> bool:
        named, _, kind = key.partition("/")
        of_name, of_kind = named.split(":"), kind.split("/") if kind else []
        return names[: len(of_name)] == of_name and kinds[: len(of_kind)] == of_kind

    domain = "/".join([":".join(names), *kinds])
    fitting = {key for key in keys if covers(key)}
    assert fitting == keys & set(keys_of(domain))
    assert narrowest_key(domain, keys) == max(fitting, key=lambda k: (k.count("/"), k.count(":")), default=None)


def stage(*engines: tuple[str, str], overrides: list[str], kv_transfer: bool = True) -> Stage:
    made = Stage("sticky-least-loaded", overrides=overrides)
    for name, hardware in engines:
        spec = replace(engine_of(name, slots=1, kv_transfer=kv_transfer), hardware=hardware)
        made.feed(ev.EngineJoined, spec)
    return made


def submit(made: Stage, name: str, domain: str) -> None:
    spec = TrajectorySpec(TrajectoryId(name), GroupId(name), domain=domain)
    made.feed(ev.TrajectorySubmitted, spec)


def ask(made: Stage, name: str, index: int = 0, *, attempt: int = 0, context: int = 100) -> list[cmd.Command]:
    step = StepRequest(StepId(TrajectoryId(name), index, attempt), context, 64)
    commands: list[cmd.Command] = made.feed(ev.StepRequested, step)
    return commands


def answer(
    made: Stage,
    name: str,
    where: str,
    index: int = 0,
    *,
    attempt: int = 0,
    tokens: int = 10,
    how: str = "length",
) -> None:
    step_id = StepId(TrajectoryId(name), index, attempt)
    made.feed(ev.StepStarted, step_id, EngineId(where))
    made.feed(ev.StepFinished, step_id, EngineId(where), tokens, 0, how)


def test_a_trajectory_falls_back_while_its_class_is_full_and_returns_with_its_kv_cache() -> None:
    made = stage(("big", "H800"), ("wide", "H20"), overrides=["affinity=map,math=H20,default=H800"])
    for name in ("a", "b"):
        submit(made, name, "math")
    (first,) = ask(made, "a")
    (second,) = ask(made, "b")
    assert isinstance(first, cmd.StartStep) and first.engine_id == "wide"
    assert isinstance(second, cmd.StartStep) and second.engine_id == "big", "the wanted class is full"
    answer(made, "b", "big")
    answer(made, "a", "wide")
    (move,) = ask(made, "b", 1)
    assert move == cmd.MoveContext(TrajectoryId("b"), EngineId("big"), EngineId("wide"), "transfer")
    commands = made.feed(
        ev.MoveEnded,
        TrajectoryId("b"),
        EngineId("wide"),
        True,
        "transfer",
        0.1,
        110,
        source_engine_id=EngineId("big"),
    )
    starts = [c for c in commands if isinstance(c, cmd.StartStep)]
    assert [c.engine_id for c in starts] == ["wide"]


def test_a_hand_over_that_fails_or_loses_its_target_does_not_hold_the_step() -> None:
    for loses in (False, True):
        made = stage(("big", "H800"), ("wide", "H20"), overrides=["affinity=map,math=H20,default=H800"])
        for name in ("a", "b"):
            submit(made, name, "math")
        ask(made, "a")
        ask(made, "b")
        answer(made, "b", "big")
        answer(made, "a", "wide")
        ask(made, "b", 1)
        if loses:
            commands = made.lose("wide")
        else:
            commands = made.feed(
                ev.MoveEnded,
                TrajectoryId("b"),
                EngineId("wide"),
                False,
                "transfer",
                0.1,
                0,
                "broken",
                EngineId("big"),
            )
        starts = [c for c in commands if isinstance(c, cmd.StartStep)]
        assert [c.engine_id for c in starts] == ["big" if loses else "wide"], "once, and then without"


def test_prefill_goes_to_its_class_and_the_step_goes_on_where_the_cache_was_taken() -> None:
    split = "affinity=prefill-decode,prefill=H800,decode=H20,priced=False,least_tokens=50"
    made = stage(("big", "H800"), ("wide", "H20"), overrides=[split])
    submit(made, "a", "swe")
    (start,) = ask(made, "a")
    assert isinstance(start, cmd.StartStep) and start.prefill_only and start.engine_id == "big"
    answer(made, "a", "big", tokens=1, how="abort")
    (move,) = ask(made, "a", attempt=1, context=101)
    assert move == cmd.MoveContext(TrajectoryId("a"), EngineId("big"), EngineId("wide"), "transfer")
    done = ev.MoveEnded, TrajectoryId("a"), EngineId("wide"), True, "transfer", 0.1, 101, "", EngineId("big")
    (go_on,) = (c for c in made.feed(*done) if isinstance(c, cmd.StartStep))
    assert go_on.engine_id == "wide" and not go_on.prefill_only
    answer(made, "a", "wide", attempt=1, tokens=9)
    (short,) = ask(made, "a", 1, context=120)
    assert isinstance(short, cmd.StartStep) and short.engine_id == "wide", "ten new tokens are computed there"
    answer(made, "a", "wide", 1)
    (long,) = ask(made, "a", 2, context=300)
    assert isinstance(long, cmd.StartStep) and long.prefill_only and long.engine_id == "big"


def test_the_price_finds_the_class_of_each_domain_from_its_steps() -> None:
    compute = EngineCost(fixed_s=0.01, prefill_token_s=1e-5, token_s=1e-3)
    bandwidth = EngineCost(fixed_s=0.01, prefill_token_s=1e-3, token_s=1e-4)
    strategies = build_strategies("sticky-least-loaded", overrides=["affinity=priced,power=0"])
    tell_costs(strategies, ClassCosts({("H800", 1): compute, ("H20", 1): bandwidth}))
    made = Stage(strategies=strategies)
    for name, hardware in (("big", "H800"), ("wide", "H20")):
        made.feed(ev.EngineJoined, replace(engine_of(name, slots=64, max_context_tokens=10**6), hardware=hardware))
    for i in range(20):
        for domain, context, tokens in (("swe", 5000, 10), ("math", 100, 2000)):
            name = f"{domain} {i}"
            submit(made, name, domain)
            (start,) = (c for c in ask(made, name, context=context) if isinstance(c, cmd.StartStep))
            if i >= 10:
                assert start.engine_id == {"swe": "big", "math": "wide"}[domain], (i, domain)
            answer(made, name, start.engine_id, tokens=tokens)
            made.feed(ev.TrajectoryEnded, TrajectoryId(name), "completed")


@pytest.mark.parametrize(
    ("override", "hardware", "said"),
    [
        ("affinity=map,math=H100", {"H20"}, "hardware 'H100', which no engine has; classes: H20"),
        ("affinity=prefill-decode,prefill=A,decode=H20", {"H20"}, "hardware 'A'"),
        ("affinity=map,default=H20", set(), "none is declared"),
    ],
)
def test_unknown_classes_are_refused_in_one_line(override: str, hardware: set[str], said: str) -> None:
    with pytest.raises(BadInput, match=said) as raised:
        check_classes(build_strategies("sticky", overrides=[override]), hardware)
    assert "\n" not in str(raised.value)


MIX = {"math:hard:train", "search:train", "search:train/2 hops"}


@pytest.mark.parametrize(
    ("key", "all_known", "is_allowed"),
    [
        ("math", True, True),
        ("math:hard", True, True),
        ("math:hard:train", True, True),
        ("math:train", True, False),
        ("maths", True, False),
        ("math:easy", True, False),
        ("search/2 hops", True, True),
        ("search/3 hops", True, False),
        ("search/3 hops", False, True),
        ("searches/3 hops", False, False),
        ("default", True, True),
    ],
)
def test_a_name_that_covers_no_part_of_a_mix_is_refused_with_the_names(
    key: str, all_known: bool, is_allowed: bool
) -> None:
    strategies = build_strategies("sticky", overrides=[f"affinity=map,{key}=H20"])
    if is_allowed:
        check_domains(strategies, MIX, all_known=all_known)
        return
    with pytest.raises(BadInput, match="math:hard:train, search:train, search:train/2 hops") as raised:
        check_domains(strategies, MIX, all_known=all_known)
    assert f"names '{key}'" in str(raised.value) and "\n" not in str(raised.value)


def test_a_part_of_a_mix_takes_the_names_that_are_its_own() -> None:
    whole = Strategy("heddle", ["affinity=map,math:hard=H20,search=3,default=H800", "admission=at-most,alive=4"])
    assert list(whole.among({"math:hard"}).overrides) == ["affinity=map,math:hard=H20,default=H800", whole.overrides[1]]
    assert next(iter(whole.among({"search/1 hops"}).overrides)) == "affinity=map,search=3,default=H800"
    assert Strategy("heddle", ["affinity=map,math=H20"]).among({"shell"}).build(seed=0).affinity is None


def test_a_table_of_a_file_is_an_override() -> None:
    assert affinity_override({"math": "H20", "default": "H800"}) == "affinity=map,math=H20,default=H800"
    assert affinity_override("priced") == "affinity=priced"
    with pytest.raises(BadInput, match="use a table such as"):
        affinity_override({"math": 3})
    for wrong in ("affinity=map", "affinity=prefill-decode,prefill=A,decode=A", "affinity=priced,power=-1"):
        with pytest.raises(BadInput):
            build_strategies("sticky", overrides=[wrong])
