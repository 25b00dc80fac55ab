"""The device profile's file: what comes back, and what is refused.

Members of profiles that are arrays: what is claimed is compared with what is there before anything is allocated.
"""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learned_support import QUICK, gemm_samples

from kernel_models.device import device
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.learned.boosted import Intervals
from kernel_models.learned.fit import Problem
from kernel_models.op_call import Family
from kernel_models.pricing import price
from kernel_models.profile import (
    VERSION,
    DeviceProfile,
    ProfileEntry,
    ProfileError,
    array_from,
    from_bytes,
    load_profile,
    save_profile,
    to_bytes,
)

H200 = device("h200-sxm")
CALLS = gemm_samples(50, seed=4).calls


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    problem = Problem.of(gemm_samples(400), H200)
    predicted, done, _ = problem.out_of_fold(QUICK.scaled(0.2), folds=2)
    model = problem.model(QUICK.scaled(0.2), Intervals.of(predicted[done], problem.measured_us[done]))
    return DeviceProfile(H200, [
        ProfileEntry("boosted", model, "lib-1.0", 400, {"held_out": {"n": 3, "mape": 0.02}}),
        ProfileEntry("boosted", model, "lib-2.0"),
        ProfileEntry("roofline", RooflineModel(Family.NORM, H200), "lib-1.0", 20),
    ], {"date": "2026-01-02", "data": ["law"]})


