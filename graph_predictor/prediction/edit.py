"""``Edit``: a small frozen class with its parameters, that turns one scenario into another or says why it
cannot."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from graph_predictor.prediction.scenario import Scenario


@runtime_checkable
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
