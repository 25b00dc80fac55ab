"""``baseline.json``: what the captures of a directory measured, and how well they were predicted, when it was written.

One JSON object of a fixed form::

    {"format": "foretrace-baseline", "version": 1, "reasons": [{"date", "reason", "foretrace"}, …],
     "captures": {NAME: {"program", "digest", "environment", "counts", "run", "accuracy"}, …}}
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from graph_predictor.check.accuracy import Accuracy
from graph_predictor.check.captures import BASELINE, CheckError, StoredCapture
from graph_predictor.check.measure import COUNTS, Count, Environment, Run
from tracer.decode import DecodeError, convert, from_json
from tracer.input_file import read_input
from tracer.output_file import whole_file

FORMAT = "foretrace-baseline"
VERSION = 1


class BaselineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One capture: its program, the SHA-256 of its files, what it measured, and how well it was predicted.

    ``step_region`` is the name of the regions that were its steps, where one was given.
    """

    program: str
    digest: str
    environment: Environment
    counts: dict[str, Count]
    run: Run
    accuracy: Accuracy
    step_region: str = ""


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reason a baseline was written, its date, and the version of foretrace."""

    date: str
    reason: str
    foretrace: str


class GateBaseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    format: str
    version: int
    reasons: list[Reason]
    captures: dict[str, BaselineEntry]


@dataclass(frozen=True, slots=True)
class BaselineFile:
    """The baseline of a directory of captures."""

    directory: str

    @property
    def path(self) -> Path:
        """Return where it lies."""
        return Path(self.directory) / BASELINE

    def read(self) -> GateBaseline:
        """Read it.

        Raises:
            CheckError: there is none; it is damaged, another program's, or of a newer version.
        """
        try:
            text = read_input(self.path)
        except FileNotFoundError:
            raise CheckError(f"{self.path} does not exist, so that there is nothing to compare with; make it with "
                             f"foretrace check {self.directory} --update-baseline --reason TEXT.") from None
        except OSError as error:
            raise CheckError(f"{self.path} cannot be read ({error.strerror or error}); check its permissions."
                             ) from error
        try:
            head: Any = from_json(text)
        except DecodeError as error:
            raise CheckError(f"{self.path} is damaged ({error}); take it from version control again, "
                             "or remove it and make a new one with --update-baseline.") from error
        check_kind(head, str(self.path), FORMAT, VERSION)
        try:
            found = convert(head, GateBaseline)
            for name, entry in found.captures.items():
                if lacking := [each for each in COUNTS if each not in entry.counts]:
                    raise DecodeError(f"{name} lacks the count of {lacking[0]}")
            return found
        except DecodeError as error:
            raise CheckError(f"{self.path} is damaged ({error}); take it from version control again, or remove it and "
                             "make a new one with --update-baseline.") from error

    def read_for(self, captures: list[StoredCapture]) -> GateBaseline:
        """The same, and make sure that it was made from these captures. Raises ``CheckError`` if it was not."""
        found = self.read()
        here = {capture.name: capture for capture in captures}
        told = []
        if missing := sorted(found.captures.keys() - here.keys()):
            told.append(f"{_listed(missing)} {_are(missing)} missing here")
        if new := sorted(here.keys() - found.captures.keys()):
            told.append(f"{_listed(new)} {_are(new)} not in it")
        if changed := sorted(name for name in found.captures.keys() & here.keys()
                             if found.captures[name].digest != here[name].digest):
            told.append(f"{_listed(changed)} {'have' if len(changed) > 1 else 'has'} other files")
        if other := sorted(name for name in found.captures.keys() & here.keys()
                           if found.captures[name].step_region != (here[name].step_region or "")):
            region = found.captures[other[0]].step_region
            told.append(f"the steps of {_listed(other)} were {f'the regions {region!r}' if region else 'not named'} "
                        "then (--step-region)")
        if told:
            raise CheckError(f"{self.path} was made from other captures than those of {self.directory}: "
                             f"{'; '.join(told)}; if that is meant, make it again with --update-baseline --reason "
                             "TEXT.")
        return found

    def write(self, captures: dict[str, BaselineEntry], reason: str) -> None:
        """Write it anew, whole or not at all; earlier reasons are kept.

        Raises:
            CheckError: what is there is another program's or of a newer version, and is left.
            ForetraceError: it cannot be written.
        """
        earlier = self.read().reasons if self.path.exists() else []
        now = Reason(datetime.date.today().isoformat(), " ".join(reason.split()), _version())
        value = GateBaseline(FORMAT, VERSION, [*earlier, now], dict(sorted(captures.items())))
        text = msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
        with whole_file(self.path) as stream:
            stream.write(text)


def check_kind(head: Any, path: str, form: str, version: int) -> None:
    """Raise ``CheckError`` unless a JSON value says that it is of a form, and of a version that is known."""
    if not isinstance(head, dict) or head.get("format") != form:
        raise CheckError(f"{path} was not written by foretrace: it does not say \"format\": \"{form}\"; move it out of "
                         "the way.")
    found = head.get("version")
    if not isinstance(found, int) or found < 1:
        raise CheckError(f"{path} is damaged: its version is {found!r}; take it from version control again.")
    if found > version:
        raise CheckError(f"{path} is of version {found}, and this foretrace reads up to {version}; update foretrace.")


def _version() -> str:
    try:
        return metadata.version("foretrace")
    except metadata.PackageNotFoundError:
        return ""


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"
