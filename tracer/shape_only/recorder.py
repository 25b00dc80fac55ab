"""The recorder: every operator call of a step as columns, in the order the dispatcher runs them.

It sees what autograd's kernels call: ``aten::addmm`` but not ``aten::linear`` around it, and nothing inside an
operator. Views and other calls that move no data are operations too, and cost a GPU only their host time. Backward
operations get the module of the forward operation whose autograd node runs, found by its sequence number.
"""

from __future__ import annotations

import functools
import types
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from tracer.capture.context import tf32_in_use
from tracer.capture.notes import CollectiveNotes, received_tensors
from tracer.device_memory import Holds
from tracer.graph import NONE, Phase, Place
from tracer.python_calls import PythonCalls
from tracer.shape_only.known_values import LIFT, TO_NUMBER, KnownValues
from tracer.shape_only.tensors import ArgumentWriter, MemoryTracker, tensors_in


class ModuleStack:
    """The path of the running module, such as "Llama/blocks.0/attention/q"; a context that installs the hooks."""

    def __init__(self) -> None:
        self.modules: dict[int, Any] = {}
        """Every module that ran, by id (kept alive, so that ids stay unique)."""
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._handles: list[Any] = []

    @property
    def path(self) -> str:
        """Return the innermost running module's path, "" outside."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> ModuleStack:
        self._handles = [hooks.register_module_forward_pre_hook(self._enter),
                         hooks.register_module_forward_hook(self._leave, always_call=True)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Leave every module, after a step that failed or ended."""
        self._stack.clear()

    def _enter(self, module: Any, _: Any) -> None:
        if id(module) not in self._names:
            self._learn(module)
        self._stack.append(self._names[id(module)])

    def _leave(self, module: Any, *_: Any) -> None:
        name = self._names.get(id(module))
        if name in self._stack:  # a module that failed also ends the modules inside it
            while self._stack.pop() != name:
                pass

    def _learn(self, module: Any) -> None:
        root = type(module).__name__
        for name, part in module.named_modules():
            self.modules.setdefault(id(part), part)
            self._names.setdefault(id(part), f"{root}/{name.replace('.', '/')}" if name else root)


def current_sequence() -> int:
    """Return the sequence number that autograd's next node will have."""
    return int(torch._C._autograd._get_sequence_nr())


class WaitPoints:
    """Running collectives and, for each, the operation that first needed its result: until then it can overlap.

    On a GPU a collective runs on its own stream, and the compute stream waits for it where its result is used. A step
    that never ran has no streams, but its data dependences show the same point: the first later operation, except
    views, that touches the storage of the result. A functional collective marks it by ``wait_tensor``.
    """

    def __init__(self) -> None:
        self.first: dict[int, int] = {}
        """Number of the collective → row of the operation that first needs its result."""
        self.pending: dict[int, set[int]] = {}
        """Number of a storage → collectives that write to it."""

    def started(self, collective: int, storages: list[int]) -> None:
        """Note that a collective began, and will write these storages."""
        for storage in storages:
            if storage != NONE:
                self.pending.setdefault(storage, set()).add(collective)

    def waited(self, row: int, storages: list[int]) -> None:
        """Note that the result in these storages is needed at ``row``."""
        for storage in storages:
            for collective in self.pending.pop(storage, ()):
                self.first.setdefault(collective, row)


_DEVICE = torch.ops.prim.device.default
_DETACH = torch.ops.aten.detach.default
_COPY = torch.ops.aten.copy_.default
_IGNORED = frozenset({"prim", "prims", "profiler"})
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")


class OperatorColumns:
    """The columns noted for each operation; string columns hold indices into ``strings``."""

    def __init__(self) -> None:
        self.strings: list[str] = []
        self._codes: dict[str, int] = {}
        self.ints: dict[str, array[int]] = {name: array("q") for name in (
            "name", "shapes", "dtypes", "strides", "scalars", "module", "phase", "step", "sequence", "place",
            "python_calls")}

    def __len__(self) -> int:
        return len(self.ints["name"])

    def code(self, text: str) -> int:
        """Return the number of a text; ``NONE`` for the empty one."""
        if not text:
            return NONE
        found = self._codes.get(text)
        if found is None:
            found = self._codes[text] = len(self.strings)
            self.strings.append(text)
        return found


