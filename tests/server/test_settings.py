from pathlib import Path

import pytest

from engine.config import EngineConfig
from server.cli import parse_args
from server.settings import Settings, load_settings, unknown_environment


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "specter.yaml"
    path.write_text("model: from-file\ndraft: none\ndevice_memory: 1GB\nport: 1\nqueue_length: 1\n")
    return path


def test_later_sources_win(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTER_PORT", "2")
    monkeypatch.setenv("SPECTER_QUEUE_LENGTH", "2")
    monkeypatch.setenv("SPECTER_DRAFT_LENGTH", "")
    settings = load_settings({"queue_length": "3"}, config)
    assert (settings.model, settings.draft, settings.device_memory) == ("from-file", "none", 10**9)
    assert (settings.port, settings.queue_length) == (2, 3)
    assert settings.draft_length == Settings.model_fields["draft_length"].default


@pytest.mark.parametrize(("value", "expected"), [("auto", "auto"), ("1.5GiB", 3 * 2**29), ("0", 0)])
def test_budgets_are_sizes_or_auto(monkeypatch: pytest.MonkeyPatch, value: str, expected: object) -> None:
    monkeypatch.setenv("SPECTER_HOST_MEMORY", value)
    settings = load_settings({"device_memory": value})
    assert (settings.host_memory, settings.device_memory) == (expected, expected)


def test_model_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTER_MODEL", "from-environment")
    assert load_settings({}).model == "from-environment"
    assert load_settings({"model": "from-flag"}).model == "from-flag"


def test_every_setting_has_a_flag_and_a_description() -> None:
    values = {"bool": [], "port": ["1"]}
    for name, field in Settings.model_fields.items():
        assert field.description
        if name == "model":
            continue
        flag = "--" + name.replace("_", "-")
        arguments = values["bool"] if field.annotation is bool else ["1"]
        assert name in vars(parse_args(["serve", flag, *arguments]))


def test_flags_that_were_not_given_are_absent() -> None:
    assert set(vars(parse_args(["serve", "--draft", "none"]))) == {"command", "config", "draft"}


def test_engine_config_holds_the_engines_part() -> None:
    config = Settings(model="m", device_memory="2GiB", port=1).engine_config()
    assert type(config) is EngineConfig
    assert (config.model, config.device_memory) == ("m", 2 * 1024**3)


def test_name_of_the_model(tmp_path: Path) -> None:
    assert Settings(model="org/name").model_name == "org/name"
    assert Settings(model=str(tmp_path)).model_name == tmp_path.name
    assert Settings(model=str(tmp_path), served_model_name="n").model_name == "n"


def test_misspelt_variables_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECTER_DEVICE_MEMROY", "1GB")
    monkeypatch.setenv("SPECTER_SERVICE_PORT_HTTP_TCP", "a container platform's")
    assert unknown_environment() == ["SPECTER_DEVICE_MEMROY is not a setting. Did you mean SPECTER_DEVICE_MEMORY?"]
