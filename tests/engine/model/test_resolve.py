from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from engine.errors import ModelNotFoundError
from engine.model.resolve import resolve_model
from engine.protocol import Loading


def ignore(message: Loading) -> None:
    pytest.fail(f"nothing should be downloaded: {message}")


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), tmp_path / "cache", ignore) == tmp_path
    assert not (tmp_path / "cache").exists()


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve_model("~/models", tmp_path, ignore) == tmp_path / "models"


def test_a_file_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf' is a file; give the directory"):
        resolve_model(str(file), tmp_path, ignore)


@pytest.mark.parametrize("name", ["/no/such/directory", "./nothing", "../nothing", "~/nothing"])
def test_a_path_that_is_no_directory_is_not_asked_of_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=f"^Model '{name}' is not a directory here; check the path"):
        resolve_model(name, tmp_path, ignore)


@pytest.mark.parametrize("name", ["no-such-directory/in/here", "two words", "nobody/such-a-model"])
def test_what_neither_the_disk_nor_the_hub_has_is_one_line_and_no_download(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name, tmp_path, lambda message: None)
    message = str(caught.value)
    assert message.startswith(f"Model '{name}' is not a directory here, and the hub could not give it (")
    assert "check the path or the id" in message
    assert "\n" not in message


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("first\nsecond"), RuntimeError("first\nsecond"), OSError()])
def test_whatever_the_hub_says_is_one_line(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr("engine.model.resolve.snapshot_download", fail)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("some/model", tmp_path, lambda message: None)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error
    assert ("(first)" in str(caught.value)) == bool(str(error))


def test_a_hub_id_is_downloaded_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []

    def download(name: str, cache_dir: Path, allow_patterns: list[str]) -> str:
        asked.append((name, cache_dir))
        assert "*.safetensors" in allow_patterns
        assert not any(pattern.endswith((".bin", "*")) for pattern in allow_patterns if pattern != "tokenizer*")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("engine.model.resolve.snapshot_download", download)
    progress: list[Loading] = []
    assert resolve_model("some/model", tmp_path / "cache", progress.append) == tmp_path / "snapshot"
    assert asked == [("some/model", tmp_path / "cache" / "hub")]
    assert progress == [Loading("Downloading some/model", 0, 0)]
