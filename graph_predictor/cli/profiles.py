"""Fitted models that a command was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_models.device import DeviceSpec
    from kernel_models.profile import DeviceProfile


def loaded_profiles(paths: Sequence[str] | None) -> list[DeviceProfile]:
    """The profiles of files.

    Raises:
        ForetraceError: a file cannot be read.
    """
    if not paths:
        return []
    from kernel_models.profile import load_profile

    return [load_profile(path) for path in paths]


def profile_of(paths: Sequence[str] | None, spec: DeviceSpec) -> DeviceProfile | None:
    """The first profile of a device among files; ``None`` if none were given.

    Raises:
        ForetraceError: a file cannot be read, or all are of other devices.
    """
    found = loaded_profiles(paths)
    for profile in found:
        if profile.device.name == spec.name:
            return profile
    if not found:
        return None
    from kernel_models.profile import unused_error

    raise unused_error(found, [spec.name])
