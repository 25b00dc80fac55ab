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
    if _limited_addresses():
        raise ForetraceError("HTML reports cannot be made under a limit on address space (ulimit -v): the JavaScript "
                             "engine in vl-convert-python reserves more and would be killed. Lift the limit for this "
                             "command: ulimit -v unlimited.")


def _limited_addresses() -> bool:
    try:
        import resource
    except ImportError:  # not on Windows
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


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
