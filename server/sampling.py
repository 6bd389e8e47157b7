"""How a request is sampled: what it says, else what the model's own generation_config.json says."""

import json
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import UnsupportedModelError
from engine.protocol import SamplingParams

FIELDS = ("temperature", "top_k", "top_p", "min_p")


def default_sampling(model_path: Path) -> SamplingParams:
    """The model's recommendation where it has one (`do_sample`), else plain sampling at temperature 1."""
    path = model_path / "generation_config.json"
    if not path.exists():
        return SamplingParams()
    try:
        config = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, Any])
        if not config.get("do_sample"):
            return SamplingParams()
        given = {name: config[name] for name in FIELDS if config.get(name) is not None}
        # The engine would die of values of another type.
        values = msgspec.structs.asdict(msgspec.convert(given, SamplingParams))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}.") from None
    return override(SamplingParams(), **values)


def override(defaults: SamplingParams, **values: Any) -> SamplingParams:
    """The defaults with the values that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    # The API's -1 and the engine's 0 both say "all tokens".
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    return SamplingParams(**{**{name: getattr(defaults, name) for name in defaults.__struct_fields__}, **given})
