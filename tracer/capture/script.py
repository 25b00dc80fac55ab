"""Captures of programs without a capture call: an unmodified script, or a workload of the suite.

A script, a module of a package or a notebook runs as in Python (``tracer.user_code``). An optimizer marks its steps: a
step ends when the first optimizer that was seen (or another, chosen one) has updated the parameters. So gradient
accumulation needs no special case, and neither do further optimizers that step at the same rate. ``Optimizers`` reports
those that step at another rate.
"""

from __future__ import annotations

import functools
import os
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakKeyDictionary

from tracer import workloads
from tracer.capture.interruption import termination_unwinds
from tracer.capture.options import CaptureWarning, by_optimizer
from tracer.capture.session import Capture, need_torch
from tracer.errors import CaptureError
from tracer.fake_world.fit import check_plan
from tracer.gpu_state import own_device
from tracer.program_note import note
from tracer.user_code import UserCode, find_main
from tracer.workloads import Settings
from tracer.workloads.places import check_alone

if TYPE_CHECKING:
    from tracer.parallel_plan import ParallelPlan


@dataclass(slots=True)
class _Seen:
    kind: str
    parameters: int
    steps: int = 0
    """Steps since the capture began."""
    in_steps: list[int] = field(default_factory=list)
    """Number of its steps in each captured step, from the captured step in which it was first seen."""
    first: int = 0
    """The captured step in which it was first seen."""


class Optimizers:
    """The optimizers that have made a step, numbered in the order of their first step.

    Args:
        counted: the number of the optimizer whose steps are counted.
    """

    def __init__(self, counted: int) -> None:
        self.seen: list[_Seen] = []
        self._counted = counted
        # Weak references: a script may make new optimizers all the time.
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._steps = 0
        self._pending: dict[int, int] = {}
        self._begun = False

    def note(self, optimizer: Any) -> bool:
        """Note that an optimizer has made a step; return whether its steps are counted."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = len(self.seen)
            elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            self.seen.append(_Seen(type(optimizer).__name__, elements, first=self._steps))
        if number == self._counted:
            self._begun = True
            return True
        if self._begun:
            self._pending[number] = self._pending.get(number, 0) + 1
        return False

    def end_step(self) -> None:
        """Note that a captured step ends."""
        self._steps += 1
        for number, each in enumerate(self.seen):
            made = self._pending.get(number, 0) if number != self._counted else 1
            each.steps += made
            each.in_steps.append(made)
        self._pending.clear()

    @property
    def listed(self) -> str:
        """Return the optimizers, in words."""
        return ", ".join(f"{number} ({each.kind}, {each.parameters:,} parameters)"
                         for number, each in enumerate(self.seen))

    def facts(self) -> dict[str, Any]:
        """Return the entry of ``context.json`` about them; empty where there is only one."""
        if len(self.seen) < 2:
            return {}
        return {"optimizers": {
            "counted": self._counted, "note": self._note(),
            "seen": [{"class": each.kind, "parameters": each.parameters, "steps": each.steps} for each in self.seen]}}

    def _note(self) -> str:
        """Return a sentence if the number of other optimizers' steps varies between captured steps; else empty."""
        others = [number for number, each in enumerate(self.seen) if number != self._counted and (
            len(set(each.in_steps)) > 1 or (each.first > 0 and any(each.in_steps)))]
        if not others:
            return ""
        counted = self.seen[self._counted]
        slowest = min(others, key=lambda number: self.seen[number].steps)
        one = self.seen[slowest]
        return (f"The steps are not alike: each of the {self._steps} since the first is one of optimizer "
                f"{self._counted} ({counted.kind}, {counted.parameters:,} parameters), while optimizer {slowest} "
                f"({one.kind}, {one.parameters:,} parameters) made {one.steps} meanwhile, not as many in each; "
                f"--optimizer {slowest} counts the steps of that one instead.")


class _RecordedAll(SystemExit):
    """Ends a script after its last recorded step; as a ``SystemExit`` it is not caught by ``except Exception``."""


