import json

from engine.protocol import TraceEvent
from server.bench.trace import chrome_trace


def test_modes_are_processes_and_tracks_are_threads_from_zero_on() -> None:
    traced = [
        TraceEvent("verify", "phase", 10.001, 0.002, {"num_tokens": 4}),
        TraceEvent("cycle", "cycle", 10.0, 0.004, {"wanted": [[0, 1]]}),
    ]
    content = json.loads(chrome_trace({"lru": [], "auto": traced}))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    assert processes == {1: "lru", 2: "auto"}
    shown = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert [(names[e["pid"], e["tid"]], e["name"], round(e["ts"]), round(e["dur"])) for e in shown] == [
        ("cycle", "cycle", 0, 4000),
        ("phase", "verify", 1000, 2000),
    ]
    assert shown[0]["args"] == {"wanted": [[0, 1]]}


def test_transfers_that_overlap_lie_in_lanes() -> None:
    times = [(0.0, 2.0), (1.0, 2.0), (2.0, 1.0), (5.0, 1.0)]
    traced = [TraceEvent(str(i), "transfer", start, seconds, {}) for i, (start, seconds) in enumerate(times)]
    events = json.loads(chrome_trace({"auto": traced}))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes = {e["name"]: names[e["tid"]] for e in events if e["ph"] == "X"}
    assert lanes == {"0": "transfer", "1": "transfer 2", "2": "transfer", "3": "transfer"}
