"""``DeviceProfile``: the fitted models of one device in one file, with their sources and their errors.

The file is a zip: ``profile.json`` first (device, provenance, and for each model its kind, its errors and plain
values), then each model's arrays as ``.npy``. It is read with ``allow_pickle=False`` and runs no code. The zip comment
carries the format's version and a checksum of every byte before it; a damaged or newer file is refused.
"""

from __future__ import annotations

import io
import math
import os
import re
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kernel_models.device import DeviceSpec, device
from kernel_models.host.overheads import HostOverheads
from kernel_models.op_call import Arrays, Family, KernelModel
from tracer.errors import ForetraceError, GraphFileError, reason_of
from tracer.input_file import DecodeError, convert, from_json
from tracer.shape_only.devices import device_names
from tracer.store.container import read_file, write_file

_KINDS = "biuf"
_MOST_HEADER = 4096  # chosen: bytes of an array's header; real headers have some 100


def array_from(data: bytes) -> npt.NDArray[Any]:
    """Return the array stored in a member's bytes; nothing larger than the bytes is allocated.

    Raises:
        ValueError: the header cannot be read, claims a size other than the bytes', or elements that are no numbers.
    """
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"an array is of the unknown format {version}")
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():  # about headers of Python 2, which only damage can produce here
            warnings.simplefilter("ignore", UserWarning)
            shape, fortran, kind = read(stream, max_header_size=_MOST_HEADER)
    except (SyntaxError, tokenize.TokenError, RecursionError, MemoryError, TypeError, LookupError,
            AttributeError) as error:
        raise ValueError(f"the header of an array is damaged ({type(error).__name__})") from None
    body = data[stream.tell():]
    if kind.kind not in _KINDS or kind.hasobject or kind.itemsize == 0:
        raise ValueError("an array holds no numbers")
    if any(size < 0 for size in shape) or len(shape) > 8 or math.prod(shape) * kind.itemsize != len(body):
        raise ValueError("an array is not as large as its header says")
    found = np.frombuffer(body, kind).reshape(shape, order="F" if fortran else "C").copy()
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError("an array holds numbers that are none")
    return found


VERSION = 2
"""Version of the file format. Raise it when an older reader would misread a new file."""
ENDING = ".profile"
"""File ending of the profiles that come with foretrace."""
MANIFEST = "profile.json"
_COMMENT = re.compile(rb"foretrace-profile (\d+) crc32 ([0-9a-f]{8})\Z")
_CHECKSUM_BYTES = 8  # 32 bits in hexadecimal
_COMMENT_BYTES = 64  # more than the longest comment
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)  # the same models give the same bytes
_FREE_BYTES, _MOST_EXPANSION = 64 << 20, 50
"""Most bytes that all members may unpack to: the larger of the first and the second times the file's size."""

LOADERS: dict[str, tuple[str, str]] = {
    "boosted": ("kernel_models.learned.boosted", "BoostedModel"),
    "gaussian": ("kernel_models.learned.gaussian", "GaussianModel"),
    "roofline": ("kernel_models.heuristics.roofline", "RooflineModel"),
}
"""Model kinds that a profile can hold: module and class whose ``from_state`` makes the model. Add new kinds here."""
ON_DEVICE = frozenset({"gaussian", "roofline"})
"""Kinds that price by the device's figures: their ``from_state`` takes the profile's device too."""


class ProfileError(ForetraceError):
    """A device profile cannot be read or written."""