class OperatorRecorder(TorchDispatchMode):
    """Notes operators while ``recording``, and storages always.

    Args:
        tracker: Follows the storages.
        modules: Gives the running module.
        rules: Operator → function that makes its outputs, in place of a fake kernel.
        placement: Decides where new storages lie (``Placement``); None where there is only one device.
        values: Known values of tensors made of constants.
    """

    def __init__(self, tracker: MemoryTracker, modules: ModuleStack, rules: dict[Any, Any], placement: Any,
                 values: KnownValues) -> None:
        super().__init__()
        self.columns = OperatorColumns()
        self.tracker = tracker
        self.modules = modules
        self.notes = CollectiveNotes()
        self.waits = WaitPoints()
        self.collective_ops: list[int] = []
        self.step_ends: list[int] = []
        self.step_calls: list[int] = []
        self.calls = PythonCalls()
        self.optimizers: dict[int, Any] = {}
        self.recording = False
        self.tf32: dict[str, bool] = {}
        self._rules = rules
        self._placement = placement
        self.values = values
        self._writer = ArgumentWriter()
        self._in_optimizer = 0
        self._step = 0
        self._noted_calls = 0
        self._last_sequence = NONE
        self._last_outputs: list[int] = []
        self._module_of: dict[int, int] = {}
        self._names: dict[Any, str] = {}
        self._handles: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap each call; nothing is compiled here

    def __enter__(self) -> OperatorRecorder:
        self._handles = [register_optimizer_step_pre_hook(self._optimizer_begins),
                         register_optimizer_step_post_hook(self._optimizer_ends)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        for handle in self._handles:
            handle.remove()
        return super().__exit__(*error)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the operators called inside the context as the next step."""
        self._in_optimizer = 0
        self.tracker.in_optimizer = False
        self.recording = True
        self._last_sequence = current_sequence()
        self._module_of.clear()
        self._noted_calls = 0
        self.calls.start()
        try:
            yield
        finally:
            self.calls.stop()
            self.recording = False
            self.step_calls.append(self._noted_calls + self.calls.taken())
            self._hold_gradients()
            self.step_ends.append(len(self.columns))
            self._step += 1
            self.modules.forget()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # three calls in four
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # a DTensor and the like: seen again as the operations on its parts
        self.calls.hide()
        try:
            if func.namespace in _IGNORED:
                return func(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                return self._called(func, args, kwargs)
        finally:
            self.calls.show()

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        backward = torch._C._current_graph_task_id() != -1
        if self.recording and backward and not self.tracker.in_backward:
            self.tracker.in_backward = True
            self.tracker.backward_begins()
        sequence = current_sequence()
        rule = self._rules.get(func)
        row = NONE
        inputs = tensors_in((args, kwargs))
        if self._placement is not None:
            self._placement.check(func, inputs)
        if self.recording and not (func is _DETACH and self._is_bookkeeping(inputs, backward)) and not (
                func is TO_NUMBER and self._is_on_host(inputs[0])):
            row = self.tracker.row = self._note(func, args, kwargs, backward, sequence, inputs)
        device = kwargs.get("device")
        if isinstance(device, torch.device) and device.type == "cuda":
            if self._placement is None:  # torch built for GPUs raises this for real tensors only
                raise RuntimeError("No CUDA GPUs are available")
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = self.values.result(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs) if rule is None else rule(*args, **kwargs)
            self.values.follow(func, args, kwargs, result)
        # A number of torch's own, such as an optimizer's step counter, stays on the host.
        own = func is LIFT and self._placement is not None and self._placement.wanted is None and not inputs[0].dim()
        on_device = not own and self._place(inputs)
        in_forward = self.recording and (not backward or torch.is_grad_enabled()) and not self._in_optimizer
        outputs = tensors_in(result)
        numbers = [self.tracker.see(tensor, on_device=on_device, in_forward=in_forward) for tensor in outputs]
        if row != NONE:
            self._last_outputs = numbers
        if self.recording and func.namespace in _COLLECTIVES:
            self._collective(func, args, kwargs, result, row)
        return result

    def _is_bookkeeping(self, inputs: list[Any], backward: bool) -> bool:
        """Return whether a ``detach`` is autograd's own. It detaches a fake tensor whenever it saves or unpacks one;
        for real tensors it makes no such call. A ``detach`` that gives a parameter its gradient is real."""
        if backward and not torch.is_grad_enabled():
            node = torch._C._current_autograd_node()
            return node is None or "AccumulateGrad" not in node.name()
        return self.tracker.number(inputs[0]) in self._last_outputs

    def _is_on_host(self, tensor: Any) -> bool:
        """Return whether reading a number involves no GPU: an optimizer's step counter lies on the host."""
        return self._placement is not None and self.tracker.on_device(tensor) is False

    def _place(self, inputs: list[Any]) -> bool:
        if self._placement is None:
            return True
        if self._placement.wanted is not None:
            return bool(self._placement.wanted)
        known = [place for place in (self.tracker.on_device(t) for t in inputs) if place is not None]
        return any(known) or not known

    def _works_on(self, func: Any, inputs: list[Any]) -> int:
        """Return the ``Place`` of a call; ``NONE`` where the host is the only device."""
        placement = self._placement
        if placement is None:
            return NONE
        if placement.transfer is not None:
            return int(Place.TO_DEVICE if placement.wanted else Place.TO_HOST)
        if func is _COPY:
            target, source = (self.tracker.on_device(tensor) for tensor in inputs[:2])
            if target is not None and source is not None and target != source:
                return int(Place.TO_DEVICE if target else Place.TO_HOST)
        return int(Place.DEVICE if self._place(inputs) else Place.HOST)

    def _note(self, func: Any, args: Any, kwargs: Any, backward: bool, sequence: int, inputs: list[Any]) -> int:
        columns = self.columns
        row = len(columns)
        if self._in_optimizer:
            phase = Phase.OPTIMIZER
        else:
            phase = Phase.BACKWARD if backward else Phase.FORWARD
        number, module = self._node(backward, sequence)
        if not self.tf32 and phase is Phase.FORWARD and inputs:
            self.tf32 = dict(zip(("tf32_matmul", "tf32_cudnn"), tf32_in_use(), strict=True))
        if self._placement is not None and self._placement.transfer is not None:
            kwargs = {**kwargs, "device": self._placement.transfer}
            if "device" not in {a.name for a in func._schema.arguments}:
                kwargs.pop("device")
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = func._schema.name
        texts = self._writer.texts(func, args, kwargs)
        calls = self.calls.taken()
        self._noted_calls += calls
        values = {"name": columns.code(name), "module": module, "phase": int(phase), "step": self._step,
                  "sequence": number, "place": self._works_on(func, inputs), "python_calls": calls}
        for column, text in zip(("shapes", "dtypes", "strides", "scalars"), texts, strict=True):
            values[column] = columns.code(text)
        for column, value in values.items():
            columns.ints[column].append(value)
        if self.waits.pending and not func.is_view:
            self.waits.waited(row, [self.tracker.number(t) for t in inputs])
        return row

    def _node(self, backward: bool, sequence: int) -> tuple[int, int]:
        """Return autograd's sequence number of the call's node, and the code of its module."""
        module = self.columns.code(self.modules.path)
        if backward and not torch.is_grad_enabled():
            node = torch._C._current_autograd_node()
            number = int(node._sequence_nr()) if node is not None and hasattr(node, "_sequence_nr") else NONE
            if not 0 <= number < 1 << 62:  # AccumulateGrad has the largest number there is
                number = NONE
            return number, module if module != NONE else self._module_of.get(number, NONE)
        number = NONE
        if sequence != self._last_sequence:
            number = sequence - 1
            for made in range(max(self._last_sequence, 0), sequence):
                self._module_of[made] = module
        self._last_sequence = sequence
        return number, module

    def _collective(self, func: Any, args: Any, kwargs: Any, result: Any, row: int) -> None:
        before = len(self.notes.rows)
        self.notes.note(func, args, kwargs, result)
        name = func._schema.name
        if len(self.notes.rows) > before:
            self.collective_ops.append(row)
            filled = received_tensors(func, args, kwargs, result)
            self.waits.started(len(self.notes.rows) - 1, [self.tracker.number(t) for t in filled])
        elif name.endswith("::wait_tensor"):
            self.waits.waited(row, [self.tracker.number(t) for t in tensors_in((args, kwargs))])

    def _optimizer_begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note an optimizer's step before it begins, as torch's hook; return the step's new arguments."""
        self.optimizers[id(optimizer)] = optimizer
        self._in_optimizer += 1
        self.tracker.in_optimizer = True
        if self.recording:
            with torch._C.DisableTorchFunction():
                self.tracker.hold(_gradients(optimizer), Holds.GRADIENTS)
        return (tuple(self._closure(each) for each in args),
                {name: self._closure(each) for name, each in kwargs.items()})

    def _closure(self, argument: Any) -> Any:
        """Wrap an optimizer's closure so that its work does not count as the optimizer's."""
        if not isinstance(argument, types.FunctionType | types.MethodType | functools.partial):
            return argument

        @functools.wraps(argument)
        def outside(*args: Any, **kwargs: Any) -> Any:
            depth, self._in_optimizer, self.tracker.in_optimizer = self._in_optimizer, 0, False
            try:
                return argument(*args, **kwargs)
            finally:
                self._in_optimizer, self.tracker.in_optimizer = depth, depth > 0

        return outside

    def _optimizer_ends(self, *_: Any) -> None:
        self._in_optimizer = max(self._in_optimizer - 1, 0)
        self.tracker.in_optimizer = self._in_optimizer > 0

    def _hold_gradients(self) -> None:
        """Note the gradients of modules without an optimizer."""
        with torch._C.DisableTorchFunction():
            for module in self.modules.modules.values():
                self.tracker.hold((p.grad for p in module._parameters.values() if p is not None and p.grad is not None),
                                  Holds.GRADIENTS)

    def begin_memory(self) -> None:
        """Note what is alive before the recorded step: parameters, buffers, optimizer state, gradients."""
        tracker = self.tracker
        with torch._C.DisableTorchFunction():
            for optimizer in self.optimizers.values():
                tracker.hold((p for group in optimizer.param_groups for p in group["params"]), Holds.PARAMETERS)
                tracker.hold((value for state in optimizer.state.values() for value in state.values()
                              if isinstance(value, torch.Tensor)), Holds.OPTIMIZER_STATE)
                tracker.hold(_gradients(optimizer), Holds.GRADIENTS)
            for module in self.modules.modules.values():
                tracker.hold((p for p in module._parameters.values() if p is not None), Holds.PARAMETERS)
                tracker.hold((b for b in module._buffers.values() if b is not None), Holds.BUFFERS)
        self._hold_gradients()
        tracker.begin()


def _gradients(optimizer: Any) -> list[Any]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _is_wrapper(kind: Any) -> bool:
    return kind is not FakeTensor and is_traceable_wrapper_subclass_type(kind)
