"""Tuning by running: the engine's program, call by call, with every problem that it asks for timed where it is asked.

So the problems are the engine's own and no list of them has to be kept. A linear layer's weight is copied until the
copies exceed any cache, because the next call of the real program finds its weight in memory too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sinew.engine.cuda.fp8 import linear as fp8
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.fused.library import Library
from sinew.engine.cuda.fused.ops import Ops, References, ResidualStream
from sinew.engine.cuda.fused.rows import Operand, RowKernels, RowOps, RowReferences, Target
from sinew.engine.cuda.graphs import Kept
from sinew.engine.cuda.kernels import (
    activate,
    choices,
    fp8_product,
    fp8_quantize,
    preprocess,
    rope,
    row_norm,
    tuning,
)
from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.engine.cuda.kernels.launch import Specialised, Tile, collecting
from sinew.engine.cuda.tune.ahead import CollectedTrials, compile_all
from sinew.engine.cuda.tune.trials import Trials, TuningProblem

log = logging.getLogger(__name__)
STREAMED = 256 << 20  # bytes of weights to rotate through
COPIES = 64
WITH_WEIGHT = (
    "norm_linear",
    "gated_mlp",
    "qkv_rope",
    "splitk_linear",
    "stream_linear",
)  # as their second argument


class Forced(Kernels):
    """Triton's kernels, whatever was chosen, with a given tile; notes what a call is kept under."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.tile: Tile | None = None
        self.asked: TuningProblem | None = None
        self.broken: set[TuningProblem] = set()  # their own tile does not run

    def launch(self, kernel, dims, like, prepare, other, out):
        self.asked = TuningProblem(kernel, dims, like.dtype)
        if self.tile is None and self.asked in self.broken:
            raise tuning.NoTile(str(self.asked))  # and do not compile it again, layer after layer
        prepare(self.tile)()
        return out


