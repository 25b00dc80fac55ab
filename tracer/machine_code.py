"""Inner loops as stored machine code: processes that use them do not even import numba.

Importing numba and preparing it takes half a second, and compiling a loop up to five seconds: more than the work of
most commands. A loop is given as a function over arrays and numbers, with the type of each. It is translated in steps::

    source --numba, at each release--> LLVM's bitcode, in SHIPPED next to the module.
    Bitcode --llvmlite, once after installation, 0.1 s a loop--> machine code, kept.
    Machine code --llvmlite, in each process, 0.01 s--> called.

Machine code is stored where no other user can write (``tracer.kept_files``). Without such a place each process makes it
again. If the shipped bitcode is unusable, numba compiles the source, once. Bitcode is unusable for another source or
another system than 64-bit x86 Linux, from a newer LLVM, or if its file is easier to change than its module.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import zlib
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any, get_args, get_type_hints

import numpy as np

from tracer.kept_files import read_kept, read_shipped, write_kept
from tracer.lazy import llvm, llvmlite, numba

VERSION = 1
"""Version of the format of stored machine code."""
ENTRY = "foretrace_loop"
"""Name of the entry point in stored machine code."""
SHIPPED = "shipped"
"""Folder next to a module with the bitcode of its loops, which ``ci/ship_loops.py`` writes."""
_LOADING = threading.RLock()
"""Held while machine code is loaded, so that the entry point in use belongs to the code in memory."""
_NOTHING = ctypes.c_char * 0


def columns(record: type, source: object) -> tuple[np.ndarray, ...]:
    """Return the arrays of a record as contiguous arrays of the annotated types."""
    return tuple(np.ascontiguousarray(getattr(source, name), dtype) for name, dtype in _dtypes(record).items())


@lru_cache
def _dtypes(record: type) -> dict[str, np.dtype[Any]]:
    """Return the annotated type of each of a record's arrays."""
    last = {name: get_args(of)[-1] for name, of in get_type_hints(record).items()}
    # NumPy's NDArray[int64] is ndarray[shape, dtype[int64]], or from NumPy 2.5 on an alias of its own with int64 alone.
    return {name: np.dtype(next(iter(get_args(of)), of)) for name, of in last.items()}


