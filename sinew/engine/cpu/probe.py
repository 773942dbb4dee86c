"""Measure which of two engines runs a bundle's kind of layers faster on this machine: engine cpu or ONNX Runtime.

A layer of a vision transformer and one of an action head (six matrix products and an attention, random weights) are
built for both engines, in the precisions of the bundle's recipe, and run in turn. Their times are weighed by what the
bundle has of them. Times are CPU seconds of the process, all threads together, because a busy machine changes them
least. That takes a second or two, once: the answer is kept in ``$XDG_CACHE_HOME/sinew/probes`` for this processor,
these libraries and this number of threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sinew import __version__
from sinew.bundle import Bundle
from sinew.system import machine, progress

ROUNDS = 4
TIE = 1.05  # engine cpu starts at once and keeps 8 bits: it has to be slower by more than this to be passed over


@dataclass(frozen=True, slots=True)
class ProbeBlock:
    """Tokens, width, inner width and heads of a layer."""

    tokens: int
    width: int
    inner: int
    heads: int

    @property
    def weights(self) -> int:
        return 4 * self.width**2 + 2 * self.width * self.inner


MANY, FEW = ProbeBlock(512, 768, 3072, 12), ProbeBlock(50, 720, 2048, 12)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """CPU seconds of each engine for the layers of one chunk, as estimated from the blocks."""

    cpu: float
    onnx: float

    @property
    def text(self) -> str:
        """Return the finding in words."""
        return (
            f"measured on this machine: cpu {1e3 * self.cpu:.0f}, onnx {1e3 * self.onnx:.0f} CPU ms"
            " for the layers of vision and head"
        )

    @property
    def onnx_wins(self) -> bool:
        return self.cpu > TIE * self.onnx


def measure(bundle: Bundle, recipe: Mapping[str, str], threads: int | None) -> ProbeResult:
    """Return the times for a chunk of ``bundle``. Weights are counted by component; the language model, which reads
    a few hundred tokens once, is left out. Raises ImportError where onnx or onnxruntime is missing."""
    count = machine.recommended_threads()[0] if threads is None else threads
    spec, image = bundle.manifest.spec, bundle.manifest.processing.image
    patches = (image.height // 16) * (image.width // 16)
    sizes = matrices(bundle)
    times = {
        "vision": sizes["vision"] / MANY.weights * spec.views * patches / MANY.tokens,
        "head": sizes["head"] / FEW.weights * spec.solver_steps * spec.chunk_size / FEW.tokens,
    }
    total = {"cpu": 0.0, "onnx": 0.0}
    for component, block in (("vision", MANY), ("head", FEW)):
        for engine, seconds in block_seconds(block, recipe.get(component, "fp32"), count).items():
            total[engine] += times[component] * seconds
    return ProbeResult(**total)


def matrices(bundle: Bundle) -> Counter[str]:
    """Return how many numbers the matrices of each component have, by the components that the model names."""
    from sinew.models import model_class

    cls = model_class(bundle.manifest.architecture)
    sizes: Counter[str] = Counter()
    for name, info in bundle.infos.items():
        if len(info.shape) == 2:
            sizes[cls.component_of(name)] += math.prod(info.shape)
    return sizes


def block_seconds(block: ProbeBlock, kind: str, threads: int) -> dict[str, float]:
    """Return the CPU seconds of each engine for one block in precision ``kind``, measured now unless they are kept."""
    import torch

    from sinew.engine.cpu.kernels import build
    from sinew.engine.cpu.kernels.library import extension
    from sinew.engine.onnx.providers import runtime

    kernels = hashlib.sha256(b"".join(source.read_bytes() for source in sorted(build.SOURCES.iterdir())))
    key = [
        *(__version__, asdict(block), kind, threads, machine.cpu_model(), sorted(machine.cpu_flags())),
        *(torch.__version__, runtime().__version__, extension().kernels, kernels.hexdigest()),
    ]
    path = (
        machine.cache_folder("probes") / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    )
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        found = {engine: float(kept[engine]) for engine in ("cpu", "onnx")}
        if all(0 < seconds < math.inf for seconds in found.values()):
            return found
    except (OSError, ValueError, TypeError, KeyError):
        pass
    with progress.task("measuring engines cpu and onnx on this machine, once"):
        found = _run_in_turn(block, kind, threads)
    with contextlib.suppress(OSError):  # a folder that is not for writing: it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"key": key, "seconds": found}) + "\n", encoding="utf-8")
        partial.replace(path)  # another process may do the same
    return found


def _run_in_turn(block: ProbeBlock, kind: str, threads: int) -> dict[str, float]:
    import numpy as np
    import torch

    random = np.random.default_rng(0)
    x = random.standard_normal((1, block.tokens, block.width), np.float32)
    shapes = [(block.width, block.width)] * 4 + [(block.width, block.inner), (block.inner, block.width)]
    weights = [random.standard_normal(shape, np.float32) / shape[0] ** 0.5 for shape in shapes]  # [K, N]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        calls = {"cpu": _on_cpu(block, kind, x, weights), "onnx": _on_onnx(block, kind, x, weights, threads)}
        best = dict.fromkeys(calls, math.inf)
        for index in range(ROUNDS + 1):
            for name, call in calls.items():
                begin = time.process_time()
                call()
                if index:  # the first warms up
                    best[name] = min(best[name], time.process_time() - begin)
    finally:
        torch.set_num_threads(before)
    return best


def _on_cpu(block: ProbeBlock, kind: str, x: Any, weights: list[Any]) -> Callable[[], object]:
    import torch

    from sinew.bundle.quant import quantize
    from sinew.engine.cpu.kernels.float_kernels import attend
    from sinew.engine.cpu.kernels.library import extension
    from sinew.layers.stores.lowbit import PANELS, lay_out, lowbit_linear, lowbit_linears

    rows = torch.from_numpy(x)
    heads = (block.heads, block.width // block.heads)
    biases = [torch.from_numpy(weight[0].copy()) for weight in weights]
    if kind == "fp32":
        wide = [torch.from_numpy(weight.T.copy()) for weight in weights]

        def products(y: Any, *layers: int) -> list[Any]:
            return [torch.nn.functional.linear(y, wide[layer], biases[layer]) for layer in layers]

    else:
        stored: list[Any] = []
        order = PANELS if extension().panels else "int8"  # as the engine has them
        for weight in weights:
            codes, scale = map(torch.from_numpy, quantize(weight.T.copy(), "int8"))
            stored.append((lay_out(codes) if order == PANELS else codes, scale))

        def products(y: Any, *layers: int) -> list[Any]:
            if len(layers) == 1:
                code, scale = stored[layers[0]]
                return [lowbit_linear(y, code, scale, biases[layers[0]], order)]
            codes, scales = zip(*(stored[layer] for layer in layers), strict=True)
            return lowbit_linears(y, codes, scales, [biases[layer] for layer in layers], order)

    def run() -> object:
        with torch.inference_mode():
            q, k, v = (part.unflatten(-1, heads) for part in products(rows, 0, 1, 2))
            (y,) = products(attend(q, k, v, None, kind != "fp32"), 3)
            for layer in (4, 5):
                (y,) = products(y, layer)
            return y

    return run


def _on_onnx(block: ProbeBlock, kind: str, x: Any, weights: list[Any], threads: int) -> Callable[[], object]:
    from onnx import TensorProto, helper, numpy_helper

    from sinew.engine.onnx.graphs import COMPONENT
    from sinew.engine.onnx.providers import CPU, runtime
    from sinew.engine.onnx.quantize import quantize_products, weight_bits
    from sinew.engine.onnx.sessions import session_options

    nodes = []
    chain = [("x", "q"), ("x", "k"), ("x", "v"), ("attended", "o"), ("o", "h"), ("h", "y")]
    for index, (source, result) in enumerate(chain):
        node = helper.make_node("MatMul", [source, f"w{index}"], [f"{result}.product"])
        node.metadata_props.add(key=COMPONENT, value="vision")
        nodes += [node, helper.make_node("Add", [f"{result}.product", f"b{index}"], [result])]
        if result == "v":
            join = helper.make_node(
                "MultiHeadAttention", ["q", "k", "v"], ["attended"], domain="com.microsoft"
            )
            join.attribute.append(helper.make_attribute("num_heads", block.heads))
            nodes.append(join)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, block.tokens, block.width])
        for name in "xy"
    ]
    stored = [numpy_helper.from_array(weight, f"w{index}") for index, weight in enumerate(weights)]
    stored += [numpy_helper.from_array(weight[0], f"b{index}") for index, weight in enumerate(weights)]
    graph = helper.make_graph(nodes, "block", ends[:1], ends[1:], stored)
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    if kind != "fp32":
        quantize_products(model, {"vision": kind}, weight_bits()[0])
    session = runtime().InferenceSession(model.SerializeToString(), session_options(threads), providers=[CPU])
    return lambda: session.run(None, {"x": x})
