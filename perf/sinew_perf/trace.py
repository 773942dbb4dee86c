"""Record the operators of a program from the tensors that flow through it.

The model runs on the meta device (shapes and dtypes, no memory, no arithmetic) under a dispatch mode that receives
every ATen call. The code knows no architecture: the cost of a call follows from its operands.

* Only matrix products, convolutions and fused attention have FLOPs: 2*M*N*K each. Everything else counts **zero**
  FLOPs. Norms, activations, softmax and copies are memory traffic.
* Bytes are the distinct elements of every operand: an expanded axis is read once, and an embedding reads only its
  rows. Views move nothing and are not recorded.
* ``F.scaled_dot_product_attention`` is recorded as one fused kernel, as CPUs and GPUs run it. The meta device would
  divide it into products.
* The lifetime of each memory block is recorded too, as reference counting frees it.
"""

from __future__ import annotations

import re
import weakref
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from sinew.engine.example import Inputs, Shapes
from sinew.engine.plan.plan import Plan
from sinew.models.base import Model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sinew_perf import meta
from sinew_perf.flops import PRODUCTS

# Stages in the order in which they run. The head is one solver step.
STAGES = ("vision", "prefix", "head")
# These ATen operators read only some rows of their operand: the rows that they return.
ROW_READERS = {"embedding", "index", "index_select", "gather"}
COPIES = {"cat", "clone", "_to_copy", "copy_"}  # a copy of keys and values has the kind "cache" too
SOFTMAXES = {"_softmax", "_safe_softmax"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty"}  # operators that do not touch memory


@dataclass(eq=False, slots=True)
class TracedBlock:
    """One memory allocation. All views of it share the block.

    Attributes:
        nbytes: Size in bytes.
        kind: "weight", "activation", "scores" (of attention, before and after the softmax) or "cache" (keys and
            values of the prefix that the head reads, and their copies).
        maker: Call that wrote the block. None for inputs and weights.
        copied: Dtype of the original if the block is a copy. None otherwise.
    """

    nbytes: int
    kind: str = "activation"
    maker: TracedCall | None = None
    copied: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class TracedOperand:
    """An operand or result of a call.

    Attributes:
        block: Its memory block.
        elements: Number of distinct elements.
        dtype: Its dtype.
        weight: Name of the parameter. "" for other kinds.
        written: True for a result.
    """

    block: TracedBlock
    elements: int
    dtype: torch.dtype
    weight: str = ""
    written: bool = False

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def unwidened(self) -> torch.dtype:
        """Return the dtype of the data before a copy widened it for the arithmetic of one call."""
        return self.block.copied or self.dtype


@dataclass(eq=False, slots=True)
class TracedCall:
    """One operator call.

    Attributes:
        operator: ATen's name, such as "addmm".
        stage: Stage in which the call ran.
        flops: Floating-point operations.
        is_product: True for a matrix product, a convolution or fused attention.
        dtype: Dtype of the arithmetic.
        operands: Tensors that the call read and wrote.
    """

    operator: str
    stage: str
    flops: int
    is_product: bool
    dtype: torch.dtype
    operands: tuple[TracedOperand, ...] = ()

    @property
    def is_attention(self) -> bool:
        """Return True for a product of activations in attention: scores, weighted values, or both in one kernel."""
        return self.is_product and not any(operand.weight for operand in self.operands)

    @property
    def shape(self) -> str:
        """Return rows x depth x columns of a product with one weight matrix, from the sizes of its operands. ""
        for other calls.
        """
        matrices = [operand.elements for operand in self.operands if operand.weight]
        results = [operand.elements for operand in self.operands if operand.written]
        if not (self.is_product and matrices and results):
            return ""
        rows, rest = divmod(self.flops, 2 * max(matrices))
        if rest or not rows or results[0] % rows:
            return ""
        columns = results[0] // rows
        return f"{rows}x{max(matrices) // columns}x{columns}" if max(matrices) % columns == 0 else ""

    @property
    def name(self) -> str:
        """Return the module whose weight the call reads, with ``*`` for layer numbers. A call without weights is
        named after its operation.
        """
        weights = [operand for operand in self.operands if operand.weight]
        if weights:
            largest = max(weights, key=lambda operand: operand.elements).weight
            return re.sub(r"\.\d+(?=\.|$)", ".*", largest.removesuffix(".weight").removesuffix(".bias"))
        if self.is_product and "scaled_dot_product" in self.operator:
            return "attention"
        if self.is_product:
            scores = [operand for operand in self.operands if operand.block.kind == "scores"]
            if scores:
                return "logits" if scores[0].written else "attend"
        return self.operator


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation or a release of a memory block during the trace.

    Attributes:
        stage: Stage in which it happened.
        block: The memory block.
        change: +1 for an allocation, -1 for a release.
    """

    stage: str
    block: TracedBlock
    change: int


@dataclass(frozen=True, eq=False)
class ProgramTrace:
    """The recorded calls and memory of one observation.

    Attributes:
        calls: Calls of all stages. The head appears once, as one solver step or token of ``steps``.
        events: Allocations and releases of memory, in their order.
        cache_nbytes: Bytes of the blocks that contain the prefix's keys and values.
        context_nbytes: Bytes of all tensors that the prefix returns for the head, as a copy of them takes.
        steps: Number of solver steps, or of tokens.
    """

    calls: tuple[TracedCall, ...]
    events: tuple[Event, ...]
    cache_nbytes: int
    context_nbytes: int
    steps: int

    def of(self, stage: str) -> list[TracedCall]:
        return [call for call in self.calls if call.stage == stage]

    def flops(self, stage: str) -> int:
        return sum(call.flops for call in self.of(stage))

    def readers(self) -> dict[str, list[TracedCall]]:
        """For each parameter, return the calls that read it, by the name of the parameter."""
        found: dict[str, list[TracedCall]] = {}
        for call in self.calls:
            for operand in call.operands:
                if operand.weight:
                    found.setdefault(operand.weight, []).append(call)
        return found


class TracedAttention(TorchFunctionMode):
    """A mode in which attention runs as one kernel on the meta device too. Torch itself would divide it into products
    there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args[0].is_meta and not kwargs:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args)[0]  # noqa: SLF001
        return func(*args, **kwargs)


