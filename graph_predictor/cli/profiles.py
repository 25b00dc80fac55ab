"""Fitted models that a command was given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_models.device import DeviceSpec
    from kernel_models.profile import DeviceProfile


def profile_of(paths: Sequence[str] | None, spec: DeviceSpec) -> DeviceProfile | None:
    """The first profile of a device among files; ``None`` if none were given.

    Raises:
        ForetraceError: a file cannot be read, or all are of other devices.
    """
    from kernel_models.profile import load_profile, unused_error

    if not paths:
        return None
    found = [load_profile(path) for path in paths]
    for profile in found:
        if profile.device.name == spec.name:
            return profile
    raise unused_error(found, [spec.name])
