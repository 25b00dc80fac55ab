"""``ConfigFields``: the values of a Hugging Face ``config.json``, each checked when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graph_predictor.sizes.named_sizes import MOST
from tracer.parallel_plan import PlanError

MOST_LAYERS = 10_000
"""Ten times the deepest decoder there has been; more is damage."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Values by name; what one field means may have several names.

    Attributes:
        values: of the file, or of one object within it.
        where: the file, for messages.
        notes: what was assumed while fields were read.
        asked: names of the fields that were read, or would have been.
    """

    values: Mapping[str, Any]
    where: str
    notes: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def has(self, *names: str) -> str | None:
        """Return the first of the names that has a value, if any has."""
        self.asked.update(names)
        return next((name for name in names if self.values.get(name) is not None), None)

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return a whole number by the first of its names that is there.

        Raises:
            PlanError: it is missing and has no default, or is no whole number of that range.
        """
        name = self.has(*names)
        if name is None:
            if default is None:
                raise PlanError(f"{self.where} lacks {names[0]}, without which the decoder's size is not known; give "
                                "the model's whole config.json.")
            return default
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no size of a decoder: it is a whole number "
                            f"from {least} to {most:,}; check the file.")
        return value

    def sizes(self, name: str) -> list[int]:
        """Return a list of whole numbers, such as of layers; empty where it is not there."""
        value = self._value(name) or []
        if not isinstance(value, list) or any(
                not isinstance(each, int) or isinstance(each, bool) or not 0 <= each < MOST_LAYERS for each in value):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no list of layers; check the file.")
        return value

    def words(self, name: str) -> list[str]:
        """Return a list of words; empty where it is not there."""
        value = self._value(name) or []
        if not isinstance(value, list) or any(not isinstance(each, str) for each in value):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no list of words; check the file.")
        return value

    def word(self, name: str) -> str:
        """Return a word; the empty one where it is not there."""
        value = self._value(name)
        if value is not None and not isinstance(value, str):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no word; check the file.")
        return value or ""

    def flag(self, *names: str, default: bool) -> bool:
        """Return a yes or no."""
        name = self.has(*names)
        if name is None:
            return default
        value = self.values[name]
        if not isinstance(value, bool):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is neither true nor false; check the file.")
        return value

    def within(self, name: str) -> ConfigFields:
        """Return the fields of an object within; empty where there is none."""
        value = self._value(name)
        if value is not None and not isinstance(value, Mapping):
            raise PlanError(f"{name}={_shown(value)} in {self.where} is no object of fields; check the file.")
        return ConfigFields(value or {}, f"{name} of {self.where}", self.notes)

    def _value(self, name: str) -> Any:
        self.asked.add(name)
        return self.values.get(name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
