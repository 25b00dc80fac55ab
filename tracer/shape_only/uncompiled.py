"""``without_compiler``: traces without PyTorch's compiler, whose import takes the time of PyTorch's own.

Nothing is compiled in a trace by shapes, yet PyTorch imports its compiler for two requests. An optimizer's step marks
where a compiled graph would break, and functions that the compiler must not look into are wrapped when they are first
called. A module replaces the compiler and answers these two. It has the compiler's settings, and its names of a
tensor's source, which fake tensors need. Any other request imports the compiler itself::

    import torch._dynamo ──▶ Uncompiled ──graph_break, disable, config, source──▶ answered
                                 └─────────────────anything else────────────────▶ the compiler, imported

Its answers call as many Python functions as the compiler's own would. A program's calls are counted
(``tracer.python_calls``), so the count must not depend on whether the compiler is imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

NAME, SETTINGS, SOURCES = "torch._dynamo", "torch._dynamo.config", "torch._dynamo.source"
_FOLDER = Path(torch.__file__).parent / "_dynamo"
_DISABLED = "__dynamo_disable"
"""The attribute in which PyTorch stores the result of ``disable`` for a function."""


class Uncompiled(ModuleType):
    """Replaces ``torch._dynamo`` until something is requested that it does not answer."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__file__ = str(_FOLDER / "__init__.py")  # code that asks all modules for their file does not mean this one
        self.__path__: list[str] = []  # a package, whose modules are found by ``_Finder``
        self.config, self._settings = _settings()
        self.source = _Sources(SOURCES)
        self.graph_break = graph_break
        self._finder = _Finder(self)
        self._disabled: list[Any] = []

    def disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, **options: Any) -> Any:
        """Return a function that no compiler looks into, as ``torch._dynamo.disable`` does. PyTorch calls it without
        ``wrapping``, once for each function; all other calls (perhaps in a step) go to the compiler itself."""
        if wrapping or not recursive or not isinstance(fn, FunctionType):
            return self.make_way().disable(fn, recursive, wrapping=wrapping, **options)
        self._disabled.append(fn)
        return _uncompiled(fn)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.make_way(), name)

    def stand(self) -> None:
        """Replace the compiler."""
        sys.modules[NAME] = torch._dynamo = self  # type: ignore[assignment]
        sys.modules[SETTINGS], sys.modules[SOURCES] = self.config, self.source
        sys.meta_path.insert(0, self._finder)

    def leave(self) -> None:
        """Undo the replacement. If the compiler's settings were changed, the compiler gets them."""
        if sys.modules.get(NAME) is not self:
            return
        if self.config.save_config() != self._settings:
            self.make_way()
            return
        self._step_aside()
        del sys.modules[SETTINGS], torch._dynamo
        for fn in self._disabled:
            vars(fn).pop(_DISABLED, None)

    def make_way(self) -> Any:
        """Import the compiler with the settings that were changed so far, and return it."""
        if sys.modules.get(NAME) is not self:
            return sys.modules[NAME]
        self._step_aside()
        spec = find_spec(NAME)
        assert spec is not None and spec.loader is not None
        compiler: Any = module_from_spec(spec)
        sys.modules[NAME] = torch._dynamo = compiler
        compiler.config = self.config
        spec.loader.exec_module(compiler)
        for fn in self._disabled:
            setattr(fn, _DISABLED, compiler.disable(fn, wrapping=False))
        return compiler

    def _step_aside(self) -> None:
        sys.meta_path.remove(self._finder)  # type: ignore[arg-type]
        del sys.modules[NAME], sys.modules[SOURCES]


class _Sources(ModuleType):
    """Replaces ``torch._dynamo.source``: an empty class for each kind of source of a tensor. A compiler uses them to
    check that a tensor is still the one it compiled for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (_Unknown,), {})
        setattr(self, name, found)
        return found


class _Unknown(torch._guards.Source):
    def __init__(self, *_: object, **__: object) -> None:
        pass


class _Finder:
    """Finds modules of the compiler by importing the compiler."""

    def __init__(self, standing: Uncompiled) -> None:
        self._standing = standing

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}."):
            return None
        self._standing.make_way()
        return ModuleSpec(name, _Imported()) if name in sys.modules else None  # type: ignore[arg-type]


class _Imported:
    """Loads a module that was imported together with another one."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has run."""


class UncompiledFakeMode(FakeTensorMode):
    """PyTorch's mode of fake tensors without the compiler's wrapper around the call of every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = getattr(FakeTensorMode.__torch_dispatch__, "__wrapped__", FakeTensorMode.__torch_dispatch__)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep PyTorch from importing its compiler in the block, unless it is imported already or something is compiled."""
    if NAME in sys.modules:
        yield
        return
    standing = Uncompiled()
    standing.stand()
    try:
        yield
    finally:
        standing.leave()


def first_operation() -> None:
    """Run an operation as a trace does: PyTorch's imports at the first one take longer than a small trace."""
    with without_compiler(), UncompiledFakeMode():
        torch.empty(1).uniform_()


def compiler_imported() -> bool:
    """Return whether the compiler itself is imported, so that something may have been compiled."""
    return not isinstance(sys.modules.get(NAME), Uncompiled | None)


@functools.lru_cache(maxsize=1)
def _settings() -> tuple[Any, bytes]:
    """Import only the compiler's settings; return the module, and its values before any change."""
    spec = spec_from_file_location(SETTINGS, _FOLDER / "config.py")
    assert spec is not None and spec.loader is not None
    found: Any = module_from_spec(spec)
    sys.modules[SETTINGS] = found  # it looks itself up there
    spec.loader.exec_module(found)
    return found, found.save_config()


NOTE = ("The program compiles parts of itself (torch.compile), which a trace by shapes does not: it has the operations "
        "that these parts run without a compiler.")
_PLAIN = "eager"
"""The backend that runs the program's own operations; PyTorch's own functions request it."""


class PatchedSite(Protocol):
    """The part of ``substitutions.operators.Site`` that other modules need to patch torch during a trace."""

    def note(self, text: str) -> None:
        """Note a sentence once."""

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until the trace ends."""


def compilers(site: PatchedSite) -> None:
    """Let ``torch.compile`` and ``Module.compile`` return their argument. Compiled code reads and writes memory, which
    a fake tensor does not have, and a compiler would look into the trace's own modes."""
    original = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if options.get("backend") == _PLAIN:
            return original(model, **options)
        if model is None:  # as a decorator with arguments
            return lambda function: compiled(function, **options)
        site.note(NOTE)
        return model

    site.patch(torch, "compile", compiled)
    site.patch(torch.nn.Module, "compile", lambda *_, **__: site.note(NOTE))


# Each function below replaces one of torch/_dynamo, and is counted as the program's.


def graph_break(msg: str = "") -> None:
    """Do nothing, in place of ``torch._dynamo.graph_break``: nothing is compiled."""


def _uncompiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    def disabled(*args: Any, **kwargs: Any) -> Any:
        _callback_from_stance(None)
        return fn(*args, **kwargs)

    return disabled


def _callback_from_stance(callback: None) -> None:
    return callback


def shardings_are_not_kept() -> bool:
    """Replace ``_are_we_tracing`` of torch/distributed, which DTensor calls, so that it ignores fake tensors. With them
    it takes a step for a compiled one and computes shardings of list operations again; a running step looks them up."""
    return get_proxy_mode() is not None
