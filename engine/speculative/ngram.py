"""Prompt lookup: what followed the last tokens when they occurred before is what may follow them now.

Costs no memory and no pass of the model; strong where text repeats itself, as code and edits do (Saxena 2023).
"""

from collections.abc import Sequence

import numpy as np

MAX_NGRAM = 4
MIN_NGRAM = 2
"""Of a single token, almost anything may follow."""


def lookup(token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
    """Up to `max_tokens` tokens that followed the longest suffix of the text that occurred before, most recently.

    And the suffix's length, up to `MAX_NGRAM` tokens; nothing and 0 where not even one of `MIN_NGRAM` did.
    """
    text = np.asarray(token_ids)
    for size in range(min(MAX_NGRAM, len(text) - 1), MIN_NGRAM - 1, -1):
        # A start is one of a window that ends before the text does, so that something follows it.
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], size)
        starts = np.flatnonzero((windows == text[-size:]).all(axis=1))
        if len(starts):
            follows = int(starts[-1]) + size
            return text[follows : follows + max_tokens].tolist(), size
    return [], 0
