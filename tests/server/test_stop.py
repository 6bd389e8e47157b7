from hypothesis import given
from hypothesis import strategies as st

from server.stop import StopMatcher

TEXT = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """What is sent: all before the stop string that is complete first; of several, the one that began first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(TEXT, STOPS)
def test_character_by_character(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for char in text:
        sent += matcher.push(char)
        assert text.startswith(sent)
        assert not any(stop in sent for stop in stops)
    sent += matcher.finish()
    assert sent == cut(text, stops)
    assert matcher.matched == any(stop in text for stop in stops)


@given(st.lists(TEXT), STOPS)
def test_pieces_end_where_the_first_stop_string_begins(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = "".join(map(matcher.push, pieces)) + matcher.finish()
    assert "".join(pieces).startswith(sent)
    assert not any(stop in sent for stop in stops)
    assert matcher.matched or sent == "".join(pieces)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    matcher = StopMatcher(["</s>", "<b>"])
    assert [matcher.push(piece) for piece in ["a<", "/", "x<", "b"]] == ["a", "", "</x", ""]
    assert matcher.finish() == "<b"


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert [matcher.push(piece) for piece in ["abc", "d"]] == ["a", ""]
    assert matcher.finish() == ""
