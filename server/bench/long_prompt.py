"""A prompt of about 4000 tokens, made of sentences that vary, so that it is neither random nor one phrase repeated."""

from collections.abc import Iterator
from itertools import cycle, islice

STATIONS = (
    "Northgate",
    "the old mill",
    "Harbour Road",
    "Saint Anne's hill",
    "the reservoir",
    "Elm Crossing",
    "Low Quay",
)
WEATHER = ("light rain", "a clear sky", "fog until noon", "gusts from the west", "hail", "a warm, dry wind", "thunder")
SEEN = (
    "two herons stood in the shallows",
    "the ferry was late by a quarter of an hour",
    "a crew was painting the railings",
    "nobody had emptied the gauge",
    "children were flying a red kite",
    "the bridge was closed to carts",
    "a fox crossed the path in daylight",
    "the baker had run out of rye bread",
    "smoke rose from the brickworks",
)
TASKS = ("replaced the battery", "cleaned the lens", "wrote down the level", "oiled the hinge", "took a sample")
NUM_DAYS = 70


def long_prompt() -> str:
    notes = "\n".join(islice(_notes(), NUM_DAYS))
    return (
        "These are the notes of someone who looks after weather stations.\n\n"
        f"{notes}\n\nSummarize the notes: which station had the most rain, what was repaired, and what was unusual?"
    )


def _notes() -> Iterator[str]:
    # Cycles of lengths without a common divisor, so that the same combination does not come twice.
    for day, station, weather, seen, task in zip(
        range(1, NUM_DAYS + 1), cycle(STATIONS), cycle(WEATHER[::-1] + WEATHER[:1]), cycle(SEEN), cycle(TASKS)
    ):
        rain = (37 * day) % 23
        yield (
            f"Day {day}. I went to {station}, where there was {weather} and the gauge held {rain} millimetres of rain. "
            f"On the way {seen}. I {task}, and left at {8 + day % 9}:{(day * 7) % 60:02} for the next place."
        )
