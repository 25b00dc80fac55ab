"""``fake_world``: this process as one rank of a world whose other ranks do not exist.

The collectives of PyTorch's fake process group return at once and leave their tensors unchanged. A rank runs the same
operations as in a real run, but values after a collective are wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tracer.fake_world import shims
from tracer.fake_world.fit import FakeWorldError, check_world
from tracer.ranks import FAKE

_active: tuple[int, int] | None = None


def current_world() -> tuple[int, int] | None:
    """Return (world size, rank) of the active fake world; ``None`` without one."""
    return _active


@contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of a fake world of ``world_size`` ranks while the block runs.

    The default process group is PyTorch's fake one. DistributedDataParallel, FSDP2, tensor and pipeline parallelism and
    device meshes work in it unchanged, also under ``FakeTensorMode``. ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` (0: this
    process has one device) and the like are set; everything is restored at the end.

    Raises:
        FakeWorldError: the numbers are impossible, a process group or another fake world exists already, or torch was
            built without distributed support.
    """
    with _prepared(world_size, rank):
        _begin(world_size, rank)
        yield


@contextmanager
def fake_launch(world_size: int, rank: int = 0) -> Iterator[None]:
    """Act as if torchrun had started this process as one rank of many, for a script that makes its own process groups.

    The environment is torchrun's. ``init_process_group`` (or a device mesh without it) and ``new_group`` use the fake
    world, whichever backend they name. The script's own wrappers then run as in ``fake_world``.

    Raises:
        FakeWorldError: as ``fake_world``; from ``init_process_group`` if it names another world size or rank.
    """
    def begin(*args: Any, **kwargs: Any) -> None:
        for name, have in (("world_size", world_size), ("rank", rank)):
            asked = kwargs.get(name, -1)
            if asked not in (None, -1, have):
                raise FakeWorldError(f"The script asks for {name}={asked} where the capture was given {have}; make "
                                     "them agree.")
        _begin(world_size, rank)

    with _prepared(world_size, rank), shims.process_groups_begun_by(begin):
        yield


@contextmanager
def _prepared(world_size: int, rank: int) -> Iterator[None]:
    """Prepare everything except the process group, and destroy the group at the end even if the block made it."""
    global _active
    check_world(world_size, rank)
    import torch.distributed as dist

    if not dist.is_available():
        raise FakeWorldError("This torch was built without torch.distributed, which a fake world needs.")
    if _active is not None:
        raise FakeWorldError(f"A fake world of {_active[0]} ranks is up already, and they do not nest: leave it first.")
    if dist.is_initialized():
        raise FakeWorldError(f"A process group ({dist.get_backend()}) is up already: destroy it before a fake world is "
                             "made, or run without one.")
    _active = world_size, rank
    try:
        with _environment(world_size, rank), shims.installed():
            try:
                yield
            finally:
                if dist.is_initialized():  # the block may have destroyed it itself
                    dist.destroy_process_group()
                _forget_meshes()
    finally:
        _active = None


def _begin(world_size: int, rank: int) -> None:
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise FakeWorldError("This torch has no fake process group; use torch 2.6 or newer.") from error
    shims.original_init()(FAKE, store=FakeStore(), rank=rank, world_size=world_size)


@contextmanager
def _environment(world_size: int, rank: int) -> Iterator[None]:
    values = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
              "GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _forget_meshes() -> None:
    """Drop meshes that DTensor remembers and whose groups are gone: it could reuse one in a later world."""
    with suppress(ImportError, AttributeError):
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
    with suppress(ImportError, AttributeError):
        from torch.distributed.tensor import debug

        debug._clear_fast_path_sharding_prop_cache()
