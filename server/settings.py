"""All settings: one flat, frozen, typed tree, from defaults < YAML file < SPECTER_* environment < flags.

The command line, the environment's names and the YAML keys are generated from the fields; the environment is read
nowhere else.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import ByteSize, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from engine.config import EngineConfig
from engine.errors import ConfigError

ENV_PREFIX = "SPECTER_"


class Settings(EngineConfig, BaseSettings):
    """What `specter serve` can be told: the engine's settings and the server's own."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    served_model_name: str | None = Field(
        None, min_length=1, description="Name of the model in the API; by default the model's own."
    )
    queue_length: int = Field(
        16, ge=0, description="Requests that may wait while one runs; further ones are refused with status 503."
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        description="Output tokens where a request does not say; by default all that fit the context for chats, "
        "and 16 for completions, as with OpenAI.",
    )
    shutdown_timeout: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="Seconds that running requests get to end after SIGTERM or Ctrl-C."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="What is logged to stderr.")

    def engine_config(self) -> EngineConfig:
        return EngineConfig.model_validate({name: getattr(self, name) for name in EngineConfig.model_fields})

    @property
    def model_name(self) -> str:
        """The model's id in the API."""
        directory = Path(self.model).expanduser()
        return self.served_model_name or (directory.resolve().name if directory.is_dir() else self.model)


def load_settings(flags: Mapping[str, Any], config_file: Path | None = None) -> Settings:
    """Merge all sources; raises ConfigError, which names the setting, where it was set, its value and a remedy."""
    file = _read_yaml(config_file) if config_file else {}
    environment = EnvSettingsSource(Settings)()
    try:
        return Settings(**{**file, **environment, **flags})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if name in flags:
            origin = "MODEL" if name == "model" else "--" + name.replace("_", "-")
        else:
            origin = ENV_PREFIX + name.upper() if name in environment else f"{name} in {config_file}"
        raise ConfigError(_complaint(origin, name, first)) from None


def unknown_environment() -> list[str]:
    """One sentence per SPECTER_* variable that looks like a misspelt setting.

    Others are left alone: container platforms make up such names, for example for a service called "specter".
    """
    known = [ENV_PREFIX + name.upper() for name in Settings.model_fields]
    unknown = [name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known]
    return [f"{name} is not a setting.{hint}" for name in unknown if (hint := did_you_mean(name, known))]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence with the closest known word, or nothing."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f" Did you mean {matches[0]}?" if matches else ""


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The configuration file {path} is not text in UTF-8.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"The configuration file {path} is not YAML: see the syntax{where}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"The configuration file {path} must hold lines such as 'port: 8000'.")
    for key in content:
        if key not in Settings.model_fields:
            hint = did_you_mean(str(key), Settings.model_fields) or f" Known: {', '.join(Settings.model_fields)}."
            raise ConfigError(f"The configuration file {path} has the unknown setting {key!r}.{hint}")
    return content


def _complaint(origin: str, name: str, error: ErrorDetails) -> str:
    reason = error["msg"][0].lower() + error["msg"][1:]
    if name in _SIZES:
        reason = "write a size such as 900MB or 1.5GiB, or auto"
    return f"{origin} is {error['input']!r}, which cannot be used: {reason}."


_SIZES = [name for name, field in Settings.model_fields.items() if ByteSize in get_args(field.annotation)]
