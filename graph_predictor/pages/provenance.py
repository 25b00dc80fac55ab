"""The provenance section: where every share of the time comes from, and what the page was made of, with and on."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from graph_predictor.figures import part_percent
from graph_predictor.pages.parts import Cell, PageSection, Part, table, text_column
from graph_predictor.pages.parts import PageColumn as Column
from graph_predictor.prediction.result import Prediction
from tracer.job import Job

_PACKAGES = ("foretrace", "numpy", "numba", "vl-convert-python", "itables")
MOST_FILES = 64


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a page was made of: the sources as they were named, and the command."""

    sources: tuple[str, ...]
    command: str

    @property
    def title(self) -> str:
        """Return the sources' last names: what a page is called."""
        names = [source.rstrip("/").rpartition("/")[2] or source for source in self.sources[:3]]
        return ", ".join(names) + (" …" if len(self.sources) > 3 else "")


def provenance_section(where: Provenance, job: Job | None = None, result: Prediction | None = None,
                       more: Sequence[Part] = ()) -> PageSection:
    """Return the section.

    Args:
        where: how the page was made.
        job: what was read, if it was traces.
        result: a prediction, with the sources of its times.
        more: further parts.
    """
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
    rows = [["command", where.command], *([name, _version(name)] for name in _PACKAGES),
            ["Python", platform.python_version()]]
    parts.append(table("made", "Made by", [text_column("what"), text_column("")], rows))
    return PageSection("provenance", "Provenance", parts)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def sentence(text: str) -> str:
    """Return a headline as a sentence."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
