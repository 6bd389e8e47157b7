import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UnsupportedModelError
from engine.protocol import SamplingParams
from server.sampling import default_sampling, override


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, SamplingParams()),
        ({"temperature": 0.5}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.5}, SamplingParams()),
        ({"do_sample": True}, SamplingParams()),
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": None, "eos_token_id": 2},
            SamplingParams(temperature=0.5, top_k=7, top_p=0.9),
        ),
    ],
)
def test_recommendation_of_the_model(tmp_path: Path, config: dict[str, Any] | None, expected: SamplingParams) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert default_sampling(tmp_path) == expected


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"do_sample": true, "temperature": "hot"}', '{"do_sample": true, "top_k": 1.5}']
)
def test_unreadable_recommendation(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UnsupportedModelError, match="generation_config"):
        default_sampling(tmp_path)


def test_a_value_of_the_request_wins_and_null_does_not() -> None:
    defaults = SamplingParams(temperature=0.5, top_k=7)
    assert override(defaults, temperature=0.0, top_k=None) == SamplingParams(temperature=0.0, top_k=7)
    assert override(defaults, top_k=-1).top_k == 0
