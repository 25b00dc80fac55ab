"""Versions of installed packages."""

from __future__ import annotations


def installed_version(package: str) -> str:
    """Return the version of a package; empty where it is not installed."""
    from importlib import metadata  # takes longer to import than a small file to read

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
