"""The option ``--html`` of the commands that have it: a page of what they found."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from graph_predictor.cli.console import working
from graph_predictor.cli.options import shared

if TYPE_CHECKING:
    from graph_predictor.pages.parts import ReportPage
    from graph_predictor.pages.provenance import Provenance

Html = Annotated[str | None, shared("--html")]


def check_html(path: str | None, inputs: Sequence[str]) -> None:
    """Refuse a page that could not be written, before the long work. Raises ``ForetraceError``."""
    if path is not None:
        from graph_predictor.pages.scripts import check_installed

        check_installed()
        from graph_predictor.pages.page import check_page

        check_page(path, list(inputs))


def write_html(path: str | None, sources: Sequence[str], make: Callable[[Provenance], ReportPage]) -> None:
    """Write the page that ``make`` returns; nothing without a path.

    Raises:
        ForetraceError: it cannot be written.
    """
    if path is None:
        return
    from graph_predictor.pages.page import write_page
    from graph_predictor.pages.provenance import Provenance

    with working("Drawing"):
        write_page(make(Provenance(tuple(sources), shlex.join(["foretrace", *sys.argv[1:]]))), path)
