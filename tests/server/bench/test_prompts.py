from pathlib import Path

from server.bench.long_prompt import NUM_DAYS, long_prompt
from server.bench.prompts import NUM_QUICK, PROMPTS, TokenizedPrompt, fitting, tokenized
from server.tokenizer import Tokenizer


def test_all_kinds_and_in_a_quick_run_two() -> None:
    assert {prompt.kind for prompt in PROMPTS} == {"chat", "prose", "code", "long"}
    assert len({prompt.name for prompt in PROMPTS}) == len(PROMPTS)
    assert [prompt.kind for prompt in PROMPTS[:NUM_QUICK]] == ["chat", "code"]


def test_the_long_prompt_does_not_repeat_itself() -> None:
    days = [line for line in long_prompt().splitlines() if line.startswith("Day ")]
    assert len(days) == NUM_DAYS
    assert len({line.partition("I went")[2] for line in days}) == NUM_DAYS


def test_the_chat_template_is_applied(model_path: Path) -> None:
    tokenizer = Tokenizer(model_path)
    token_ids = tokenized(PROMPTS[0], tokenizer).token_ids
    assert token_ids[0] in tokenizer.special_token_ids
    text = tokenizer.decode(token_ids)
    assert text.startswith("user\nExplain how a bicycle")
    assert text.endswith("assistant\n")


def test_prompts_without_room_for_a_reply_are_left_out_with_a_word() -> None:
    short, long = TokenizedPrompt("short", "chat", [1] * 90), TokenizedPrompt("long", "long", [1] * 91)
    fits, notes = fitting([short, long], 10, 100)
    assert fits == [short]
    assert notes == ["The prompt 'long' is left out: its 91 tokens and 10 of reply do not fit the context of 100."]
