"""One file a family of operations; each registers what it knows when loaded.

Adding a family is adding a file here: ``load`` imports every module of this package.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

_loaded = False


def load() -> None:
    """Import every family once, so that it registers itself."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