@dataclass(eq=False)
class TraceRecorder(TorchDispatchMode):
    """Records the operators that run while it is active. It identifies tensors by their storage, which exists as long
    as a view of it.

    Attributes:
        model: The model.
        stage: Name of the present stage.
        calls: Recorded calls.
        events: Recorded allocations and releases.
    """

    model: nn.Module
    stage: str = ""
    calls: list[TracedCall] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        # Key: a storage. Value: its memory block, while the storage exists.
        self._blocks: dict[int, TracedBlock] = {}
        # Key: a storage. Value: list of (first byte, name of the parameter), sorted by the byte.
        self._weights: dict[int, list[tuple[int, str]]] = {}
        tensors = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        for name, tensor in tensors:
            key = _key(tensor)
            self._blocks[key] = TracedBlock(tensor.untyped_storage().nbytes(), "weight")
            self._weights.setdefault(key, []).append(
                (int(tensor.storage_offset()) * tensor.element_size(), name)
            )
        for spans in self._weights.values():
            spans.sort()

    def adopt(self, tensors: Any, kind: str = "activation") -> int:
        """Register tensors that were made elsewhere, or change the kind of known tensors.

        Args:
            tensors: A nested structure of tensors.
            kind: New kind of their blocks.

        Returns:
            Total bytes of the blocks.
        """
        blocks = [self._block(leaf) for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        for block in blocks:
            block.kind = kind
        return sum(block.nbytes for block in dict.fromkeys(blocks))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = meta.run(func, args, kwargs)
        if not _is_view(func):
            self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        operator = func._overloadpacket.__name__  # noqa: SLF001 - there is no public way from an overload to its operator
        read, made = meta.tensors((*args, *kwargs.values())), meta.tensors((out,))
        operand_keys = {_key(tensor) for tensor in read}
        mutates = func._schema.is_mutable  # noqa: SLF001
        if not mutates and all(_key(tensor) in operand_keys for tensor in made):
            # The result is a view, although the operator's schema does not declare it.
            return
        counts = PRODUCTS.get(operator)
        flops = counts(args, out if isinstance(out, Tensor) else made[0]) if counts else 0
        floats = [tensor.dtype for tensor in (*read, *made) if tensor.is_floating_point()]
        call = TracedCall(
            operator, self.stage, flops, counts is not None, floats[0] if floats else made[0].dtype
        )
        inputs = [self._operand(tensor) for tensor in read]
        if operator in ROW_READERS:
            inputs[0] = TracedOperand(inputs[0].block, made[0].numel(), read[0].dtype, inputs[0].weight)
        new = [tensor for tensor in made if _key(tensor) not in self._blocks]
        outputs = [self._operand(tensor, written=True) for tensor in made]
        call.operands = (*inputs, *outputs)
        for tensor in new:
            self._blocks[_key(tensor)].maker = call
        if operator in ALLOCATIONS:
            return
        self._label(operator, inputs, outputs)
        self.calls.append(call)

    def _label(self, operator: str, inputs: list[TracedOperand], outputs: list[TracedOperand]) -> None:
        """Set the kinds of the result's memory blocks: a copy has the kind of its original. Attention's scores are
        found by their softmax, because nothing else distinguishes them.
        """
        if operator in SOFTMAXES and _mark_scores(inputs[0]):
            outputs[0].block.kind = "scores"
        elif operator in COPIES:
            cached = any(operand.block.kind == "cache" for operand in inputs)
            for operand in outputs:
                dtypes = (operand.dtype, *(o.unwidened for o in inputs))
                operand.block.copied = min(dtypes, key=lambda dtype: dtype.itemsize)
                if cached:
                    operand.block.kind = "cache"
                elif any(o.block.kind == "scores" for o in inputs):
                    operand.block.kind = "scores"
        elif operator not in PRODUCTS:
            sizes = {operand.elements for operand in inputs if operand.block.kind == "scores"}
            for operand in outputs:
                if operand.elements in sizes:
                    operand.block.kind = "scores"

    def _operand(self, tensor: Tensor, written: bool = False) -> TracedOperand:
        block = self._block(tensor)
        distinct = prod(
            size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        elements = distinct if tensor.numel() else 0
        return TracedOperand(block, elements, tensor.dtype, self._weight_name(tensor), written)

    def _weight_name(self, tensor: Tensor) -> str:
        spans = self._weights.get(_key(tensor))
        if not spans:
            return ""
        first = tensor.storage_offset() * tensor.element_size()
        return spans[max(0, bisect_right(spans, (first, "\uffff")) - 1)][1]

    def _block(self, tensor: Tensor) -> TracedBlock:
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 - the identity of a storage
        if key not in self._blocks:
            block = self._blocks[key] = TracedBlock(storage.nbytes())
            self.events.append(Event(self.stage, block, +1))
            weakref.finalize(storage, self._freed, key, block).atexit = False
        return self._blocks[key]

    def _freed(self, key: int, block: TracedBlock) -> None:
        del self._blocks[key]
        self.events.append(Event(self.stage, block, -1))


def _mark_scores(operand: TracedOperand) -> bool:
    """Follow a softmax's input back to the product of two activations, and mark all blocks on the way as scores."""
    chain, elements = [operand.block], operand.elements
    while (maker := chain[-1].maker) is not None and not maker.is_product:
        source = next(
            (o.block for o in maker.operands if not o.written and o.elements == elements and not o.weight),
            None,
        )
        if source is None:
            return False
        chain.append(source)
    if maker is None or any(o.weight for o in maker.operands):
        return False
    for block in chain:
        block.kind = "scores"
    return True


@cache
def _is_view(func: Any) -> bool:
    """Return True for an ATen overload that declares its results as views of its operands and writes nothing."""
    schema = func._schema  # noqa: SLF001
    return not schema.is_mutable and all(result.alias_info for result in schema.returns)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # noqa: SLF001 - the identity of a storage


@contextmanager
def recording(model: nn.Module) -> Iterator[TraceRecorder]:
    """Record everything inside the context. It does not work under inference mode, which does not decompose
    composite operators.
    """
    recorder = TraceRecorder(model)
    with torch.no_grad(), TracedAttention(), recorder:
        yield recorder


def trace(model: Model, shapes: Shapes, plan: Plan | None = None) -> ProgramTrace:
    """Run a model once, stage by stage, and record it.

    The values of the inputs do not matter. All cameras and tokens are valid.

    Args:
        model: The model, on the meta device or on a real one.
        shapes: Shapes of the inputs.
        plan: Plan of the same model, to trace the program of the planned engine. Operators that it moves out of the
            solver steps count for the prefix stage.

    Returns:
        The trace.
    """
    runs = model if plan is None else plan.model
    # The table of time embeddings is computed once and not for every observation, so it is not recorded.
    time_embeddings = None if plan is None else plan.time_embeddings(shapes.steps)
    inputs = Inputs.example(runs, shapes)
    noise = torch.zeros(1, *runs.noise_shape, device=inputs.state.device)
    with recording(runs) as recorder:
        recorder.stage = "vision"
        recorder.adopt((*inputs, noise, time_embeddings))
        image_tokens = runs.embed_images(inputs.pixels)
        recorder.stage = "prefix"
        context = runs.read(image_tokens, *inputs[1:])
        cache = recorder.adopt(runs.cache(context), "cache")
        copied = sum(leaf.nbytes for leaf in tree_leaves(context) if isinstance(leaf, Tensor))
        recorder.stage = "head"
        schedule = runs.time_embeddings(shapes.steps) if plan is None else plan.schedule(shapes.steps)
        runs.run_head(noise, shapes.steps, schedule, context)
        # Copy the events before the tensors of this function are freed.
        events = tuple(recorder.events)
    return ProgramTrace(tuple(recorder.calls), events, cache, copied, runs.head_runs(shapes.steps))
