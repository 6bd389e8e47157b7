"""`specter bench` with fake engines, which answer at once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.__main__ import main
from server.bench import cell, command
from server.bench.cgroup import MemoryGroups
from tests.server.harness import SECONDS, EngineLog, poll

ENGINE = (sys.executable, "-m", "tests.server.fake_engine")
ONE_CELL = ("--device-memory", "2MB", "--link", "paced", "--max-tokens", "6")


@pytest.fixture
def log(tmp_path: Path) -> EngineLog:
    return EngineLog(tmp_path / "engine.log")


@pytest.fixture
def engine(model_path: Path, log: EngineLog) -> tuple[str, ...]:
    return (*ENGINE, "--model-path", str(model_path), "--log", str(log.path))


def bench(engine: tuple[str, ...], tmp_path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON that it writes."""
    file = tmp_path / "bench.json"
    assert main(["bench", "--json", str(file), *arguments], engine) == code
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def groups_left(pid: int) -> list[Path]:
    """Control groups that the process has made."""
    with MemoryGroups() as groups:
        group = groups.make(10**8)
        found = group.path.parent.glob(f"specter-bench-{pid}-*") if group else []
        return [path for path in found if group and path != group.path]


def configs(log: EngineLog, task: str) -> list[dict[str, Any]]:
    return [message["config"] for message in log.messages("Started") if message["task"] == task]


