"""The libraries that draw plots and tables, as installed Python packages bring them: none is copied into this project.

Vega (vl-convert-python) draws plots, DataTables (itables) makes long tables sortable. Both are put into a page once,
gzipped, and unpacked when the first plot or table comes into view.
"""

from __future__ import annotations

import functools
from importlib import resources, util

from tracer.errors import ForetraceError

_NEEDED = {"jinja2": "Jinja2", "vl_convert": "vl-convert-python", "itables": "itables"}


def check_installed() -> None:
    """Raise ``ForetraceError`` where a package that pages are made with is missing, before any long work."""
    missing = [name for module, name in _NEEDED.items() if util.find_spec(module) is None]
    if missing:
        raise ForetraceError(f"HTML reports need {' and '.join(missing)}; install what is missing with: pip install "
                             "'foretrace[report]'.")


@functools.cache
def plot_script() -> bytes:
    """Return Vega, Vega-Lite and Vega-Embed as one module, which leaves them on ``window``."""
    import vl_convert

    # Without a snippet the bundle leaves vegaEmbed on window; the stub does not know that it may be left out.
    return str(vl_convert.javascript_bundle(None)).encode()  # type: ignore[arg-type]


@functools.cache
def table_script() -> bytes:
    """Return DataTables with jQuery as one module, whose default is DataTables."""
    return resources.files("itables").joinpath("html").joinpath("dt_bundle.js").read_bytes()


def own_text(name: str) -> str:
    """Return a style sheet or script of this package."""
    return resources.files("graph_predictor.pages").joinpath("assets").joinpath(name).read_text(encoding="utf-8")
