"""Members of profiles that are arrays: what is claimed is compared with what is there before anything is allocated."""

from __future__ import annotations

import io

import numpy as np
import pytest

from kernel_models.profile import array_from


def stored(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
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
