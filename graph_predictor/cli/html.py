"""The option ``--html`` of the commands that have it: a page of what they found."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

from graph_predictor.cli.console import working
from graph_predictor.cli.options import shared
from graph_predictor.pages import page, parts, provenance, scripts

Html = Annotated[str | None, shared("--html")]


def check_html(path: str | None, inputs: Sequence[str]) -> None:
    """Refuse a page that could not be written, before the long work. Raises ``ForetraceError``."""
    if path is not None:
        scripts.check_installed()

        page.check_page(path, list(inputs))


def write_html(path: str | None, sources: Sequence[str],
               make: Callable[[provenance.Provenance], parts.ReportPage]) -> None:
    """Write the page that ``make`` returns; nothing without a path.

    Raises:
        ForetraceError: it cannot be written.
    """
    if path is None:
        return

    with working("Drawing"):
        page.write_page(make(provenance.Provenance(tuple(sources), shlex.join(["foretrace", *sys.argv[1:]]))), path)
