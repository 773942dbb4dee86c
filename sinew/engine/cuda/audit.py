"""Find the operations of a program that a CUDA graph could not record.

The search needs no GPU and computes no values.

The program runs twice on the meta device, which has no memory. The first run fills the same caches as a warm-up. The
second run is watched. On the host, the program uses the kernels' PyTorch references. The kernels themselves can always
be recorded.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sinew.engine.cuda.program import Program
from sinew.engine.engine import Audited

PACKAGE = Path(__file__).parents[2]
COPIED = "copies a constant from the host"
READ = "waits for a value of the device"
UNKNOWN = "has sizes or a branch that depend on values"


class Watched(TorchDispatchMode):
    """A PyTorch mode that lists, by stage, the operators that a CUDA graph could not record, and the allocated memory.

    A recording can contain no operator that reads host memory for a device tensor, or waits for a value of the device.

    Attributes:
        stage: The stage that runs now.
        found: For each stage and problem, how often the problem occurred.
        operators: For each stage, the number of operators that compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage = "vision"
        self.found: dict[str, Counter[str]] = {}
        self.operators: Counter[str] = Counter()
        self.made: Counter[str] = Counter()  # for each stage, the bytes of newly allocated tensors

    def note(self, what: str, operator: str, stack: traceback.StackSummary | None = None) -> None:
        """Count a problem, with the line of this package that called the operator.

        Args:
            what: The problem.
            operator: The operator, or the error's message.
            stack: The call stack of the problem, by default the current stack.
        """
        inside = [
            each for each in stack or traceback.extract_stack() if each.filename.startswith(str(PACKAGE))
        ]
        lines = [each for each in inside if Path(each.filename) != Path(__file__)]
        where = f"{Path(lines[-1].filename).relative_to(PACKAGE)}:{lines[-1].lineno}" if lines else "outside"
        self.found.setdefault(self.stage, Counter())[f"{what} ({operator}, {where})"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {each.device.type for each in _tensors((args, kwargs))}
        if func is torch.ops.aten._local_scalar_dense.default and "meta" in read:  # noqa: SLF001
            self.note(READ, str(func))
        out = func(*args, **(kwargs or {}))
        results = _tensors(out)
        made = {each.device.type for each in results}
        if "cpu" in read and "meta" in made:
            self.note(COPIED, str(func))
        elif "meta" in read and "cpu" in made:
            self.note(READ, str(func))
        if not func.is_view:
            self.operators[self.stage] += 1
            if not func._schema.is_mutable:  # noqa: SLF001
                self.made[self.stage] += sum(each.nbytes for each in results)
        return out

    def constants(self) -> Callable[..., torch.Tensor]:
        """Return a version of ``torch.tensor`` that notes each call.

        The version is needed because, on the meta device, this mode does not see calls of ``torch.tensor``.
        """
        make = torch.tensor

        def tensor(*arguments: Any, **options: Any) -> torch.Tensor:
            if str(options.get("device", "cpu")) != "cpu":
                self.note(COPIED, "torch.tensor")
            return make(*arguments, **options)

        return tensor


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


# Use no_grad: under inference_mode, PyTorch would pass composite operators to the mode without their parts.
@torch.no_grad()
def audited(program: Program) -> list[Audited]:
    """Return the operations that prevent a recording of ``program``, for each of the stages vision, prefix and head."""
    program = without_memory(program)
    with suppress(NotImplementedError, RuntimeError):  # the second run meets the same error and notes it
        program.first_step()
    watched = Watched()
    _run(program, watched)
    return [
        Audited(
            stage,
            watched.operators[stage],
            watched.made[stage],
            tuple(
                f"{what}, {n} times" if n > 1 else what for what, n in watched.found.get(stage, {}).items()
            ),
        )
        for stage in ("vision", "prefix", "head")
    ]


def _run(program: Program, watched: Watched) -> None:
    """Run all stages of the program.

    If a stage fails because it needs computed values, note the error and skip the later stages.
    """

    def then(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            result = call(*arguments)
            watched.stage = stage
            return result

        return run

    vision, read = type(program).vision, type(program)._read  # noqa: SLF001 - a method of a class in the same folder
    program.vision = then("prefix", vision.__get__(program))  # type: ignore[method-assign]
    program._read = then("head", read.__get__(program))  # type: ignore[method-assign]  # noqa: SLF001
    with _constants(watched), watched:
        try:
            program.every_stage()
        except (NotImplementedError, RuntimeError) as error:
            message = str(error).partition("\n")[0][:120]
            watched.note(UNKNOWN, message, traceback.extract_tb(error.__traceback__))


@contextmanager
def _constants(watched: Watched) -> Iterator[None]:
    make, torch.tensor = torch.tensor, watched.constants()
    try:
        yield
    finally:
        torch.tensor = make


def without_memory(program: Program) -> Program:
    """Return the same program on the meta device, which computes nothing.

    The function moves all tensors that should be on the device to PyTorch's meta device, which stores shapes only. Any
    other tensor that the program reads is still on the host, and the audit finds it.
    """
    model = program.model
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():  # tensors that vision towers store as plain attributes
        tensors += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        tensors += getattr(module, "grids", {}).values()
    tensors += [*program.time_embeddings, program.x, program.time_embedding, *program.staging.device.values()]
    if program.patches is not None:
        tensors.append(program.patches.rows)
        for table in program.patches.tables:
            tensors += [table.rows.first, table.rows.weights, table.columns.first, table.columns.weights]
            tensors.append(table.affine)
    if program.units is not None:
        tensors += [
            program.actions,
            *(value for value in vars(program.units).values() if isinstance(value, torch.Tensor)),
        ]
    memo = {id(t): t.detach().to("meta") for t in tensors}
    for parameter in model.parameters():  # a module accepts only a Parameter in place of a Parameter
        memo[id(parameter)] = torch.nn.Parameter(memo[id(parameter)], requires_grad=False)
    return copy.deepcopy(program, memo)
