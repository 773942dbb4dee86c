"""Tuning by running: the engine's program, call by call, with every product it asks for timed where it is asked.

So the problems are the engine's own and no list of them has to be kept. Each tile's answer is compared with the
twin's before it is timed, and one that differs is never chosen. A linear layer's weight is copied until the
copies exceed any cache, because the next call of the real program finds its weight in memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sinew.engine.cuda.launches import Kernels
from sinew.engine.cuda.ops import Ops, Plain, Twins
from sinew.engine.kernels import choices, fp8, fp8_product, fp8_quantize, tuning
from sinew.engine.kernels.launch import Tile

STREAMED = 256 << 20  # bytes of weights to rotate through
COPIES = 64
TOLERANCE = 1e-2  # relative L2 of a tile's answer against the twin's, in bfloat16
WITH_WEIGHT = ("norm_linear", "gated_mlp", "qkv_rope", "splitk_linear")  # as their second argument
Measure = Callable[[Sequence[Callable[[], Any]]], float]  # milliseconds per call
Row = dict[str, Any]


class Forced(Kernels):
    """Triton's kernels, whatever was chosen, with a given tile; notes what a call is kept under."""

    tile: Tile | None = None
    asked: tuple[str, tuple[int, ...], torch.dtype] | None = None

    def launch(self, kernel, dims, like, prepare, plain, out):
        self.asked = (kernel, dims, like.dtype)
        prepare(self.tile)()
        return out


