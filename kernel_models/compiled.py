"""Compiling inner loops with numba, and where the machine code is kept: beside the module, at home, or in private."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from tracer.kept_files import private_folder

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*, nogil: bool = False) -> Callable[[Function], Function]:
    """Compile a function, and keep the machine code for the next process wherever something can be written.

    numba keeps it beside the module or in the user's cache. A read-only installation without a home that can be
    written (usual in containers) has neither: then a folder of this user's own in the temporary directory is taken,
    and where there is none of that either every process compiles anew, for some seconds.
    """
    def decorate(function: Function) -> Function:
        found: Any = numba.njit(nogil=nogil)(function)
        for folder in (None, private_folder):
            if _caches(found, folder):
                # The cache may become full or unwritable later; what was compiled is as good without it.
                found._cache = _Lenient(found._cache)
                break
        return found  # type: ignore[no-any-return]

    return decorate


def _caches(function: Any, folder: Callable[[], str | None] | None) -> bool:
    """Try to keep a function's machine code in numba's own places or, if one is named, below a folder."""
    path = folder() if folder is not None else None
    if folder is not None and path is None:
        return False
    before = numba.config.CACHE_DIR
    try:
        if path is not None:
            numba.config.CACHE_DIR = path  # only while the cache's place is chosen
        function.enable_caching()
    except (RuntimeError, OSError):  # "no locator available"
        return False
    finally:
        numba.config.CACHE_DIR = before
    return True


class _Lenient:
    """numba's cache of a function, whose failures to read or write do not end what it only speeds up."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled function, or ``None``."""
        try:
            return self._cache.load_overload(signature, target)
        except Exception:  # a damaged cache is as good as none, and its pickles raise anything
            return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compiled function."""
        try:
            self._cache.save_overload(signature, result)
        except Exception:  # as above: the index that is there is read first
            return
