"""Tables of machines that are not here."""

import io
import itertools
import json
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import published, simulate
from benchmarks.cards import CARDS, EXPERT_SECONDS, LAYER_SECONDS, LINKS, Card, Link, pass_times
from benchmarks.scenarios import AUTO, REFERENCE, Result, Situation, fastest, run_modes
from benchmarks.simulate import SYNTHETIC_MODES, Cell
from benchmarks.synthetic import FITTED, RANDOM
from engine.choice import hardware
from engine.profile import ProfiledToken
from tests.engine.tiny import mixtral_config, save_checkpoint

describe = cache(published.describe)
SMALL = "DeepSeek-V2-Lite"
NUM_TOKENS = 50
WARM_UP_TOKENS = 25
SLOW = Link("a slow one", 6e9)
IN_FLIGHT = 0.02
"""What a measurement may begin and end with on its way."""


@pytest.fixture(scope="module")
def tokens() -> list[ProfiledToken]:
    _, model, _ = describe(SMALL, CARDS[0])
    return published.text(model, FITTED, NUM_TOKENS)


def situation(tokens: list[ProfiledToken], card: Card, link: Link) -> Situation:
    config, model, machine = describe(SMALL, card)
    return published.situation(config, model, machine, tokens, card, link, WARM_UP_TOKENS)


def fitting(results: dict[str, Result | None]) -> dict[str, Result]:
    return {mode: result for mode, result in results.items() if result is not None}


@pytest.fixture(scope="module")
def by_link(tokens: list[ProfiledToken]) -> list[dict[str, Result]]:
    """Of the card with the least memory, by link, the slowest first."""
    return [fitting(run_modes(situation(tokens, CARDS[0], link), SYNTHETIC_MODES)) for link in (SLOW, *LINKS)]


def test_all_modes_fit_here(by_link: list[dict[str, Result]]) -> None:
    assert all(tuple(results) == SYNTHETIC_MODES for results in by_link)


def test_no_token_is_faster_than_its_bytes_and_its_computation(by_link: list[dict[str, Result]]) -> None:
    for results in by_link:
        for result in results.values():
            assert result.tpot_seconds >= result.compute_seconds
            assert result.tpot_seconds >= (1 - IN_FLIGHT) * result.link_seconds
            assert result.bound == ("link" if result.link_seconds > result.compute_seconds else "compute")
            assert 0 < result.hit_rate < 1


def test_more_bandwidth_is_no_slower(by_link: list[dict[str, Result]]) -> None:
    for slower, faster in itertools.pairwise(by_link):
        for mode in (REFERENCE, "plain"):
            assert faster[mode].tpot_seconds <= slower[mode].tpot_seconds
        # Other lengths of drafts are other windows.
        assert faster["specter"].tpot_seconds <= 1.1 * slower["specter"].tpot_seconds


def test_a_token_alone_computes_what_its_pass_reads(by_link: list[dict[str, Result]]) -> None:
    _, model, _ = describe(SMALL, CARDS[0])
    times = pass_times(model, model.choices, CARDS[0])
    for results in by_link:
        assert results[REFERENCE].compute_seconds == pytest.approx(times.verify_seconds[0])


def test_passes_take_what_their_bytes_take() -> None:
    """By hand: 26 layers with 6 of 64 experts of 17.3 MB beside a layer without, and one table of embeddings of two."""
    _, model, _ = describe(SMALL, CARDS[0])
    card = Card("a slow one", 24 * 10**9, 1e9)
    times = pass_times(model, model.choices, card)
    machine = hardware(times, 1.0)
    expert_bytes = 2 * 3 * 2048 * 1408
    assert machine.expert_seconds == pytest.approx(expert_bytes / 1e9 + EXPERT_SECONDS)
    dense_bytes = model.sizes.needs(model.choices).dense - 2 * 102400 * 2048
    assert machine.pass_seconds == pytest.approx(dense_bytes / 1e9 + 27 * LAYER_SECONDS)
    quantized_bytes = expert_bytes / 16 * (4 + 2 * 16 / 64)  # a scale and a shift for each 64 weights
    experts_seconds = times.draft_seconds - machine.pass_seconds
    assert experts_seconds == pytest.approx(26 * 6 * (quantized_bytes / 1e9 + EXPERT_SECONDS), rel=0.01)


def test_with_a_slot_for_each_expert_nothing_is_moved() -> None:
    roomy = CARDS[2]._replace(num_bytes=80 * 10**9)
    config, model, machine = describe(SMALL, roomy)
    few = published.text(model, FITTED, 10)
    found = published.situation(config, model, machine, [*few, *few], roomy, Link("a fast one", 1e12), 10)
    for result in fitting(run_modes(found, SYNTHETIC_MODES)).values():
        assert result.num_slots == result.num_experts
        assert result.transfer_bytes == 0
        assert result.hit_rate == 1.0
        assert result.tpot_seconds == pytest.approx(result.compute_seconds)
        assert result.bound == "compute"


def test_random_routes_are_slower(tokens: list[ProfiledToken]) -> None:
    _, model, _ = describe(SMALL, CARDS[0])
    random = published.text(model, RANDOM, NUM_TOKENS)
    local, scattered = (
        fitting(run_modes(situation(text, CARDS[0], LINKS[0]), (REFERENCE,)))[REFERENCE] for text in (tokens, random)
    )
    assert scattered.hit_rate < local.hit_rate
    assert scattered.tpot_seconds > local.tpot_seconds


def test_what_does_not_fit_says_so() -> None:
    config, model, machine = describe("Mixtral-8x7B", CARDS[0])
    text = published.text(model, FITTED, 12)
    found = published.situation(config, model, machine, text, CARDS[0], LINKS[0], 4)
    results = run_modes(found, SYNTHETIC_MODES)
    assert results["specter"] is None
    best = fastest(results)
    assert best is not None
    assert best.mode == "plain"
    nothing = dict.fromkeys(SYNTHETIC_MODES)
    assert fastest(nothing) is None
    place: dict[str, str | float] = {"model": "Mixtral", "card": "", "link": "", "routing": ""}
    console = Console(width=simulate.WIDTH, record=True, file=io.StringIO())
    console.print(simulate.synthetic_table([Cell(place, results), Cell(place, nothing)]))
    assert console.export_text().count("does not fit") == 2


def test_the_command_prints_and_writes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "CARDS", CARDS[:1])
    file = tmp_path / "simulated.json"
    arguments = ["simulate", "--synthetic", "--models", SMALL, "--tokens", "30", "--json", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    assert simulate.main() == 0
    printed = capsys.readouterr().out
    assert "SYNTHETIC" in printed
    written = json.loads(file.read_text())
    assert "SYNTHETIC" in written["notes"]
    assert len(written["cells"]) == len(LINKS) * 2
    for cell in written["cells"]:
        assert cell["model"] == SMALL
        assert cell["auto"] in AUTO
        assert cell["modes"][cell["auto"]]["tpot_seconds"] == min(cell["modes"][mode]["tpot_seconds"] for mode in AUTO)
        for mode in SYNTHETIC_MODES:
            assert f"{cell['modes'][mode]['tpot_seconds'] * 1e3:.1f}" in printed


def test_without_a_profile_the_command_says_how_to_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_checkpoint(mixtral_config(), tmp_path / "model")
    arguments = ["simulate", "--model", str(checkpoint), "--cache", str(tmp_path), "--draft-weights", "qint8"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match="serve it once with --draft auto"):
        simulate.main()