class TunedOps(Ops):
    """In place of an engine's ``ops``: answers as the kernels do, and times each new problem once.

    ways: what our kernels compete with, by the names that :attr:`Kernels.others` has; those by default. Their row-wise
    passes are tuned before they compete.
    """

    def __init__(self, trials: Trials | CollectedTrials, ways: Mapping[str, Ops] | None = None):
        self.trials, self.kernels, self.references = trials, Forced(trials.device), References()
        self.rows = TunedRows(trials)
        self.ways: Mapping[str, Ops] = self.kernels.others if ways is None else ways
        for ops in self.ways.values():
            if isinstance(ops, Library):
                ops.rows = self.rows

    def norm_linear(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("norm_linear", args, options)

    def gated_mlp(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("gated_mlp", args, options)

    def qkv_rope(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._tuned("qkv_rope", args, options)

    def splitk_linear(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("splitk_linear", args, options)

    def stream_linear(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
        **rest: Any,
    ) -> ResidualStream:
        """Timed as a whole. What comes behind it is asked in the form that an engine would ask it in: without squares
        where a library's product was faster."""
        options = {"scale": scale, "dtype": dtype, **rest}
        stream = self._tuned("stream_linear", (x, weight), options)
        problem = self.kernels.asked
        assert problem is not None
        way, _ = choices.choose(*problem, self.trials.device, "triton")
        return ResidualStream(stream.rows) if way in self.ways else stream

    def packed_attention(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("packed_attention", args, options)

    def ada_rms(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("ada_rms", args, options)

    def preprocess(self, frames: Tensor, resize: Any, patch: int, out: Tensor) -> None:
        problem = TuningProblem("preprocess", (len(frames), *resize.target), out.dtype)
        if self.trials.begin(problem):
            ours, theirs = torch.zeros_like(out), torch.zeros_like(out)

            def run(tile: Tile, _: int) -> Tensor:
                preprocess.prepare(frames, resize, ours, patch=patch, tile=tile)()
                return ours

            def wanted() -> Tensor:
                self.references.preprocess(frames, resize, patch, theirs)
                return theirs

            self.trials.time(problem, run, wanted)
        self.kernels.preprocess(frames, resize, patch, out)

    def _tuned(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        problem, result = self._asked(name, args, options)
        if not self.trials.begin(problem, bool(self.ways)):
            return result
        sets = [args] if isinstance(self.trials, CollectedTrials) else _sets(name, args)

        def call(ops: Ops, i: int) -> Any:
            return getattr(ops, name)(*sets[i], **options)

        def run(tile: Tile, i: int) -> Any:
            self.kernels.tile = tile
            try:
                return call(self.kernels, i)
            finally:
                self.kernels.tile = None

        # A way that inherits the operation from a later one is that one.
        own = {getattr(type(ops), name): way for way, ops in self.ways.items()}
        others = {way: partial(call, self.ways[way]) for way in own.values()}
        self.trials.time(problem, run, lambda: call(self.references, 0), others, len(sets))
        return result

    def _asked(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[TuningProblem, Any]:
        """The problem that a call is, and its answer. Where the default tile does not run, that is the reference's."""
        self.kernels.asked = None
        try:
            result = getattr(self.kernels, name)(*args, **options)
        except Exception:
            if self.kernels.asked is None or not _answers(self.trials.device):
                raise
            self.kernels.broken.add(self.kernels.asked)
            result = getattr(self.references, name)(*args, **options)
        assert self.kernels.asked is not None, f"{name} does not go through Kernels.launch"
        return self.kernels.asked, result


class TunedRows(RowOps):
    """In place of an engine's ``rows``: its passes, and products in e4m3."""

    def __init__(self, trials: Trials | CollectedTrials):
        self.trials, self.kernels, self.references = trials, RowKernels(), RowReferences()

    def norm(self, x, to, *, branch=None, **norm):
        options = {"branch": branch, "dtype": to.dtype, "x_scale": to.scale, **norm}
        run = partial(row_norm.row_norm, x, **options)
        dims = row_norm.problem(len(x), x.shape[1], norm.get("kind", "rms"), branch, to.dtype)
        self._pass("row_norm", dims, x, run, partial(row_norm.reference, x, **options))
        return self.kernels.norm(x, to, branch=branch, **norm)

    def activate(self, packed, to, *, activation, gated, bias=None):
        given = {"activation": activation, "gated": gated, "bias": bias}
        options = {"dtype": to.dtype, "x_scale": to.scale, **given}
        dims = activate.problem(len(packed), packed.shape[1] // (2 if gated else 1), gated, to.dtype)
        run = partial(activate.activate, packed, **options)
        self._pass("activate", dims, packed, run, partial(activate.reference, packed, **options))
        return self.kernels.activate(packed, to, **given)

    def convert(self, x, to):
        if to.dtype == E4M3:
            run = partial(fp8_quantize.fp8_quantize, x, x_scale=to.scale)
            reference = partial(fp8_quantize.reference, x, x_scale=to.scale)
            self._pass("fp8_quantize", tuple(x.shape), x, run, reference)
        return self.kernels.convert(x, to)

    def rope(self, packed, cos, sin, heads, bias=None):
        D = 2 * cos.shape[-1]

        def run(tile: Tile) -> tuple[Tensor, ...]:
            outs = tuple(packed.new_empty(len(packed), count, D) for count in (heads[0], heads[1], heads[1]))
            rope.rope(packed, cos, sin, *outs, bias=bias, tile=tile)
            return outs

        reference = partial(self.references.rope, packed, cos, sin, heads, bias)
        self._pass("rope", (*packed.shape, D), packed, run, reference)
        return self.kernels.rope(packed, cos, sin, heads, bias)

    def product(self, operand: Operand, linear: Any, bias: bool = True) -> Tensor:
        if operand.scales is not None:
            self._narrow(operand.data, operand.scales, linear.weight, linear.bias if bias else None)
        return super().product(operand, linear, bias)

    def _pass(
        self,
        kernel: str,
        dims: tuple[int, ...],
        x: Tensor,
        run: Callable[..., Any],
        reference: Callable[[], Any],
    ) -> None:
        problem = TuningProblem(kernel, dims, x.dtype)
        if self.trials.begin(problem):
            self.trials.time(problem, lambda tile, _: run(tile=tile), reference)

    def _narrow(self, data: Tensor, scales: Tensor, weight: fp8.Fp8Weight, bias: Tensor | None) -> None:
        problem = TuningProblem("fp8_product", (len(data), *weight.data.shape), E4M3)
        if not self.trials.begin(problem, has_others=True):
            return
        count = 1 if isinstance(self.trials, CollectedTrials) else _copies(weight.data)
        copies = [replace(weight, data=weight.data.clone()) for _ in range(count - 1)]
        weights = [weight, *copies]
        options: dict[str, Any] = {"bias": bias, "dtype": weight.dtype}

        def run(tile: Tile, i: int) -> Tensor:
            w = weights[i]
            return fp8_product.fp8_product(data, scales, w.data, w.scale, **options, tile=tile)

        def other(way: Callable[..., Tensor], i: int) -> Tensor:
            return way(data, scales, weights[i], bias)

        def reference() -> Tensor:
            return fp8_product.reference(data, scales, weight.data, weight.scale, **options)

        others = {name: partial(other, way) for name, way in fp8.WITH.items() if name != "triton"}
        self.trials.time(problem, run, reference, others, len(weights))


def tune(engine: Any, run: Callable[[], Any], trials: Trials, ways: Mapping[str, Ops] | None = None) -> None:
    """Tune everything that one call of ``run`` asks of ``engine`` (made with ``graph=False``); it is left as it was.

    ways: as :class:`TunedOps`. The engine's model may have layers in FP8. On a GPU, what will be timed is compiled
    first, on all cores. The head comes first: its launches run once per step and tiles matter most there, so they
    must not be what time runs out for.
    """
    if trials.device.type == "cuda" and trials.left() > 0:
        compile_ahead(engine, run, trials, ways)
    with _in_place(engine, TunedOps(trials, ways)):
        _head_first(engine.model, run, trials)


def _head_first(model: Any, run: Callable[[], Any], trials: Trials | CollectedTrials) -> None:
    """Call ``run`` twice: problems begin inside the head alone, then everywhere."""
    act, own = model.act, vars(model).get("act")

    def active(*arguments: Any) -> Tensor:
        trials.paused = False
        try:
            return act(*arguments)
        finally:
            trials.paused = True

    model.act, trials.paused = active, True
    try:
        run()
    finally:
        trials.paused = False
        if own is None:
            del model.act  # the class has it
        else:
            model.act = own
    run()


def compile_ahead(
    engine: Any, run: Callable[[], Any], trials: Trials, ways: Mapping[str, Ops] | None = None
) -> None:
    """Compile for at most half of the time that is left. A launch compiles whatever it does not find."""
    start = time.monotonic()
    try:
        found = gather(engine, run, trials, ways)
        capability = tuning.capability(trials.device)
        until = trials.left() / 2 - (time.monotonic() - start)
        compile_all(
            found,
            capability,
            max(until, 0.0),
            lambda done, of: trials.trying(f"compiled {done} of {of} launches"),
        )
    except Exception as error:  # noqa: BLE001 - tuning meets it again, problem by problem
        log.warning("not compiled ahead: %s: %s", type(error).__name__, error)


def gather(
    engine: Any, run: Callable[[], Any], trials: Trials, ways: Mapping[str, Ops] | None = None
) -> dict[str, Specialised]:
    """Return what :func:`tune` would launch, each kind once. Nothing is launched; what ``run`` returns is undefined."""
    gathering = CollectedTrials(trials.device, trials.again)
    with collecting() as found, _in_place(engine, TunedOps(gathering, ways)):
        _head_first(engine.model, run, gathering)
    return found


@contextmanager
def _in_place(engine: Any, ops: TunedOps) -> Iterator[None]:
    modules = list(engine.model.modules())
    with ExitStack() as undo:

        def put(holder: Any, name: str, value: Any) -> None:
            undo.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)

        put(engine, "programs", Kept(engine.programs.limit, engine.programs.make))  # programs keep their ops
        put(engine, "ops", ops)
        for module in modules:
            for name, kind, tuned in (("ops", Ops, ops), ("rows", RowOps, ops.rows)):
                if isinstance(getattr(module, name, None), kind):
                    put(module, name, tuned)
            if isinstance(module, fp8.Fp8Linear):  # those that no row-wise layer multiplies
                undo.callback(module.register_forward_pre_hook(partial(_note, ops.rows)).remove)
        yield


def _note(rows: TunedRows, module: Any, arguments: tuple[Any, ...]) -> None:
    x = arguments[0].reshape(-1, module.in_features)
    rows.product(rows.convert(x, Target.of(module)), module)


def _sets(name: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments, and the same with copies of the weight."""
    if name not in WITH_WEIGHT:
        return [args] * 8
    weight: Tensor = args[1]
    return [args, *((args[0], weight.clone(), *args[2:]) for _ in range(_copies(weight) - 1))]


def _copies(weight: Tensor) -> int:
    return max(1, min(COPIES, STREAMED // weight.nbytes))


def _answers(device: torch.device) -> bool:
    """Return True if the device still answers: an illegal access stays in its context."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