@dataclass(frozen=True)
class ProfileEntry:
    """One model of a profile.

    Attributes:
        kind: Its kind in ``LOADERS``.
        model: The model.
        software: Library and version whose kernels the model prices.
        rows: Number of distinct calls in the fit.
        facts: Its choice and its errors: "data", "split", "candidates", "held_out" and "cross_validation" errors, ….
    """

    kind: str
    model: KernelModel
    software: str = ""
    rows: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceProfile:
    """All fitted models of a device.

    Attributes:
        device: The device to which the models were fitted.
        entries: Models; within a family the preferred one is first.
        provenance: Date, versions of the fitting software, data, "clock_mhz" of the GPU during the measurements.
        host: Overheads of the device's host, if measured.
    """

    device: DeviceSpec
    entries: Sequence[ProfileEntry] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    host: HostOverheads | None = None

    def models_of(self, family: Family) -> Sequence[KernelModel]:
        """Return the models of a family, the preferred one first."""
        return [entry.model for entry in self.entries if entry.model.family is family]

    def entries_of(self, family: Family) -> Sequence[ProfileEntry]:
        """Return the models of a family with their provenance."""
        return [entry for entry in self.entries if entry.model.family is family]

    @property
    def families(self) -> list[Family]:
        """Return the families that have a model, sorted by name."""
        return sorted({entry.model.family for entry in self.entries}, key=lambda family: family.value)

    def with_software(self, *wanted: str) -> DeviceProfile:
        """Return the profile with models first whose software begins with one of ``wanted``, in that order."""
        def rank(entry: ProfileEntry) -> int:
            return next((i for i, name in enumerate(wanted) if entry.software.startswith(name)), len(wanted))

        return replace(self, entries=sorted(self.entries, key=rank))


def unused_error(profiles: Iterable[DeviceProfile], devices: Iterable[str]) -> ProfileError:
    """Return the error for profiles that price nothing because they belong to other devices than the requested ones."""
    of = " and ".join(dict.fromkeys(profile.device.name for profile in profiles))
    asked = ", ".join(dict.fromkeys(devices)) or "a device that nothing names"
    return ProfileError(f"--profile is of {of}, but what is priced is {asked}: nothing would use it; name the "
                        "profile's own device (by its TOML file where it is your own), or leave --profile out.")


def save_profile(profile: DeviceProfile, path: str | os.PathLike[str]) -> None:
    """Write a profile atomically: readers see the old file or the new one, never a part.

    Raises:
        ProfileError: it cannot be written.
    """
    try:
        write_file(path, to_bytes(profile))
    except GraphFileError as error:
        raise ProfileError(str(error)) from None


def load_profile(path: str | os.PathLike[str]) -> DeviceProfile:
    """Read a profile.

    Raises:
        ProfileError: it cannot be read, is damaged, or of a newer version.
    """
    name = os.fspath(path)
    if "://" not in name and os.path.isdir(name):
        raise ProfileError(f"{name} is a directory; name a profile in it.")
    try:
        data = read_file(path)
    except GraphFileError as error:
        raise ProfileError(str(error)) from None
    return from_bytes(data, name)


def to_bytes(profile: DeviceProfile) -> bytes:
    """Return a profile as the bytes of its file."""
    members: dict[str, Arrays] = {}
    manifest = {
        "device": profile.device.name, "provenance": profile.provenance,
        **({} if _is_known(profile.device) else {"spec": profile.device.to_json()}),
        **({} if profile.host is None else {"host": profile.host.to_json()}),
        "models": [{
            "kind": entry.kind, "software": entry.software, "rows": entry.rows, "facts": entry.facts,
            "state": _state(entry.model, f"{i}", members),
        } for i, entry in enumerate(profile.entries)],
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(_member(MANIFEST), msgspec.json.encode(manifest))
        for folder, arrays in members.items():
            for name, array in arrays.items():
                content = io.BytesIO()
                np.save(content, np.ascontiguousarray(array), allow_pickle=False)
                archive.writestr(_member(f"{folder}/{name}.npy"), content.getvalue())
        archive.comment = f"foretrace-profile {VERSION} crc32 ".encode() + b"0" * _CHECKSUM_BYTES
    body = stream.getvalue()[:-_CHECKSUM_BYTES]
    return body + f"{zlib.crc32(body):08x}".encode()


def _is_known(spec: DeviceSpec) -> bool:
    """Return whether a device's figures are those of its shipped file (else they were measured)."""
    return spec.name in device_names() and spec == device(spec.name)


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _FIXED_TIME)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _state(model: KernelModel, folder: str, members: dict[str, Arrays]) -> dict[str, Any]:
    values, arrays = model.state()
    members[folder] = arrays
    return {"values": values, "arrays": {name: f"{folder}/{name}.npy" for name in arrays}}


