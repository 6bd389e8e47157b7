"""Events of the engines as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

The format: "Trace Event Format" of the Chromium project. Each mode is a process and each track a thread; all modes
begin at zero, so that they can be compared.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.protocol import TraceEvent

TRACKS = ("cycle", "phase", "layer", "wait", "transfer")
MAX_LANES = 100
"""Thread ids per track; transfers that overlap lie in lanes of their own."""


def chrome_trace(traces: Mapping[str, Sequence[TraceEvent]]) -> str:
    """JSON; times in microseconds."""
    events = [
        event for pid, (mode, traced) in enumerate(traces.items(), 1) for event in _process(pid, mode, list(traced))
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _process(pid: int, mode: str, events: list[TraceEvent]) -> Iterator[dict[str, Any]]:
    yield _metadata(pid, 0, "process_name", name=mode)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    start = min((event.start_seconds for event in events), default=0.0)
    for position, track in enumerate(TRACKS):
        mine = sorted((event for event in events if event.track == track), key=lambda event: event.start_seconds)
        lanes = _lanes(mine) if track == "transfer" else [mine]
        for lane, laid in enumerate(lanes):
            if not laid:
                continue
            tid = 1 + position * MAX_LANES + min(lane, MAX_LANES - 1)
            yield _metadata(pid, tid, "thread_name", name=track if lane == 0 else f"{track} {lane + 1}")
            yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)
            for event in laid:
                yield {
                    "name": event.name,
                    "cat": track,
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "ts": 1e6 * (event.start_seconds - start),
                    "dur": 1e6 * event.seconds,
                    "args": event.arguments,
                }


def _metadata(pid: int, tid: int, kind: str, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


def _lanes(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """The events, sorted by their start, in as few rows as possible without any overlap in a row."""
    lanes: list[list[TraceEvent]] = []
    for event in events:
        for lane in lanes:
            if lane[-1].start_seconds + lane[-1].seconds <= event.start_seconds:
                lane.append(event)
                break
        else:
            lanes.append([event])
    return lanes