class Tuner(Ops):
    """In place of an engine's ``ops``: answers as the kernels do, and times each new problem once.

    measure: of calls that are run one behind the other. left: seconds until no new problem is begun.
    emit: gets a row per problem.
    """

    def __init__(
        self, device: torch.device, measure: Measure, left: Callable[[], float], emit: Callable[[Row], None]
    ):
        self.device, self.measure, self.left, self.emit = device, measure, left, emit
        self.kernels, self.plain, self.twins = Forced(device), Plain(), Twins()
        self.done: set[Any] = set()
        self.skipped: set[Any] = set()
        self.known: set[Any] = set()  # from an earlier run on this machine

    def norm_linear(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("norm_linear", args, options)

    def gated_mlp(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("gated_mlp", args, options)

    def qkv_rope(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._tuned("qkv_rope", args, options)

    def splitk_linear(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("splitk_linear", args, options)

    def packed_attention(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("packed_attention", args, options)

    def ada_rms(self, *args: Any, **options: Any) -> Tensor:
        return self._tuned("ada_rms", args, options)

    def preprocess(self, *args: Any, **options: Any) -> None:
        self.kernels.preprocess(*args, **options)

    def _tuned(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.kernels.tile = None
        result = getattr(self.kernels, name)(*args, **options)
        assert self.kernels.asked is not None
        problem = self.kernels.asked
        if problem in self.done or problem in self.known:
            return result
        if is_kept(*problem, self.device):
            self.known.add(problem)
            return result
        if self.left() <= 0:
            self.skipped.add(problem)
            return result
        self.done.add(problem)
        try:
            self._time(name, problem, _sets(name, args), options)
        except Exception as error:  # noqa: BLE001 - its default stays; the row says why
            why = f"{type(error).__name__}: {error}"[:400]
            self.emit({"kernel": problem[0], "dims": list(problem[1]), "reason": f"not tuned: {why}"})
        return result

    def _time(self, name: str, problem: Any, sets: list[tuple[Any, ...]], options: dict[str, Any]) -> None:
        kernel, dims, dtype = problem
        wanted = getattr(self.twins, name)(*sets[0], **options)

        def with_tile(tile: Tile) -> float:
            self.kernels.tile = tile
            agree(getattr(self.kernels, name)(*sets[0], **options), wanted)
            return over(self.kernels)

        def over(ops: Ops) -> float:
            return self.measure([lambda args=args: getattr(ops, name)(*args, **options) for args in sets])

        entry = tuning.tune(kernel, dims, dtype, self.device, lambda tile: tile, with_tile)  # type: ignore[arg-type, return-value]
        best = Tile(**entry["tile"])
        ways = {"triton": lambda: with_tile(best), "torch": lambda: over(self.plain)}
        choice = choices.pick(kernel, dims, dtype, self.device, ways, lambda way: way())
        self.kernels.tile = None
        self.emit(
            {
                "kernel": kernel,
                "dims": list(dims),
                "tile": entry["tile"],
                "us": 1e3 * entry["ms"],
                "default_us": 1e3 * entry["default_ms"],
                "way": choice["way"],
                "reason": _reason(choice, entry),
            }
        )


def agree(got: Any, wanted: Any) -> None:
    """Raise ArithmeticError unless a kernel's tensors are its twin's, each up to TOLERANCE."""
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for ours, theirs in pairs:
        a, b = ours.float(), theirs.float()
        error = float((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float32).tiny))
        if a.numel() and not error <= TOLERANCE:  # NaN is not
            raise ArithmeticError(f"relative L2 of {error:.2g} against the twin, expected {TOLERANCE}")


def _reason(choice: Row, entry: Row) -> str:
    left_out = entry["failed"]
    return choice["reason"] + (f"; left out: {'; '.join(left_out)}"[:600] if left_out else "")


def is_kept(kernel: str, dims: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether tile and choice of a problem were measured before."""
    tile, way = tuning.choose(kernel, dims, dtype, device), choices.choose(kernel, dims, dtype, device, "")
    return tile[1].startswith("tuned") and way[1].startswith("measured")


def _sets(name: str, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments, and the same with copies of the weight."""
    if name not in WITH_WEIGHT:
        return [args] * 8
    weight: Tensor = args[1]
    copies = max(1, min(COPIES, STREAMED // weight.nbytes))
    return [args, *((args[0], weight.clone(), *args[2:]) for _ in range(copies - 1))]


def tune(engine: Any, run: Callable[[], Any], measure: Measure, left: Callable[[], float], emit) -> Row:
    """Tune everything that one call of ``run`` asks of ``engine`` (made with ``graph=False``)."""
    tuner = Tuner(engine.device, measure, left, emit)
    held = [module for module in engine.model.modules() if isinstance(getattr(module, "ops", None), Ops)]
    before = engine.ops
    for holder in (engine, *held):
        holder.ops = tuner
    try:
        run()
    finally:
        for holder in (engine, *held):
            holder.ops = before
    left_out = len(tuner.skipped - tuner.done)
    return {"tuned": len(tuner.done), "known": len(tuner.known), "left out for lack of time": left_out}


@torch.inference_mode()
def tune_fp8(engine: Any, run: Callable[[], Any], measure: Measure, left: Callable[[], float], emit) -> Row:
    """The same for the layers in FP8: the kernel's tiles, then the kernel against cuBLASLt."""
    found: dict[tuple[int, ...], tuple[fp8.Fp8Linear, Tensor]] = {}

    def note(module: Any, arguments: tuple[Any, ...]) -> None:
        x = arguments[0].reshape(-1, module.in_features)
        found.setdefault((len(x), module.out_features, module.in_features), (module, x.clone()))

    layers = [module for module in engine.model.modules() if isinstance(module, fp8.Fp8Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    done = 0
    for dims, (layer, x) in found.items():
        if left() <= 0:
            break
        try:
            row = _time_fp8(layer, x, measure)
        except Exception as error:  # noqa: BLE001 - its default stays; the row says why
            row = {"reason": f"not tuned: {type(error).__name__}: {error}"[:400]}
        emit({"kernel": "fp8_product", "dims": list(dims), **row})
        done += 1
    return {"tuned": done, "left out for lack of time": len(found) - done}


def _time_fp8(layer: fp8.Fp8Linear, x: Tensor, measure: Measure) -> Row:
    """As ``fp8.tune``, with weights that rotate, and each tile compared with its twin."""
    weight, x_scale, bias, device = layer.weight, layer.x_scale, layer.bias, x.device
    copies = max(1, min(COPIES, STREAMED // weight.data.nbytes))
    weights = [weight, *(replace(weight, data=weight.data.clone()) for _ in range(copies - 1))]
    dims = (len(x), *weight.data.shape)
    data, scales = fp8_quantize.fp8_quantize(x, x_scale=x_scale)
    converted = fp8_quantize.twin(x, x_scale=x_scale)[0]
    wanted = fp8_product.twin(data, scales, weight.data, weight.scale, bias=bias, dtype=weight.dtype)
    out = torch.empty(dims[0], dims[1], dtype=weight.dtype, device=device)

    def convert(tile: Tile) -> float:
        launch = fp8_quantize.prepare(x, data, scales, x_scale=x_scale, tile=tile)
        launch()
        agree(data, converted)
        return measure([launch] * 8)

    def multiply(tile: Tile) -> float:
        launches = [
            fp8_product.prepare(data, scales, w.data, w.scale, out, bias=bias, tile=tile) for w in weights
        ]
        launches[0]()
        agree(out, wanted)
        return measure(launches)

    def over(way: Callable[..., Tensor]) -> float:
        agree(way(x, weight, x_scale, bias), wanted)
        return measure([lambda w=w: way(x, w, x_scale, bias) for w in weights])

    tuning.tune("fp8_quantize", tuple(x.shape), x.dtype, device, lambda tile: tile, convert)  # type: ignore[arg-type, return-value]
    data.copy_(converted)  # whatever the last tile wrote
    entry = tuning.tune("fp8_product", dims, fp8.E4M3, device, lambda tile: tile, multiply)  # type: ignore[arg-type, return-value]
    ways = {name: partial(over, way) for name, way in fp8.WITH.items()}
    choice = choices.pick("fp8_product", dims, fp8.E4M3, device, ways, lambda way: way())
    return {"tile": entry["tile"], "way": choice["way"], "reason": _reason(choice, entry)}