def from_bytes(data: bytes, label: str) -> DeviceProfile:
    """Return the profile stored in a file's bytes; ``label`` names the file in errors.

    Raises:
        ProfileError: as ``load_profile``.
    """
    comment = _COMMENT.search(data[-_COMMENT_BYTES:])
    if comment is None:
        why = "is empty" if not data else "is truncated or damaged" if MANIFEST.encode() in data[:64] else (
            "is no device profile")
        raise ProfileError(f"{label} {why}; give a file written by foretrace fit or calibrate.")
    if int(comment.group(1)) > VERSION:
        raise ProfileError(f"{label} is of format version {int(comment.group(1))}, newer than this foretrace reads (up "
                           f"to {VERSION}); update foretrace or fit the profile again.")
    if zlib.crc32(memoryview(data)[:-_CHECKSUM_BYTES]) != int(comment.group(2), 16):
        raise _corrupt(label, "its checksum does not match")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read(archive, label, len(data))
    except ProfileError:
        raise
    except DecodeError as error:
        raise _corrupt(label, str(error)) from None
    except ForetraceError as error:
        raise ProfileError(f"{label} cannot be used: {error}") from None
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, LookupError, TypeError, ValueError, ArithmeticError,
            NotImplementedError, RuntimeError, AttributeError, MemoryError) as error:
        raise _corrupt(label, reason_of(error)) from None


class _State(msgspec.Struct):
    values: dict[str, Any]
    arrays: dict[str, str]


class _Judged(msgspec.Struct):
    """Errors as ``scores.Errors`` gives them."""

    n: Annotated[int, msgspec.Meta(ge=0)] = 0
    mape: float | None = None
    median: float | None = None
    bias: float | None = None
    p90: float | None = None
    max: float | None = None


class _Facts(msgspec.Struct):
    """The part of a model's facts that commands print."""

    held_out: _Judged | None = None
    cross_validation: _Judged | None = None


class _Model(msgspec.Struct):
    kind: str
    software: str
    rows: Annotated[int, msgspec.Meta(ge=0)]
    facts: dict[str, Any]
    state: _State


class _Provenance(msgspec.Struct):
    """The part of a profile's provenance that commands print."""

    date: str = ""
    data: list[str] = []
    notes: list[str] = []
    clock_mhz: float | None = None


class _Manifest(msgspec.Struct):
    device: str
    provenance: dict[str, Any]
    models: list[_Model]
    spec: dict[str, Any] | None = None
    host: dict[str, Any] | None = None


def _read(archive: zipfile.ZipFile, label: str, file_bytes: int) -> DeviceProfile:
    members = archive.infolist()
    if sum(info.file_size for info in members) > max(_FREE_BYTES, _MOST_EXPANSION * file_bytes):
        raise _corrupt(label, "its members together are impossibly large")
    manifest = from_json(archive.read(MANIFEST), _Manifest)
    convert(manifest.provenance, _Provenance)
    spec = device(manifest.device) if manifest.spec is None else DeviceSpec.from_json(manifest.spec)

    def model(kind: str, state: _State) -> KernelModel:
        if kind not in LOADERS:
            raise ProfileError(f"{label} holds a model of kind {kind[:40]!r}, which this foretrace does not know; "
                               "update foretrace.")
        module, name = LOADERS[kind]
        loader: Callable[..., KernelModel] = getattr(import_module(module), name).from_state
        arrays = {key: array_from(archive.read(member)) for key, member in state.arrays.items()}
        return loader(state.values, arrays, spec) if kind in ON_DEVICE else loader(state.values, arrays)

    def entry(stored: _Model) -> ProfileEntry:
        convert(stored.facts, _Facts)
        return ProfileEntry(stored.kind, model(stored.kind, stored.state), stored.software, stored.rows,
                            stored.facts)

    return DeviceProfile(spec, [entry(stored) for stored in manifest.models], manifest.provenance,
                         None if manifest.host is None else HostOverheads.from_json(manifest.host))


def _corrupt(label: str, reason: str) -> ProfileError:
    return ProfileError(f"{label} is corrupt ({reason}); copy it again or fit it again.")