def without_our_frames(error: BaseException, script: str | os.PathLike[str]) -> BaseException:
    """Return the exception of a script, changed in place to the traceback that ``python script`` would print, causes
    included. A notebook's traceback starts with its first cell."""
    seen: set[int] = set()
    rest: list[BaseException | None] = [error]
    while rest:
        each = rest.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _frames_of(each.__traceback__, os.path.abspath(script), is_outermost=each is error)
        rest += [each.__cause__, each.__context__]
    return error


def _frames_of(first: types.TracebackType | None, script: str, *, is_outermost: bool) -> types.TracebackType | None:
    """Return the frames without our own; for the outermost exception, from the script's first frame on."""
    frames = []
    while first is not None:
        frames.append(first)
        first = first.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    start = next((place for place, file in enumerate(files) if file == script or file.startswith(f"{script}, ")),
                 len(files)) if is_outermost else 0
    kept = [frame for frame, file in zip(frames[start:], files[start:], strict=True) if file != __file__]
    for frame, following in zip(kept, [*kept[1:], None], strict=False):
        frame.tb_next = following
    return kept[0] if kept else None


def not_there(name: str, as_module: bool = False) -> str:
    """Return the sentence that there is no program with a name."""
    if as_module:
        return (f"There is no module {name} that python -m {name} would run here (of a package it runs __main__.py): "
                "check the name, and start from the directory where it is found.")
    return f"There is no script {name}; check the path (a module is named as python -m does: -m package.train)."


def run_script(path: str | os.PathLike[str] | UserCode, args: Sequence[str], capture: Capture, *,
               afterwards: Literal["stop", "continue"] = "stop", world: tuple[int, int] | None = None,
               optimizer: int = 0) -> Capture:
    """Run a Python script as ``python path args…`` would, a module as ``python -m`` would, or a notebook, and capture
    its training steps.

    Its first optimizer step is never measured: it ends the script's preparations. The capture begins after it.

    Args:
        path: The script, the notebook or the module's name.
        args: Its arguments.
        capture: A capture that has not begun.
        afterwards: "stop" ends the script when everything is recorded, "continue" lets it run to its own end.
        world: (world size, rank) of a fake world; the script sees it as if torchrun had started it.
        optimizer: Number of the optimizer whose steps are counted; 0 makes its first step before all others.

    Returns:
        The finished capture.

    Raises:
        CaptureError: The script does not exist, there can be no such optimizer, or the directory cannot be written.
            Also if the script ended too early (the part that was captured has been written).
        BaseException: Any exception of the script, unchanged; ``SystemExit`` only if it reports a failure.
    """
    capture.counting = by_optimizer(optimizer)
    code = path if isinstance(path, UserCode) else find_main(os.fspath(path))
    if code is None:
        raise CaptureError(not_there(str(path)))
    script = code.name
    capture.facts["program"] = asdict(note(code, args))
    capture.check(world)
    need_torch()
    finder = StepFinder(capture, optimizer, afterwards)
    with ExitStack() as stack:
        if world is not None:
            from tracer.fake_world import fake_launch

            stack.enter_context(fake_launch(*world))
        for each in (finder.installed(), termination_unwinds(), _ended_quietly(capture)):
            stack.enter_context(each)
        try:
            code.run(args)
        except SystemExit as error:
            if error.code not in (None, 0) and not isinstance(error, _RecordedAll):
                raise
    if not finder.seen and finder.optimizers.seen:
        raise CaptureError(f"{script} has no optimizer {optimizer}: those that made a step are "
                           f"{finder.optimizers.listed}; choose one of them with --optimizer.")
    if not finder.seen:
        raise CaptureError(f"{script} ended without a single optimizer step in this process (those that it starts are "
                           "not watched), so that no training step was found: check its arguments, or put the capture "
                           "into its loop (with tracer.capture(…) as capture: … capture.step()).")
    if capture.ended:
        raise CaptureError(f"The capture into {capture.out} is not complete: {capture.ended}")
    return capture


