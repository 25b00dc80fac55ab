"""``write_page``: writes a page as one HTML file that needs no other file and no network.

A content security policy with the script's hash allows only the file's own script and what the script unpacks. So a
kernel's name, even a malicious one, cannot run or load anything.

Vega (vl-convert-python) draws plots, DataTables (itables) makes long tables sortable; neither is copied into this
project. Both are put into a page once, gzipped, and unpacked when the first plot or table becomes visible. The last
section lists the sources of every share of the time, and what the page was made from.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources, util

import jinja2
from markupsafe import Markup

from graph_predictor.figures import part_percent
from graph_predictor.prediction.result import Prediction
from step_views.pages.events import columns_element, data_element, packed_element
from step_views.pages.parts import (
    Cell,
    PageNotes,
    PagePlot,
    PageSection,
    PageTable,
    Part,
    ReportPage,
    TrackEvents,
    table,
    text_column,
)
from step_views.pages.parts import PageColumn as Column
from tracer.errors import ForetraceError
from tracer.job import Job
from tracer.kept_files import read_kept, write_kept
from tracer.lazy import vl_convert
from tracer.output_file import whole_file
from tracer.output_kind import PAGE, check_output
from tracer.versions import installed_version

_SCRIPTS = ("unpack.js", "tables.js", "plots.js", "timeline.js", "page.js")
ENGINE_BYTES = 128 << 30
"""Address space for vl-convert-python's JavaScript engine; version 1.9 reserves 67 GB."""
SHOWN_NOTES = 6
"""Number of notes that are shown; further notes are folded."""


def check_page(path: str, inputs: list[str]) -> None:
    """Refuse a page that cannot be written, before long work. Raises ``ForetraceError`` if a package is missing or the
    path holds another kind of file."""
    check_installed()
    check_output(path, inputs, PAGE)


def write_page(page: ReportPage, path: str | os.PathLike[str]) -> None:
    """Write a page whole or not at all. Raises ``ForetraceError`` if the file cannot be written."""
    text = render(page)
    with whole_file(path) as stream:
        stream.write(text.encode())


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the templates of pages, compiled once."""
    return jinja2.Environment(loader=jinja2.PackageLoader("step_views.pages"), autoescape=True,
                              undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(page: ReportPage) -> str:
    """Return a page's HTML."""
    sections = [section for section in page.sections if section.parts]
    script = "\n".join(own_text(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _environment().get_template("page.html.jinja").render(
        page=page, sections=sections, style=Markup(own_text("page.css")), script=Markup(script), digest=digest,
        data=list(_data(sections)), shown_notes=SHOWN_NOTES, plot_script=plot_script)


def _data(sections: list[PageSection]) -> Iterator[Markup]:
    """Yield the elements with a page's data and with the libraries that its parts need."""
    plots = tables = False
    for part in (part for section in sections for part in section.parts):
        if isinstance(part, TrackEvents):
            yield columns_element(f"data-{part.key}", part.columns)
        if isinstance(part, PagePlot):
            plots = True
            yield data_element(f"data-{part.key}", {**part.spec, "description": f"{part.caption}. {part.description}"})
        long = part if isinstance(part, PageTable) else part.table if isinstance(part, PagePlot) else None
        if long is not None and not long.static:
            tables = True
            yield data_element(f"data-{long.key}", long.data())
    if tables:
        yield packed_element("library-tables", table_script(), "module")
    if plots and (vega := plot_script()) is not None:
        yield packed_element("library-plots", vega, "module")


def notes_part(notes: list[str]) -> list[PageNotes]:
    """Return the distinct notes as a part; an empty list without notes."""
    found = list(dict.fromkeys(notes))
    return [PageNotes(found)] if found else []


_NEEDED = {"jinja2": "Jinja2", "vl_convert": "vl-convert-python", "itables": "itables"}


def check_installed() -> None:
    """Raise ``ForetraceError`` if a package for pages is missing, before any long work."""
    missing = [name for module, name in _NEEDED.items() if util.find_spec(module) is None]
    if missing:
        raise ForetraceError(f"HTML reports need {' and '.join(missing)}; install what is missing with: pip install "
                             "'foretrace[report]'.")


def _limited_addresses() -> bool:
    try:
        import resource  # not on Windows
    except ImportError:
        return False
    return 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < ENGINE_BYTES


@functools.cache
def plot_script() -> bytes | None:
    """Return Vega, Vega-Lite and Vega-Embed as one module, which sets them on ``window``. The module is kept on disk,
    because making it takes seconds. A limit on address space (``ulimit -v``) would kill its engine: then ``None`` if
    none is kept."""
    name = f"vega-{installed_version('vl-convert-python')}.js"
    script = read_kept(name)
    if script is None and not _limited_addresses():
        # Without a snippet the bundle sets vegaEmbed on window; the stub requires the argument.
        script = str(vl_convert.javascript_bundle(None)).encode()  # type: ignore[arg-type]
        write_kept(name, script)
    return script


@functools.cache
def table_script() -> bytes:
    """Return DataTables with jQuery as one module, whose default is DataTables."""
    return resources.files("itables").joinpath("html").joinpath("dt_bundle.js").read_bytes()


def own_text(name: str) -> str:
    """Return a style sheet or script of this package."""
    return resources.files("step_views.pages").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


_PACKAGES = ("foretrace", "numpy", "numba", "vl-convert-python", "itables")
MOST_FILES = 64  # rows; chosen


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a page: sources as the user named them, and the command."""

    sources: tuple[str, ...]
    command: str

    @property
    def title(self) -> str:
        """Title of the page: the last names of the sources."""
        names = [source.rstrip("/").rpartition("/")[2] or source for source in self.sources[:3]]
        return ", ".join(names) + (" …" if len(self.sources) > 3 else "")


def provenance_section(where: Provenance, job: Job | None = None, result: Prediction | None = None,
                       more: Sequence[Part] = ()) -> PageSection:
    """Return the section on sources of times and on the page's origin."""
    parts: list[Part] = []
    if result is not None:
        for key, caption, shares in (
                ("sources", "Where the step's time comes from: all its host and device time, the surest first",
                 result.sources),
                ("kernel-sources", "Where the device's time comes from", result.kernel_sources)):
            parts.append(table(key, caption, [text_column("source"), Column("share")],
                               ([name, Cell(part_percent(share), share, share)] for name, share in shares.items())))
    parts += more
    if job is not None:
        graphs = job.graphs[:MOST_FILES]
        parts.append(table(
            "files", "Traces" if len(graphs) == len(job.graphs) else f"Traces, the first {MOST_FILES:,}",
            [Column("rank"), text_column("file", path=True), text_column("format"), text_column("device"),
             text_column("PyTorch")],
            ([str(g.meta.rank) if g.meta.rank >= 0 else "–", g.meta.source or "–", g.meta.era or "–",
              g.meta.device or "not named", g.meta.torch_version or "not named"] for g in graphs)))
    rows = [["command", where.command], *([name, installed_version(name) or "not installed"] for name in _PACKAGES),
            ["Python", platform.python_version()]]
    parts.append(table("made", "Made by", [text_column("what"), text_column("")], rows))
    return PageSection("provenance", "Provenance", parts)


def sentence(text: str) -> str:
    """Return a headline as a sentence."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
