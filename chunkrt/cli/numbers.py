"""Lists of numbers on the command line, in llama-bench's notation: 128,512 and 16-64+16 and 1-8*2."""

from __future__ import annotations

import re

from chunkrt.errors import ConfigError

MOST_NUMBERS = 1000
_PART = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?:(?P<by>[+*])(?P<step>\d+))?)?")


def read_numbers(option: str, text: str, *, least: int = 0, most: int | None = None) -> list[int]:
    """Return whole numbers from a list of numbers and ranges, separated by commas, in order and without duplicates.

    Args:
        option: flag, for messages.
        text: the list; a range is FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR.
        least, most: the smallest and the largest allowed number.

    Raises:
        ConfigError: the text is no such list, or a number is not allowed.
    """
    numbers: list[int] = []
    for part in text.split(","):
        if re.fullmatch(r"\s*-\d+\s*", part):
            raise ConfigError(f"{option} is {text!r}, expected no {'number below 1' if least else 'negative number'}")
        if not (found := _PART.fullmatch(part.strip())) or len(part) > 40:
            raise ConfigError(
                f"{option} is {text!r}, expected whole numbers separated by commas, e.g. 128,512, or ranges, e.g. "
                "16-64+16 or 1-8*2"
            )
        numbers += _range(option, text, found)
    if min(numbers) < least:
        raise ConfigError(f"{option} is {text!r}, expected no {'number below 1' if least else 'negative number'}")
    if most is not None and max(numbers) > most:
        raise ConfigError(f"{option} is {text!r}, expected at most {most}")
    return list(dict.fromkeys(numbers))


def _range(option: str, text: str, found: re.Match[str]) -> list[int]:
    first = int(found["first"])
    if found["last"] is None:
        return [first]
    last, step, factor = int(found["last"]), 1, 1
    if found["by"] == "*":
        step, factor = 0, int(found["step"])
    elif found["by"] == "+":
        step = int(found["step"])
    if first * factor + step <= first:
        raise ConfigError(f"{option} is {text!r}, whose steps never reach the end; write 16-64+16 or 1-8*2")
    numbers, number = [], first
    while number <= last:
        numbers.append(number)
        number = number * factor + step
        if len(numbers) > MOST_NUMBERS:
            raise ConfigError(f"{option} is {text!r}, more than {MOST_NUMBERS} numbers; take larger steps")
    if not numbers:
        raise ConfigError(f"{option} is {text!r}, which ends before it begins; write {last}-{first}")
    return numbers
