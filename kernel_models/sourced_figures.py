"""A figure of a hardware file (TOML): a number with its source, checked before it is used.

    [compute]
    sm_count = { value = 132, source = "paper" }      ──▶  132.0, "NVIDIA H100 whitepaper"
    [sources]
    paper = "NVIDIA H100 whitepaper"

A wrong figure prices every step wrongly, and no result shows it. So a count must be whole, a rate a number, and each
within what hardware can plausibly have. The bounds are some ten times wider on either side than the shipped figures:
they catch wrong units and typing errors, and leave room for future hardware.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ENTRY = '{ value = …, source = "…" }'
_SHOWN = 60  # chosen: characters of a value inside an error's sentence
_MOST_NAMES = 8  # chosen: names listed in an error's sentence


@dataclass(frozen=True, slots=True)
class Figure:
    """The range and the meaning of a figure.

    Attributes:
        least, most: its range.
        unit: unit of the figure; for a count, what is counted.
        whole: whether the figure is a count.
        needed: whether the file must have it.
    """

    least: float
    most: float
    unit: str
    whole: bool = False
    needed: bool = True

    def expected(self) -> str:
        """Return the expected range and unit as a phrase for errors."""
        return f"a {'whole ' if self.whole else ''}number from {self.least:,g} to {self.most:,.0f} ({self.unit})"


def sources_in(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the table of sources. Raises ``ValueError`` as ``figure_in`` does."""
    found = table_in(data, "sources")
    for key, text in found.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(found_instead(f"sources.{key}", text, "a text that says where figures come from"))
    return found


def figure_in(name: str, entry: Any, figure: Figure, sources: Mapping[str, str]) -> tuple[float, str]:
    """Return value and source of one figure.

    Args:
        name: name of the figure in the error's sentence.
        entry: the file's entry.
        figure: the allowed range.
        sources: texts by key.

    Raises:
        ValueError: It is of another type, out of range or without a known source. The text is a clause without a full
            stop: it names the figure, what was found and what is expected.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{name}={shown(entry)} has no source; expected is a value with its source, as {_ENTRY}")
    for part in ("value", "source"):
        if part not in entry:
            raise ValueError(f"{name} has no {part}; expected is {_ENTRY}")
    if extra := entry.keys() - {"value", "source"}:
        raise ValueError(f"{name} has {shown(min(extra))} beside value and source; expected is {_ENTRY}")
    source = entry["source"]
    if not isinstance(source, str) or source not in sources:
        raise ValueError(f"{name} has the source {shown(source)}, which [sources] does not have; expected is one of "
                         f"{_some(sources)}, or add it there")
    value = entry["value"]
    try:
        number = number_of(value)
    except (TypeError, OverflowError):
        raise ValueError(found_instead(name, value, figure.expected())) from None
    fits = math.isfinite(number) and figure.least <= number <= figure.most
    if not fits or (figure.whole and number != math.floor(number)):
        raise ValueError(found_instead(name, value, figure.expected()))
    return number, sources[source]


def table_in(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of a file. Raises ``ValueError`` where it is missing or not a table."""
    found = data.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"it lacks the table [{name}]" if found is None else
                         f"{name} is {shown(found)}; expected is a table [{name}]")
    return found


def text_in(table: Mapping[str, Any], key: str, name: str) -> str:
    """Return a text of a table. Raises ``ValueError`` where it is missing or not a text."""
    value = table.get(key)
    if not isinstance(value, str):
        raise ValueError(found_instead(name, value, 'a text, in quotes'))
    return value


def number_of(value: Any) -> float:
    """Return a figure as a number. Raises ``TypeError`` for anything else, also for a boolean or a text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{shown(value)} is no number")
    return float(value)


def found_instead(name: str, value: Any, expected: str) -> str:
    """Return a clause that says what was found and what is expected."""
    return f"it lacks {name}; expected is {expected}" if value is None else (
        f"{name} is {shown(value)}; expected is {expected}")


def shown(value: Any) -> str:
    """Return a value in TOML notation, cut to a length that fits an error's sentence."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = f'"{value}"' if value.isprintable() else ascii(value)
    elif isinstance(value, datetime.date | datetime.time):
        text = value.isoformat()
    elif isinstance(value, dict):
        text = "a table"
    elif isinstance(value, list):
        text = f"[{', '.join(map(shown, value[:_MOST_NAMES]))}]"
    else:
        text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _some(sources: Mapping[str, str]) -> str:
    names = list(sources)
    more = ", …" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more if names else "none, as it is empty"