def resealed(members: dict[str, bytes], version: int = VERSION) -> bytes:
    """A profile's bytes with a right checksum around any members."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.comment = f"foretrace-profile {version} crc32 ".encode() + b"0" * 8
    body = stream.getvalue()[:-8]
    return body + f"{zlib.crc32(body):08x}".encode()


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_profile_comes_back(profile: DeviceProfile, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "a.profile")
    again = load_profile(tmp_path / "a.profile")
    assert again.device is H200 and again.provenance == profile.provenance
    assert [(e.kind, e.software, e.rows, e.facts) for e in again.entries] == [
        (e.kind, e.software, e.rows, e.facts) for e in profile.entries]
    for family in (Family.GEMM, Family.NORM):
        assert len(again.models_of(family)) == len(profile.models_of(family)) > 0
    before, after = (price(CALLS, H200, one) for one in (profile, again))
    assert (before.time_us == after.time_us).all() and (before.low_us == after.low_us).all()
    assert again.models_of(Family.SORT) == [] and to_bytes(again) == to_bytes(profile)
    assert [path.name for path in tmp_path.iterdir()] == ["a.profile"]
    # A software may be preferred.
    assert [entry.software for entry in profile.entries_of(Family.GEMM)] == ["lib-1.0", "lib-2.0"]
    assert [entry.software for entry in profile.with_software("lib-2").entries_of(Family.GEMM)] == [
        "lib-2.0", "lib-1.0"]
    assert profile.families == [Family.GEMM, Family.NORM]


def test_any_changed_byte_is_refused(profile: DeviceProfile) -> None:
    data = to_bytes(profile)
    for at in [*range(0, len(data), max(1, len(data) // 60)), len(data) - 1, len(data) - 9]:
        broken = bytearray(data)
        broken[at] ^= 0x11
        with pytest.raises(ProfileError):
            from_bytes(bytes(broken), "broken")


def test_a_cut_or_newer_file_is_refused(profile: DeviceProfile) -> None:
    for cut in (0, 1, 100, -1, -100):
        with pytest.raises(ProfileError, match=r"x\.profile (is|cannot|holds)"):
            from_bytes(to_bytes(profile)[:cut], "x.profile")
    with pytest.raises(ProfileError, match="newer than this foretrace reads"):
        from_bytes(resealed(members(to_bytes(profile)), VERSION + 1), "x")


SPRUNG: list[int] = []


def _spring() -> None:
    SPRUNG.append(1)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return _spring, ()


def test_pickled_arrays_are_refused(profile: DeviceProfile) -> None:
    parts = members(to_bytes(profile))
    parts["0/values.npy"] = stored(np.array([Trap()], object), allow_pickle=True)
    with pytest.raises(ProfileError, match="corrupt"):
        from_bytes(resealed(parts), "x")
    assert not SPRUNG


@pytest.mark.parametrize(("change", "said"), [
    (lambda parts: parts.pop("0/words.npy"), "corrupt"),
    (lambda parts: {"profile.json": b"[]"}, "corrupt"),
    (lambda parts: {"profile.json": b"{}"}, "corrupt"),
    (lambda parts: {"0/limits.npy": parts["0/words.npy"]}, "corrupt"),
    (lambda parts: {"profile.json": parts["profile.json"].replace(b'"gemm"', b'"germ"')}, "corrupt"),
    (lambda parts: {"profile.json": parts["profile.json"].replace(b'"roofline"', b'"rooftop"')}, "rooftop"),
    (lambda parts: {"profile.json": parts["profile.json"].replace(b'"h200-sxm"', b'"h201-sxm"')}, "h201-sxm"),
])
def test_what_does_not_fit_together_is_refused(profile: DeviceProfile, change: Any, said: str) -> None:
    parts = members(to_bytes(profile))
    changed = change(parts)
    parts.update(changed if isinstance(changed, dict) else {})
    with pytest.raises(ProfileError, match=said):
        from_bytes(resealed(parts), "x")


def test_what_is_no_profile_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for path, why in ((tmp_path / "text", "is no device profile"), (tmp_path, "is a directory"),
                      (Path("/dev/zero"), "is a pipe or a device"),
                      (tmp_path / "none", "does not exist")):
        with pytest.raises(ProfileError, match=why):
            load_profile(path)


def test_an_old_file_stays_when_the_new_one_cannot_be_written(profile: DeviceProfile, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "a.profile")
    before = (tmp_path / "a.profile").read_bytes()
    bad = DeviceProfile(H200, profile.entries, {"date": object()})
    with pytest.raises(TypeError):
        save_profile(bad, tmp_path / "a.profile")
    assert (tmp_path / "a.profile").read_bytes() == before
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(profile, tmp_path / "none" / "a.profile")


def test_pricing_with_a_profile_imports_neither_torch_nor_pandas(profile: DeviceProfile, tmp_path: Path) -> None:
    save_profile(profile, tmp_path / "a.profile")
    code = ("import sys; from kernel_models.profile import load_profile; from kernel_models.pricing import price; "
            "from kernel_models.families.gemm import gemm; p = load_profile(sys.argv[1]); "
            "t = price(gemm(1, 128, 128, 128, 'bf16', 'nt'), p.device, p); "
            "print(t.source[0], [name for name in ('torch', 'pandas') if name in sys.modules])")
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.profile")], capture_output=True, text=True,
                         check=True)
    assert ran.stdout.strip() == "2 []"


def stored(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


def claiming(shape: tuple[int, ...], kind: str = "<f8") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
    return stream.getvalue() + bytes(64)


@pytest.mark.parametrize("array", [
    np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.zeros((0, 4), np.float32),
    np.array([1, 2], np.uint8), np.array(3.5)])
def test_arrays_come_back(array: np.ndarray) -> None:
    found = array_from(stored(array))
    assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
    assert found.flags.writeable


@pytest.mark.parametrize("data", [
    claiming((10**11,)), claiming((10**6, 10**6)), claiming((-1,)), claiming((7,)), claiming((1 << 62, 4)),
    claiming((2,), "|O"), claiming((1,), "<U16"), claiming((4,), "|V16"), b"", b"\x93NUMPY\x01\x00\xff\xff{'descr'",
    b"\x93NUMPY\x01\x00" + (4000).to_bytes(2, "little") + b"(" * 4000, stored(np.array([1.0, np.nan])),
    stored(np.array([np.inf])), stored(np.arange(9))[:-3],
    b"\x93NUMPY\x01\x00" + (52).to_bytes(2, "little") + b"{'descr': '<f8', 'fortran_order': False, 'shape': ('''  "])
def test_headers_and_bytes_that_do_not_fit_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"array|magic|number"):
        array_from(data)
