"""``Edit``: a small frozen class with its parameters, that turns one scenario into another or says why it
cannot."""

from __future__ import annotations

from typing import Protocol

from graph_predictor.prediction.scenario import Scenario


class Edit(Protocol):
    """A change of a recorded step. Its class's text says what it assumes."""

    def describe(self) -> str:
        """Return one phrase for reports."""
        ...

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with the change.

        Raises:
            EditError: it cannot be done; the scenario stays as it is.
        """
        ...


def is_edit(value: object) -> bool:
    """Return whether something is an edit, and no class of edits."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in ("describe", "apply"))
