"""In which order the replies of a cell are asked for."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.protocol import SamplingParams
from server.bench.modes import Mode

SEED = 20_24
"""Of sampled replies: the same for all modes, though what they draw with it differs."""
SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.7, seed=SEED),
}


class Step(NamedTuple):
    """What all modes are asked before anything else is; TPOTs within a step are compared with one another."""

    round: int
    prompt: str
    """Its name."""
    sampling: str


class Turn(NamedTuple):
    step: Step
    mode: Mode


def steps(prompts: Sequence[str], num_rounds: int) -> list[Step]:
    """Each prompt once in a round, with the samplings alternating from prompt to prompt, and from round to round."""
    samplings = list(SAMPLINGS)
    return [
        Step(number, prompt, samplings[(number + i) % len(samplings)])
        for number in range(num_rounds)
        for i, prompt in enumerate(prompts)
    ]


def schedule(modes: Sequence[Mode], prompts: Sequence[str], num_rounds: int) -> Iterator[Turn]:
    """All modes in turn in every step; each step starts with another one, so that none always follows the same."""
    for number, step in enumerate(steps(prompts, num_rounds)):
        first = number % len(modes)
        yield from (Turn(step, mode) for mode in (*modes[first:], *modes[:first]))