def run_workload(settings: Settings, capture: Capture, plan: ParallelPlan | None = None,
                 world: tuple[int, int] | None = None) -> Capture:
    """Build a workload of the suite and capture as many of its steps as are needed.

    Args:
        settings: Checked settings (``tracer.workloads.configure`` or ``parse``).
        capture: A capture that has not begun.
        plan: The spread of the workload over the ranks; without a plan every rank runs all of it.
        world: (world size, rank) of a fake world; without one the process groups are real (torchrun's).

    Raises:
        CaptureError: The capture cannot start or be written.
        PlanError: The plan does not fit the workload or the world.
        WorkloadError: The workload cannot be built here.
    """
    facts = {"name": settings.WORKLOAD, "settings": workloads.as_plain(settings), "split": workloads.split(settings)}
    capture.facts["workload"] = facts
    if plan is None:
        check_alone(settings)
        return _run_workload(settings, capture, lambda workload: workload)
    check_plan(settings, plan)
    capture.facts["parallel"] = {"plan": str(plan)}
    if world is not None:
        capture.check(world)
    need_torch()
    from tracer.fake_world import fake_world, parallelize, rank_classes

    with fake_world(*world) if world is not None else _real_groups(settings.device):
        if world is not None:
            capture.facts["parallel"]["classes"] = [[list(span) for span in c.ranks]
                                                    for c in rank_classes(plan, settings)]
        return _run_workload(settings, capture, lambda workload: parallelize(workload, plan))


def _run_workload(settings: Settings, capture: Capture, spread: Callable[[Any], Any]) -> Capture:
    capture.check()
    need_torch()
    workload = workloads.create(settings)
    capture.facts["workload"]["parameters"] = workload.parameters
    workload = spread(workload)
    with termination_unwinds(), capture:
        for batch in capture.wrap(workload.batches()):
            workload.step(batch)
            capture.step()
            if capture.finished:
                break
    return capture


@contextmanager
def _real_groups(device: str) -> Iterator[None]:
    """Make the process groups of a job that torchrun started, if it has none: NCCL for GPUs, gloo for CPUs."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    if "RANK" not in os.environ:
        raise CaptureError("A parallel plan needs several ranks: give the size of a fake world, or start real ranks "
                           "with torchrun.")
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(own_device())
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


class Stepped(Protocol):
    """What is asked to note a program's steps: a capture, or a trace by shapes.

    Attributes:
        finished: whether no more steps are needed.
        late_facts: returns facts about the program's optimizers.
    """

    finished: bool
    late_facts: Callable[[], dict[str, Any]]

    def __enter__(self) -> Any:
        """Begin, after the first optimizer step."""

    def step(self) -> None:
        """Note the end of a step."""


class StepFinder:
    """Calls ``capture.step`` after each step of the counted optimizer.

    Attributes:
        seen: whether the counted optimizer has made a step.
        optimizers: all optimizers that have made a step.
    """

    def __init__(self, capture: Stepped, optimizer: int, afterwards: Literal["stop", "continue"]) -> None:
        self.seen = False
        self.optimizers = Optimizers(optimizer)
        self._over = False
        self._capture = capture
        self._afterwards = afterwards
        self._hook: Any = None
        capture.late_facts = self.optimizers.facts

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch all optimizers while the block runs."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            self._hook.remove()

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Handle the end of an optimizer's step, inside torch's ``Optimizer.step`` range. Counted steps end after it,
        around the whole call; only the first step ends here."""
        if not self.optimizers.note(optimizer) or self.seen:
            return
        self.seen = True
        optimizer.step = types.MethodType(self._around(optimizer.step), optimizer)
        self._capture.__enter__()

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` keeps the signature, and the marks that learning-rate schedulers leave on the method.
        @functools.wraps(step)
        def counted(_: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._end_step()
            return result

        return counted

    def _end_step(self) -> None:
        if self._over:
            return
        self.optimizers.end_step()
        self._capture.step()
        self._over = self._capture.finished
        if self._over:
            self._hook.remove()
        if self._over and self._afterwards == "stop":
            raise _RecordedAll(0)


@contextmanager
def _ended_quietly(capture: Capture) -> Iterator[None]:
    """End the capture as ``with`` would, but without its warning, since the caller raises an error."""
    try:
        yield
    except BaseException as error:
        capture.__exit__(type(error), error, error.__traceback__)
        raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        capture.__exit__(None, None, None)
