"""Traces, parsed by Perfetto's own classes: fields, nesting, flows, counters, and sums equal to those of the report."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

import pytest
from worlds.run_builders import hostile_trajectory, outline_of, session_of, timed_trajectory

from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.views.accounts import PHASE_TITLE, Phase
from heddle_dask.views.report.run_figures import RunFigures
from heddle_dask.views.trace.run_trace import PerfettoTrace, RunTrace, TrackOrder

unknown_fields = pytest.importorskip("google.protobuf.unknown_fields")
perfetto = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")


class Parsed:
    """A trace as Perfetto reads it: tracks, slices, counters, names resolved."""

    def __init__(self, data: bytes) -> None:
        trace = perfetto.Trace()
        assert trace.ParseFromString(data) == len(data)
        self.tracks: dict[int, Any] = {}
        self.slices: list[tuple[int, int, int, str, dict[str, Any]]] = []
        self.counters: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.instants: list[str] = []
        self.flows: dict[int, list[tuple[int, bool]]] = defaultdict(list)
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        stacks: dict[int, list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
        last: dict[int, int] = defaultdict(int)
        event_type = perfetto.TrackEvent
        for number, packet in enumerate(trace.packet):
            for phase in (packet, packet.track_event, packet.track_descriptor, packet.interned_data):
                assert not len(unknown_fields.UnknownFieldSet(phase))
            assert packet.trusted_packet_sequence_id == 1
            assert bool(packet.sequence_flags & 1) == (number == 0) and packet.sequence_flags & 2
            names.update({each.iid: each.name for each in packet.interned_data.event_names})
            arguments.update({each.iid: each.name for each in packet.interned_data.debug_annotation_names})
            if packet.HasField("track_descriptor"):
                descriptor = packet.track_descriptor
                assert descriptor.uuid not in self.tracks
                assert not descriptor.parent_uuid or descriptor.parent_uuid in self.tracks
                self.tracks[descriptor.uuid] = descriptor
                continue
            event = packet.track_event
            assert event.track_uuid in self.tracks and packet.timestamp >= last[event.track_uuid]
            last[event.track_uuid] = packet.timestamp
            is_counter = self.tracks[event.track_uuid].HasField("counter")
            assert is_counter == (event.type == event_type.TYPE_COUNTER)
            if event.type == event_type.TYPE_SLICE_BEGIN:
                said = {arguments[each.name_iid]: _value(each) for each in event.debug_annotations}
                stacks[event.track_uuid].append((packet.timestamp, names[event.name_iid], said))
                for flow in event.flow_ids:
                    self.flows[flow].append((event.track_uuid, False))
                for flow in event.terminating_flow_ids:
                    self.flows[flow].append((event.track_uuid, True))
            elif event.type == event_type.TYPE_SLICE_END:
                start, name, said = stacks[event.track_uuid].pop()
                self.slices.append((event.track_uuid, start, packet.timestamp, name, said))
            elif event.type == event_type.TYPE_INSTANT:
                self.instants.append(names[event.name_iid])
            else:
                self.counters[event.track_uuid].append((packet.timestamp, event.counter_value))
        assert not any(stacks.values())

    def path(self, track: int) -> str:
        """Names from the top."""
        descriptor = self.tracks[track]
        above = f"{self.path(descriptor.parent_uuid)}/" if descriptor.parent_uuid else ""
        return above + str(descriptor.name)


def _value(annotation: Any) -> Any:
    return getattr(annotation, annotation.WhichOneof("value"))


def _traced(records: list[TrajectoryRecord]) -> tuple[Parsed, RunFigures]:
    figures = RunFigures([session_of(records)], one_clock=True)
    trace = RunTrace(figures)
    for record in records:
        outline = outline_of(record)
        trace.add(outline, figures.add(outline))
    return Parsed(trace.encoded()), figures


def test_what_the_encoder_writes_is_what_perfetto_reads() -> None:
    out = PerfettoTrace()
    top = out.track("Größe", order=TrackOrder.EXPLICIT, rank=3)
    counter = out.track("n", top, counter="tokens")
    out.begin(top, 2**40, "a", {"text": "é", "whole": -5, "large": 2**40, "phase": 0.25}, flows=[7])
    out.count(counter, 3, -(2**40))
    out.end(top, 2**40 + 300)
    out.instant(top, 2**41, "a")
    parsed = Parsed(out.encoded())
    assert parsed.path(counter) == "Größe/n" and parsed.tracks[counter].counter.unit_name == "tokens"
    assert parsed.tracks[top].child_ordering == 3 and parsed.tracks[top].sibling_order_rank == 3
    (piece,) = parsed.slices
    assert piece == (top, 2**40, 2**40 + 300, "a", {"text": "é", "whole": -5, "large": 2**40, "phase": 0.25})
    assert parsed.counters[counter] == [(3, -(2**40))] and parsed.instants == ["a"]
    assert parsed.flows == {7: [(top, False)]}


def test_slices_of_trajectories_sum_to_the_phases_of_the_report() -> None:
    parsed, figures = _traced([timed_trajectory(number) for number in range(6)])
    sums: Counter[str] = Counter()
    for track, start, stop, name, _ in parsed.slices:
        if parsed.path(track).startswith("Trajectories/"):
            sums[name] += stop - start
    for phase in Phase:
        assert sums[PHASE_TITLE[phase]] == figures.totals_ns[phase]
    whole = sum(sums[f"t{number}"] for number in range(6))
    assert whole == sum(figures.totals_ns.values())


def test_engines_have_lanes_counters_and_flows() -> None:
    records = [timed_trajectory(number) for number in range(6)]
    parsed, _ = _traced(records)
    lanes = [(track, start, stop) for track, start, stop, _, _ in parsed.slices if "/slot " in parsed.path(track)]
    assert {stop - start for _, start, stop in lanes} == {1_500_000_000}
    assert len(lanes) == 18 and {parsed.path(track).split("/")[1] for track, *_ in lanes} == {
        "engine-0",
        "engine-1",
    }
    by_track = defaultdict(list)
    for track, start, stop in lanes:
        by_track[track].append((start, stop))
    for spans in by_track.values():
        spans.sort()
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    # Two moves per trajectory of three steps, each from a slot of one engine to a slot of the other.
    assert len(parsed.flows) == 12
    for ends in parsed.flows.values():
        (source, begins), (target, ended) = sorted(ends, key=lambda end: end[1])
        assert not begins and ended
        assert parsed.path(source).split("/")[1] != parsed.path(target).split("/")[1]
    for track, values in parsed.counters.items():
        assert values[-1][1] == 0 and all(value >= 0 for _, value in values), parsed.path(track)
    (live,) = [track for track in parsed.counters if parsed.path(track) == "Live trajectories"]
    assert max(value for _, value in parsed.counters[live]) == 6
    assert sum(parsed.path(track).endswith("context tokens held") for track in parsed.counters) == 2


def test_actions_and_names_of_any_kind() -> None:
    parsed, _ = _traced([hostile_trajectory()])
    actions = [piece for piece in parsed.slices if parsed.path(piece[0]).startswith("Actions/")]
    assert len(actions) == 3 and actions[0][4]["cpus"] == 2 and actions[0][3] == hostile_trajectory().actions[0].label


def test_trajectories_of_unknown_sessions_are_left_out() -> None:
    record = outline_of(timed_trajectory(0))
    figures = RunFigures([], one_clock=False)
    trace = RunTrace(figures)
    trace.add(record, figures.add(record))
    assert not Parsed(trace.encoded()).slices
