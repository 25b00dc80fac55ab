"""Changes to torch that an active fake world needs, in one place; all are undone afterwards.

Each shim's text says what fails without it. Features are probed for, not versions.

- ``DistributedDataParallel``: its reducer takes the reduced tensors out of the work's future, and the fake group's
  future is empty. The reducer gets a group that forwards to the fake one and whose future holds the tensors. A
  communication hook would help too, but it changes the operations (no averaging ``mul``, a ``div_`` a bucket).
- ``DeviceMesh``: computes with small tensors whose values it reads, which fake tensors do not have.
- Objects sent as pickles: sizes would come from ranks that do not exist. So all seem to send this rank's object.
- Pipeline stages: they vote over the network that shapes need not be inferred; here no other rank answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tracer.fake_world.fit import FakeWorldError

_MESH_METHODS = (
    "__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate", "_create_sub_mesh", "_create_flatten_mesh",
    "_create_unflatten_mesh", "_get_all_submeshes", "_init_process_groups", "_compute_coordinates_from_mesh",
    "_get_mesh_tensor_from_full_mesh", "get_coordinate", "_compute_coordinate_on_dim", "__repr__", "from_group",
)
"""Methods of ``DeviceMesh`` that make or read tensors; those that this torch lacks are skipped."""

_OURS = "_foretrace_fake_world"


@contextmanager
def outside_fake_mode() -> Iterator[None]:
    """Run with real tensors even if a ``FakeTensorMode`` is active; without one nothing changes."""
    try:
        from torch._subclasses.fake_tensor import unset_fake_temporarily
    except ImportError:
        yield
        return
    with unset_fake_temporarily():
        yield


def in_fake_mode() -> bool:
    """Return whether a ``FakeTensorMode`` is active now."""
    get = getattr(torch._C, "_get_dispatch_mode", None)
    keys = getattr(torch._C, "_TorchDispatchModeKey", None)
    return get is not None and keys is not None and get(keys.FAKE) is not None


@contextmanager
def installed() -> Iterator[None]:
    """Install all shims while the block runs."""
    with ExitStack() as stack:
        for shim in (_reducer, _ddp, _device_mesh, _objects, _pipelining):
            stack.enter_context(shim())
        yield


def original_init() -> Callable[..., Any]:
    """Return torch's own ``init_process_group``, even while it is replaced."""
    found = dist.distributed_c10d.init_process_group
    return getattr(found, "__wrapped__", found) if hasattr(found, _OURS) else found


