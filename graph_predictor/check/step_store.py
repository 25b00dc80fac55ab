"""Stored counts of steps that tests set limits to: one JSON file beside the tests, changed only on request.

One JSON object of a fixed form::

    {"format": "foretrace-limits", "version": 1, "steps": {TEST: {"device", "torch", "counts", "memory", …}, …}}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from graph_predictor.check.baseline import check_kind
from graph_predictor.check.captures import CheckError
from graph_predictor.check.step_limits import StepFigures
from tracer.decode import DecodeError, convert, from_json
from tracer.input_file import read_input
from tracer.output_file import whole_file

FORMAT = "foretrace-limits"
VERSION = 1


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    steps: dict[str, StepFigures]


@dataclass(frozen=True, slots=True)
class StepStore:
    """The file."""

    path: Path

    def read(self) -> dict[str, StepFigures]:
        """Everything in it, by name of the test; empty if there is no such file.

        Raises:
            CheckError: it is damaged, another program's, or of a newer version.
        """
        try:
            head: Any = from_json(read_input(self.path))
        except FileNotFoundError:
            return {}
        except (OSError, DecodeError) as error:
            raise CheckError(f"{self.path} cannot be read ({error}); take it from version control again, or remove it "
                             "and store the counts anew with pytest --foretrace-update.") from error
        check_kind(head, str(self.path), FORMAT, VERSION)
        try:
            return convert(head, _File).steps
        except DecodeError as error:
            raise CheckError(f"{self.path} is damaged ({error}); take it from version control again, or remove it and "
                             "store the counts anew with pytest --foretrace-update.") from error

    def put(self, test: str, figures: StepFigures) -> None:
        """Store a test's figures beside those of the others; the file is written whole or not at all.

        Raises:
            ForetraceError: as ``read``, or it cannot be written.
        """
        steps = self.read()
        if steps.get(test) == figures:
            return
        steps[test] = figures
        text = msgspec.json.format(msgspec.json.encode(_File(FORMAT, VERSION, dict(sorted(steps.items())))), indent=1)
        with whole_file(self.path) as stream:
            stream.write(text + b"\n")