class KeptLoop:
    """A function over arrays and numbers as machine code; it is called like the function.

    Args:
        function: Takes arguments of ``types``, by position, and returns an int64. It allocates nothing and raises
            nothing: its working memory is an argument.
        types: Type of each argument: ``"int64[:]"`` or ``"int8[:,:]"`` for C-contiguous arrays, ``"float64"`` for
            numbers. A class means a record: one-dimensional arrays with the names and types of its annotations. A
            record is passed as an object with these attributes, or as ``columns`` of it.
        inner: Functions that it calls; a function precedes those that call it.
        apart: Arrays that one of ``inner`` writes do not overlap its other arguments (an array may be passed twice for
            different rows). It may then work on several numbers of a row at once.
    """

    def __init__(self, function: Callable[..., Any], types: Sequence[str | type],
                 inner: Sequence[Callable[..., Any]] = (), apart: bool = False) -> None:
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self.function, self.inner, self.apart = function, tuple(inner), apart
        self._records = [{} if isinstance(given, str) else _dtypes(given) for given in types]
        self.types = tuple(kind for given, record in zip(types, self._records, strict=True) for kind in (
            [f"{dtype}[:]".replace("bool[", "boolean[") for dtype in record.values()] or [str(given)]))
        dtypes = [np.dtype(kind.partition("[")[0].replace("boolean", "bool")) for kind in self.types]
        self._arrays = [(at, dtypes[at], kind.count(":")) for at, kind in enumerate(self.types) if "[" in kind]

    def __call__(self, *arguments: Any) -> int:
        """Run the loop. Arrays that store a single value once (``np.broadcast_to``) are passed as copies.

        Raises:
            TypeError: an argument's type is not the one in ``types``.
        """
        if len(arguments) != len(self._records):
            raise TypeError(f"{self.__name__} takes {len(self._records)} arguments, not {len(arguments)}.")
        given: list[Any] = []  # must live until the loop ends
        for argument, record in zip(arguments, self._records, strict=True):
            given += argument if isinstance(argument, tuple) else [getattr(argument, name)
                                                                   for name in record] or [argument]
        passed, shapes = list(given), []
        for at, dtype, dimensions in self._arrays:
            array = given[at]
            if array.ndim and not array.flags.writeable and array.strides == (0,) * array.ndim:
                array = given[at] = array.copy()  # a column that stores a single value once
            if array.dtype != dtype or array.ndim != dimensions or not array.flags.c_contiguous:
                raise TypeError(f"{self.__name__}: argument {at} is {array.dtype}[{array.ndim}], not "
                                f"{self.types[at]}, or has gaps.")
            passed[at] = _address(array)
            shapes += array.shape
        sizes = np.array(shapes, np.int64)  # named, so that it lives as long: other threads run meanwhile
        return int(self._entry(_address(sizes), *passed))

    def load(self) -> None:
        """Load the machine code before processes are forked, so that they need not load it."""
        _ = self._entry

    @cached_property
    def _entry(self) -> Callable[..., int]:
        """Return the loop's entry point, loaded or compiled once, even if several threads request it."""
        with _LOADING:
            if "_entry" not in self.__dict__:
                self.__dict__["_entry"] = self._made()
        return self.__dict__["_entry"]  # type: ignore[no-any-return]

    def _made(self) -> Callable[..., int]:
        """Load or compile the entry point."""
        name = f"{self.function.__module__}.{self.__name__}-{self._key_of(*_surroundings())}.o"
        code = read_kept(name)
        if code is None:
            code = self._compiled()
            write_kept(name, code)
        self._engine, address = _loaded(code)
        return self._signature()(address)  # type: ignore[no-any-return]

    def _signature(self) -> Any:
        numbers: dict[str, Any] = {"int64": ctypes.c_int64, "float64": ctypes.c_double}
        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *(
            ctypes.c_void_p if "[" in kind else numbers[kind] for kind in self.types))

    @property
    def _module(self) -> Path:
        return Path(sys.modules[self.function.__module__].__file__ or ".")

    def _key_of(self, *surroundings: str) -> str:
        """Return the key of machine code: a digest of its source, of functions it calls, and of its surroundings."""
        modules = dict.fromkeys(each.__module__ for each in (self.function, *self.inner))
        source = b"".join(Path(sys.modules[name].__file__ or "").read_bytes() for name in modules)
        names = [name for record in self._records for name in record]
        parts = (str(VERSION), *self.types, *names, *surroundings)
        return hashlib.sha256(source + "\0".join(parts).encode()).hexdigest()[:24]

    @property
    def shipped(self) -> Path:
        """Return the path of the bitcode shipped for this source and kind of system."""
        return self._module.parent / SHIPPED / f"{self.__name__}-{self._key_of(llvm.get_process_triple())}.bc.z"

    def ship(self) -> Path:
        """Compile the loop with numba, and write the bitcode to ship."""
        self.shipped.parent.mkdir(exist_ok=True)
        self.shipped.write_bytes(zlib.compress(llvm.parse_assembly(self._assembly()).as_bitcode(), 9))
        return self.shipped

    def _compiled(self) -> bytes:
        """Make the loop's machine code, as an object file with the entry ``ENTRY``."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="default",
            codemodel="jitdefault", jit=True)
        try:
            module = llvm.parse_bitcode(zlib.decompress(read_shipped(self.shipped, self._module)))
        except (OSError, zlib.error, RuntimeError):  # missing, unreadable, or of a newer LLVM
            module = llvm.parse_assembly(self._assembly())
        return bytes(machine.emit_object(module))

    def _assembly(self) -> str:
        """Compile the loop with numba, and return its LLVM text with the entry ``ENTRY``."""
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"Compiling {self.__name__} ...\n")
        scope = {name: value for one in (*self.inner, self.function) for name, value in one.__globals__.items()}
        # Nothing is allocated: counting references to arrays would take longer than loops over records.
        for one in self.inner:
            compiled = numba.njit(_nrt=False)(FunctionType(one.__code__, scope, one.__name__))
            scope[one.__name__] = _apart(compiled) if self.apart else compiled
        function = numba.njit(_nrt=False)(FunctionType(self.function.__code__, scope, self.__name__))
        entry = numba.cfunc(self._numba_types(numba.types))(self._over_pointers(function, numba.carray))
        return str(entry.inspect_llvm()).replace(entry.native_name, ENTRY)

    def _numba_types(self, types: Any) -> Any:
        return types.int64(types.CPointer(types.int64), *(
            types.CPointer(getattr(types, kind.partition("[")[0])) if "[" in kind else getattr(types, kind)
            for kind in self.types))

    def _over_pointers(self, function: Any, carray: Any) -> Callable[..., Any]:
        """Return the function over numbers and pointers to arrays, with the arrays' sizes before them."""
        taken, given, handed = 0, [], []
        for at, kind in enumerate(self.types):
            given.append(f"a{at}")
            dimensions = kind.count(":")
            shape = "".join(f"sizes[{taken + i}], " for i in range(dimensions))
            taken += dimensions
            handed.append(f"carray(a{at}, ({shape}))" if dimensions else f"a{at}")
        scope: dict[str, Any] = {"carray": carray, "function": function}
        for at, record in enumerate(self._records):  # earlier arguments are already single ones
            if record:
                scope[f"record{at}"] = namedtuple(f"record{at}", list(record))  # type: ignore[misc]
                handed[at:at + len(record)] = [f"record{at}({', '.join(handed[at:at + len(record)])})"]
        exec(f"def entry(sizes, {', '.join(given)}):\n    return function({', '.join(handed)})", scope)
        return scope["entry"]  # type: ignore[no-any-return]


def kept_loop(*types: str | type, inner: Sequence[Callable[..., Any]] = (),
              apart: bool = False) -> Callable[[Callable[..., Any]], KeptLoop]:
    """Decorate a function whose machine code is stored, see ``KeptLoop``."""
    return lambda function: KeptLoop(function, types, inner, apart)


def _address(array: np.ndarray) -> int:
    """Return the address of an array's first element, by its buffer: five times as fast as NumPy's own way."""
    try:
        return ctypes.addressof(_NOTHING.from_buffer(array))  # type: ignore[arg-type]
    except TypeError:  # read-only
        return int(array.__array_interface__["data"][0])


def _apart(dispatcher: Any) -> Any:
    """Let numba assume that a function's arrays do not overlap, so that it may work on several numbers at once. Numba
    has the flag but no option for it; without the flag the function gives the same result more slowly."""
    def customized(flags: Any) -> Any:
        flags.noalias = True
        return flags

    dispatcher._compiler._customize_flags = customized
    return dispatcher


@lru_cache(maxsize=1)
def _surroundings() -> tuple[str, ...]:
    # Machine code uses nothing of Python, numpy or numba: their versions do not matter.
    return (llvmlite.__version__, llvm.get_process_triple(), llvm.get_host_cpu_name(),
            llvm.get_host_cpu_features().flatten())


def _loaded(code: bytes) -> tuple[Any, int]:
    """Load machine code; return the object that keeps it in memory, and the address of its entry."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine, int(engine.get_function_address(ENTRY))
