from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from server.detokenizer import MAX_WINDOW_TOKENS, Detokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = "abcdefgh 你好"


def byte_level() -> Tokenizer:
    """A token per byte, and one that ends within a character."""
    vocab = {char: i for i, char in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE({**vocab, "Ġð": 256}, [("Ġ", "ð")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words with a marked space, which is dropped at the start, and bytes for what has no token."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS.replace(" ", "")]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    return [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.finish()]


@given(st.lists(st.integers(0, 256), max_size=3 * MAX_WINDOW_TOKENS))
def test_pieces_of_any_tokens_concatenate_to_the_whole(token_ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
@given(text=st.text(alphabet=st.one_of(st.sampled_from(LETTERS), st.characters(exclude_categories=["Cs"]))))
def test_pieces_of_a_text_have_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text * 3).ids
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_sent_as_soon_as_it_is_certain() -> None:
    assert pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode("aé🙂").ids) == ["a", "", "é", "", "", "", "🙂", ""]


def test_long_outputs_are_decoded_in_a_bounded_window() -> None:
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return SENTENCEPIECE.decode(list(token_ids))

    detokenizer = Detokenizer(decode)
    token_ids = SENTENCEPIECE.encode("ab 你好 🙂" * 100).ids
    text = "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
    assert text == SENTENCEPIECE.decode(token_ids)
    assert longest < 2 * MAX_WINDOW_TOKENS


def test_skipped_tokens_are_no_context() -> None:
    a, b = SENTENCEPIECE.encode("a b").ids[1], SENTENCEPIECE.encode("a b").ids[2:]
    detokenizer = Detokenizer(SENTENCEPIECE.decode, {0})
    pieces = [detokenizer.push(token_id) for token_id in [a, *[0] * MAX_WINDOW_TOKENS, *b]]
    assert "".join(pieces) == "a b"
