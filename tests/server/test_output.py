from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.detokenizer import Detokenizer
from server.output import OutputText

EOS = 0


def output(*stop: str, eos_token_ids: tuple[int, ...] = (EOS,)) -> OutputText:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids)

    return OutputText(Detokenizer(decode), stop, eos_token_ids)


def tokens(text: str) -> list[int]:
    return [ord(char) for char in text]


def test_end_of_sequence_counts_and_has_no_text() -> None:
    text = output()
    assert text.push([*tokens("ab"), EOS]) + text.finish() == "ab"
    assert text.num_tokens == 3


def test_end_of_sequence_may_be_ignored() -> None:
    assert output(eos_token_ids=()).push([*tokens("a"), EOS, *tokens("b")]) == "a\x00b"


@pytest.mark.parametrize("at_once", [1, 2, 3, 8])
def test_stop_string_ends_at_the_same_token_however_they_come(at_once: int) -> None:
    text, ids, sent = output("cd"), tokens("abcdefgh"), ""
    for start in range(0, len(ids), at_once):
        sent += text.push(ids[start : start + at_once])
        if text.stopped:
            break
    assert (sent + text.finish(), text.num_tokens) == ("ab", 4)


@given(st.text(alphabet="abc\ufffd"), st.integers(1, 5))
def test_held_text_is_flushed(whole: str, at_once: int) -> None:
    text, ids = output("cab"), tokens(whole)
    sent = "".join(text.push(ids[start : start + at_once]) for start in range(0, len(ids), at_once))
    assert sent + text.finish() == whole.partition("cab")[0]