def test_modes_reply_in_turn_to_the_same(
    engine: tuple[str, ...], log: EngineLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bench(engine, tmp_path, *ONE_CELL, "--modes", "lru,specter", "--quick")
    cells = content["cells"]
    assert [(cell["mode"], cell["drafter"], cell["link_limit"]) for cell in cells] == [
        ("lru", "none", 33333),
        ("specter", "quantized", 33333),
    ]
    assert [(reply["prompt"], reply["sampling"]) for reply in cells[0]["replies"]] == [
        ("chat", "greedy"),
        ("code", "sampled"),
    ]
    assert [len(reply["token_ids"]) for cell in cells for reply in cell["replies"]] == [6] * 4
    assert (cells[1]["tokens_per_cycle"], cells[1]["acceptance_rate"]) == (2.5, 0.5)
    assert cells[1]["same_output"] == {"reference": "lru", "num_same": 1, "num_compared": 1}
    assert [ratio["name"] for ratio in content["ratios"]] == ["specter/lru"]
    assert content["command"].startswith("specter bench --json")
    # The reference engine tells how fast the machine is; then one engine per mode, each of which warms up first.
    assert [config["link_bandwidth"] for config in configs(log, "bench")] == [None, 33333, 33333]
    assert all(config["device_memory"] == 2 * 10**6 for config in configs(log, "bench"))
    submits = log.messages("Submit")
    assert [len(submits), *(submit["max_tokens"] for submit in submits[:4])] == [6, 3, 6, 3, 6]
    assert all(submit["ignore_eos"] for submit in submits)
    captured = capsys.readouterr()
    assert "specter, the fastest here, is bound by" in captured.out
    assert "Replies: 4 of 4" in captured.err
    assert groups_left(os.getpid()) == []


def test_budgets_follow_from_the_plan(engine: tuple[str, ...], log: EngineLog, tmp_path: Path) -> None:
    """The fake's plan has 1 MB beside the slots, and its draft needs 3 MB more than that."""
    arguments = ["--modes", "lru,specter", "--quick", "--max-tokens", "4"]
    content = bench((*engine, "--shortage-bytes", "3000000"), tmp_path, *arguments)
    assert {cell["budget_bytes"] for cell in content["cells"]} == {5 * 10**6}
    assert any("2 MB does not hold the quantized draft and a slot" in note for note in content["notes"])
    plain, drafting = configs(log, "plan")
    assert (plain["draft"], drafting["draft"], drafting["device_memory"]) == ("none", "quantized", 2 * 10**6)
    assert [config["draft"] for config in configs(log, "pack")] == ["quantized"]


def test_a_budget_from_the_configuration_file(engine: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "specter.yaml"
    file.write_text("device_memory: 3MB\ndraft: ngram\n")
    arguments = ["--config", str(file), "--modes", "lru", "--link", "real,1MB/s", "--max-tokens", "4"]
    content = bench(engine, tmp_path, *arguments)
    assert [(cell["budget_bytes"], cell["link"], cell["drafter"]) for cell in content["cells"]] == [
        (3 * 10**6, "real", "none"),
        (3 * 10**6, "set", "none"),
    ]
    # Its text is a token per byte.
    assert any("The prompt 'long' is left out" in note for note in content["notes"])


@pytest.mark.parametrize(
    ("how", "words"),
    [("--fails", "The model needs 3 GB; pass --device-memory 3GB."), ("--dies", "was ended by signal SIGKILL")],
)
def test_a_mode_that_fails_leaves_the_others_alone(
    engine: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, words: str
) -> None:
    content = bench((*engine, how, "draft=ngram"), tmp_path, *ONE_CELL, "--modes", "ngram,lru", "--quick")
    ngram, lru = content["cells"]
    assert words in ngram["failure"]
    assert (len(ngram["replies"]), len(lru["replies"])) == (0, 2)
    assert "ngram failed: " in capsys.readouterr().out
    assert groups_left(os.getpid()) == []


def test_an_engine_that_its_control_group_ends_says_so(
    engine: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2 MB of budget and none for the runtime there is not even room for the interpreter."""
    with MemoryGroups() as groups:
        if groups.version is None:
            pytest.skip(f"no memory cgroup can be made here: {groups.reason}")
    monkeypatch.setattr(cell, "RUNTIME_BYTES", 0)
    (lru,) = bench(engine, tmp_path, *ONE_CELL, "--modes", "lru", "--quick", code=1)["cells"]
    assert "took more than its control group's 2 MB" in lru["failure"]


def test_where_all_modes_fail_the_exit_code_is_one(engine: tuple[str, ...], tmp_path: Path) -> None:
    engine = (*engine, "--dies", "draft=none")
    content = bench(engine, tmp_path, *ONE_CELL, "--modes", "lru,plain", "--quick", code=1)
    assert content["ratios"] == []


def test_nothing_fits(engine: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *ONE_CELL, "--modes", "lru"], (*engine, "--fails", "draft=none")) == 1
    assert "specter: error: The model needs 3 GB" in capsys.readouterr().err


def test_trace_of_the_engines_that_can(engine: tuple[str, ...], log: EngineLog, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    arguments = ["--modes", "lru,accelerate,ngram", "--quick", "--trace", str(file)]
    bench((*engine, "--fails", "draft=ngram"), tmp_path, *ONE_CELL, *arguments)
    events = json.loads(file.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["lru"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["verify"]
    assert [config["trace"] for config in configs(log, "bench")].count(True) == 1


def test_pictures(engine: tuple[str, ...], tmp_path: Path) -> None:
    bench(engine, tmp_path, *ONE_CELL, "--modes", "lru,specter", "--quick", "--plot", str(tmp_path / "plots"))
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "acceptance.png",
        "bytes.png",
        "roofline.png",
        "tpot.png",
    ]


def test_without_control_groups_that_is_said(
    engine: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MemoryGroups", lambda: MemoryGroups(tmp_path))
    content = bench(engine, tmp_path, *ONE_CELL, "--modes", "lru", "--quick")
    assert [cell["cgroup_limit_bytes"] for cell in content["cells"]] == [None]
    assert content["settings"]["cgroup_version"] is None
    assert any(note.startswith("No control group can be made") for note in content["notes"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "fast"], "Unknown mode 'fast'; known are on-demand, lru, plain"),
        (["--link", "slow"], "Unknown link 'slow'; known are real, paced"),
        (["--device-memory", "lots"], "--device-memory is 'lots'; write sizes such as 700MB,1.5GB."),
        (["--max-tokens", "0"], "'0' is no number of at least 1"),
        (["--json", "/nowhere/x.json"], "there is no directory /nowhere"),
        (["--trace", "/tmp"], "which is a directory; name a file"),
        (["--plot", "/proc/x"], "--plot is '/proc/x', which cannot be used"),
        (["--quik"], "Did you mean --quick?"),
        (["--draft", "ngram"], "Unknown option --draft"),
        (["--port", "1"], "Unknown option --port"),
    ],
)
def test_wrong_arguments_are_said_before_any_engine_starts(
    engine: tuple[str, ...], log: EngineLog, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["bench", *arguments], engine) == 2
    assert words in capsys.readouterr().err
    assert not log.path.exists()


def test_without_matplotlib_no_engine_is_started(
    engine: tuple[str, ...], log: EngineLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["bench", "--plot", "plots"], engine) == 2
    assert "pip install 'specter[bench]'" in capsys.readouterr().err
    assert not log.path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing_behind(
    engine: tuple[str, ...], log: EngineLog, number: signal.Signals
) -> None:
    """All engines start, and the second never replies."""
    options = [*engine[3:], "--hangs", "draft=quantized"]
    arguments = ["bench", *ONE_CELL, "--modes", "lru,specter"]
    run = [sys.executable, "-m", "tests.server.run_server", *options, "--", *arguments]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        poll(lambda: len(configs(log, "bench")) == 3 and len(log.messages("Submit")) == 3)
        process.send_signal(number)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in err
    for message in log.messages("Started"):
        assert not Path(f"/proc/{message['pid']}").exists()
    assert groups_left(process.pid) == []
