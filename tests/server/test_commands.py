"""The command `specter`: what it says and returns when something is wrong, and the commands that only prepare."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server import __version__
from server.__main__ import main
from tests.server.harness import EngineLog

ENGINE = (sys.executable, "-m", "tests.server.fake_engine")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "specter.yaml"


def fails(capsys: pytest.CaptureFixture[str], code: int, *arguments: str, engine: tuple[str, ...] = ENGINE) -> str:
    """What is said on stderr: one sentence and no traceback."""
    assert main(arguments, engine) == code
    captured = capsys.readouterr()
    *_, last = captured.err.strip().splitlines()
    assert last.startswith("specter: error: ")
    assert "Traceback" not in captured.err
    return last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--device-memroy", "1GB"], "Unknown option --device-memroy. Did you mean --device-memory?"),
        (["serve", "--device_memory=1GB"], "Did you mean --device-memory?"),
        (["serve", "--model", "x"], "The model is an argument, not an option: specter serve MODEL."),
        (["serve", "--model=x"], "The model is an argument, not an option: specter serve MODEL."),
        (["serve", "a", "b"], "Unknown argument b."),
        (["plan", "--model", "x"], "The model is an argument, not an option: specter plan MODEL."),
        (["plan", "--port", "1"], "Unknown option --port. See 'specter plan --help'."),
        (["plan", "--link-bandwith", "1GB"], "Did you mean --link-bandwidth?"),
        (["plan", "--link-bandwidth", "fast"], "'fast' is no bandwidth; write bytes per second such as 25GB or 1.5GiB"),
        (["plan", "--disk-bandwidth", "0"], "'0' is no bandwidth"),
        (
            ["plan", "--host-memory", "lots"],
            "--host-memory is 'lots', which cannot be used: write a size such as 900MB",
        ),
        (["pack", "--device-memory", "1GB"], "Unknown option --device-memory. See 'specter pack --help'."),
        (["serve", "--out", "x"], "Unknown option --out."),
        (["--verison"], "Unknown option --verison. Did you mean --version?"),
        (["demo", "--port", "1"], "Unknown option --port. See 'specter demo --help'."),
        (["sevre"], "invalid choice: 'sevre'"),
        ([], "Name a command: serve, plan, pack, bench or demo."),
        (["serve", "--port"], "--port: expected one argument"),
        (["serve", "--port", "http"], "--port is 'http'"),
        (["serve", "--port", "65536"], "less than or equal to 65535"),
        (["serve", "--device-memory", "lots"], "write a size such as 900MB or 1.5GiB, or auto."),
        (["serve", "--device", "tpu"], "'auto', 'cuda' or 'cpu'"),
        (["serve", "--config", "/nowhere.yaml"], "/nowhere.yaml cannot be read: No such file or directory"),
        (["serve", "--host", "nowhere.invalid"], "The host 'nowhere.invalid' is unknown"),
        (["serve", "--host", "192.0.2.1", "--port", "0"], "cannot be listened on"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in fails(capsys, 2, *arguments)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 80", "unknown setting 'prot'. Did you mean port?"),
        ("colour: red", "unknown setting 'colour'. Known: model, cache,"),
        ("port: [80]", "port in "),
        ("- port", "must hold lines such as"),
        ("port: [", "is not YAML"),
    ],
)
def test_wrong_configuration_file(capsys: pytest.CaptureFixture[str], config: Path, content: str, words: str) -> None:
    config.write_text(content)
    assert words in fails(capsys, 2, "serve", "--config", str(config))


def test_wrong_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTER_DRAFT_LENGTH", "-1")
    assert "SPECTER_DRAFT_LENGTH is '-1'" in fails(capsys, 2, "serve")


def test_port_in_use_is_said_before_the_engine_starts(
    capsys: pytest.CaptureFixture[str], taken_port: int, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    words = fails(capsys, 2, "serve", "--port", str(taken_port), engine=(*ENGINE, "--log", str(log)))
    assert f"Port {taken_port} on 127.0.0.1 is in use; pass another one as --port" in words
    assert not log.exists()


@pytest.mark.parametrize(("startup", "words"), [("fail", "pass --device-memory 3GB"), ("die", "signal SIGKILL")])
@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("plan",), ("pack",), ("demo",)])
def test_engine_does_not_start(
    capsys: pytest.CaptureFixture[str], model_path: Path, command: tuple[str, ...], startup: str, words: str
) -> None:
    engine = (*ENGINE, "--startup", startup, "--model-path", str(model_path))
    assert words in fails(capsys, 1, *command, engine=engine)


@pytest.fixture
def log(tmp_path: Path) -> EngineLog:
    return EngineLog(tmp_path / "engine.log")


def started(log: EngineLog) -> tuple[str, dict[str, Any]]:
    """The one task that the engine was started for, and its configuration."""
    (message,) = log.messages("Started")
    return message["task"], message["config"]


def test_demo_prints_the_path(capsys: pytest.CaptureFixture[str], tmp_path: Path, log: EngineLog) -> None:
    assert main(["demo", "--cache", str(tmp_path)], (*ENGINE, "--log", str(log.path))) == 0
    assert capsys.readouterr().out == "/cache/demo\n"
    task, config = started(log)
    assert (task, config["model"], config["cache"]) == ("prepare", "demo", str(tmp_path))


@pytest.mark.parametrize(("arguments", "out"), [(["--out", "/packs/m"], "/packs/m"), ([], None)])
def test_pack_prints_the_path(
    capsys: pytest.CaptureFixture[str], log: EngineLog, arguments: list[str], out: str | None
) -> None:
    assert main(["pack", "org/m", "--draft", "none", *arguments], (*ENGINE, "--log", str(log.path))) == 0
    captured = capsys.readouterr()
    assert captured.out == "/cache/packs/demo\n"
    assert "reading weights: 1.0 KB of 4.0 KB" in captured.err
    task, config = started(log)
    assert (task, config["model"], config["draft"], config["out"]) == ("pack", "org/m", "none", out)


def test_plan_prints_the_table(capsys: pytest.CaptureFixture[str], log: EngineLog) -> None:
    flags = ["--host-memory", "auto", "--device-memory", "1GB", "--kv-dtype", "bfloat16"]
    assert main(["plan", "org/m", *flags], (*ENGINE, "--log", str(log.path))) == 0
    out = capsys.readouterr().out
    assert "of a budget of 2.0 MB" in out
    assert "unknown: give --link-bandwidth" in out
    task, config = started(log)
    assert (task, config["host_memory"], config["device_memory"]) == ("plan", "auto", 10**9)


def test_plan_as_json_with_given_bandwidths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--link-bandwidth", "50MB/s", "--disk-bandwidth", "1GiB"], ENGINE) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["bandwidths"] == {"host": 50e6, "disk": 2**30}
    assert [forecast["tpot_floor_seconds"] for forecast in content["forecasts"]] == [13e6 / 2**30, 0.04]


def test_plan_of_a_model_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"], (*ENGINE, "--shortage-bytes", "1200000")) == 1
    assert "Does not fit: 1.2 MB of device memory short." in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in [(["--version"], __version__), (["plan", "--help"], "--host-memory SIZE")]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert words in capsys.readouterr().out