@contextmanager
def process_groups_begun_by(begin: Callable[..., None]) -> Iterator[None]:
    """Let ``init_process_group`` call ``begin``, and ``new_group`` take the default group's backend."""
    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> None:
            if dist.is_initialized():
                raise ValueError("trying to initialize the default process group twice!")  # as torch says
            begin(*args, **kwargs)

        setattr(called, _OURS, True)
        return called

    def new_group(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(ranks: Any = None, *_: Any, **kwargs: Any) -> Any:
            kept = ("group_desc", "use_local_synchronization")
            return original(ranks, **{name: value for name, value in kwargs.items() if name in kept})

        return called

    with ExitStack() as stack:
        for name, shim in (("init_process_group", init), ("new_group", new_group)):
            for module in (device_mesh, dist, dist.distributed_c10d):
                stack.enter_context(replaced(module, name, shim))
        yield


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute ``old`` by ``make(old)``; do nothing if there is no such attribute."""
    if not hasattr(owner, name):
        yield
        return
    if not isinstance(owner, type) or name not in vars(owner):
        old = getattr(owner, name)
        setattr(owner, name, make(old))
        restore = functools.partial(delattr, owner, name) if isinstance(owner, type) else (
            functools.partial(setattr, owner, name, old))
    else:
        own = vars(owner)[name]  # a static or class method stays one
        wrap = type(own) if isinstance(own, staticmethod | classmethod) else lambda function: function
        setattr(owner, name, wrap(make(getattr(own, "__func__", own) if wrap is type(own) else own)))
        restore = functools.partial(setattr, owner, name, own)
    try:
        yield
    finally:
        restore()


class _HeldWork(dist.Work):
    """A finished collective whose future holds its tensors."""

    def __init__(self, tensors: list[torch.Tensor], work: Any) -> None:
        super().__init__()
        self._work = work  # keeps alive what the fake group may need
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Return at once: there is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Return true."""
        return True

    def get_future(self) -> Any:
        """Return a future that holds the tensors."""
        return self._future


class HoldingGroup(dist.ProcessGroup):
    """Forwards a reducer's collectives to a fake group and returns their tensors in futures."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner

    def getBackendName(self) -> str:
        """Return the name of the inner group's backend."""
        return str(self.inner.name()) if hasattr(self.inner, "name") else "fake"

    @property
    def group_name(self) -> str:
        """Return the inner group's name, so that recorders see one name for both groups."""
        return str(self.inner.group_name)

    def allreduce(self, tensors: Any, *options: Any) -> _HeldWork:
        """Forward to the inner group."""
        return _HeldWork(list(tensors), self.inner.allreduce(tensors, *options))

    def broadcast(self, tensors: Any, *options: Any) -> _HeldWork:
        """Forward to the inner group."""
        return _HeldWork(list(tensors), self.inner.broadcast(tensors, *options))

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> _HeldWork:
        """Forward to the inner group."""
        return _HeldWork([t for row in outputs for t in row], self.inner.allgather(outputs, inputs, *options))


class _RealIndices(TorchDispatchMode):
    """Keeps the int32 bucket indices real, since the reducer reads and writes their memory, below an active fake mode.

    The buckets stay fake: real ones would take as many bytes as the parameters.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        dtypes = {t.dtype for t in tensors} or {kwargs.get("dtype")}
        if dtypes == {torch.int32}:
            with outside_fake_mode():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _holding(group: Any) -> Any:
    """Return a ``HoldingGroup`` of a group. Torch knows its ranks, but does not list it among the groups."""
    if isinstance(group, HoldingGroup):
        return group
    world = dist.distributed_c10d._world
    holding = HoldingGroup(group)
    world.pg_group_ranks[holding] = world.pg_group_ranks[group]
    return holding


def _reducer() -> AbstractContextManager[None]:
    def shim(original: Any) -> Any:
        class Reducer(original):  # type: ignore[misc]
            def __init__(self, params: Any, buckets: Any, limits: Any, group: Any, *args: Any, **kwargs: Any) -> None:
                super().__init__(params, buckets, limits, _holding(group), *args, **kwargs)

            def _rebuild_buckets(self) -> bool:
                if not in_fake_mode():
                    return bool(super()._rebuild_buckets())
                with _RealIndices():
                    return bool(super()._rebuild_buckets())

        return Reducer

    return replaced(dist, "Reducer", shim)


def _ddp() -> AbstractContextManager[None]:
    """Skip the broadcasts and comparisons at construction, which are impossible with fake tensors."""
    def shim(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def construct(self: Any, *args: Any, **kwargs: Any) -> None:
            if in_fake_mode():
                kwargs["init_sync"] = False
            original(self, *args, **kwargs)

        return construct

    return replaced(DistributedDataParallel, "__init__", shim)


@contextmanager
def _device_mesh() -> Iterator[None]:
    def shim(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def outside(*args: Any, **kwargs: Any) -> Any:
            with outside_fake_mode():
                return original(*args, **kwargs)

        return outside

    with ExitStack() as stack:
        kind = device_mesh.DeviceMesh
        for name in _MESH_METHODS:
            if name in vars(kind):
                stack.enter_context(replaced(kind, name, shim))
        stack.enter_context(replaced(kind, "__init__", _with_ranks))
        yield


def _with_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """Give a mesh its ranks as a real tensor where the program or ``init_device_mesh`` made them in the trace."""
    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> None:
        def real(one: Any) -> Any:
            if not isinstance(one, FakeTensor):
                return one
            ranks = one.tolist()
            with outside_fake_mode():
                return torch.tensor(ranks, dtype=one.dtype)

        original(*(map(real, args)), **{name: real(value) for name, value in kwargs.items()})

    return construct


def _by(new: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda old: new


@contextmanager
def _objects() -> Iterator[None]:
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * dist.get_world_size(group)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *args: Any, group: Any = None,
                      **kwargs: Any) -> None:
        if object_gather_list:
            object_gather_list[:] = [obj] * dist.get_world_size(group)

    def unchanged(*args: Any, **kwargs: Any) -> None:
        return None

    def unknown(*args: Any, **kwargs: Any) -> None:
        raise FakeWorldError("An object was to be received from another rank, which in a fake world does not exist.")

    shims: dict[str, Callable[..., None]] = {
        "all_gather_object": all_gather_object, "gather_object": gather_object, "broadcast_object_list": unchanged,
        "send_object_list": unchanged, "recv_object_list": unknown, "scatter_object_list": unknown,
    }
    with ExitStack() as stack:
        for name, function in shims.items():
            for module in (dist, dist.distributed_c10d):
                stack.enter_context(replaced(module, name, _by(function)))
        yield


def _pipelining() -> AbstractContextManager[None]:
    try:
        from torch.distributed.pipelining import schedules
        from torch.distributed.pipelining.stage import InferenceMode, PipelineStage
    except ImportError:  # torch without the vote
        return nullcontext()

    def shim(_: Callable[..., None]) -> Callable[..., None]:
        def agree(self: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
            for stage in stages:
                if not isinstance(stage, PipelineStage):
                    continue
                if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                    raise FakeWorldError(
                        "A pipeline stage in a fake world cannot ask its neighbours for shapes: give PipelineStage its "
                        "input_args and output_args.")
                stage._inference_mode = InferenceMode.STATIC

        return agree

    return replaced(schedules._PipelineSchedule, "_warmup_p2p", shim)
