"""Choose the execution providers of ONNX Runtime (its backends for different hardware), open graphs with them, and
check which providers a session really uses.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sinew.core import BundleError, SinewError
from sinew.core.extras import MissingPackageError

log = logging.getLogger(__name__)

CPU, OPENVINO = "CPUExecutionProvider", "OpenVINOExecutionProvider"
# Key: Sinew's short name of an execution provider. Value: ONNX Runtime's name.
SHORT = {
    "cpu": CPU,
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": OPENVINO,
    "coreml": "CoreMLExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "directml": "DmlExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}
# Operators of ONNX and ONNX Runtime that multiply matrices, for example MatMulNBits,
# QLinearConv and MultiHeadAttention.
PRODUCTS = re.compile("MatMul|Gemm|Conv|Attention|Einsum")
LEFT = 0.1  # A provider may leave this share of the matrix products to other providers without a warning.


def runtime() -> Any:
    # ONNX Runtime 1.31 for Linux stores usage data (an id and a list of sessions) for its makers. This setting prevents
    # it.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError:
        raise MissingPackageError("engine onnx", "onnxruntime") from None
    return onnxruntime


def choose(names: Sequence[str] = ()) -> tuple[tuple[str, ...], str]:
    """Return the execution providers in order of preference, and the reason for this choice.

    Without names, the provider is the CPU. Other providers are not measured on this machine and compute other bits, so
    the user must request them. The CPU is always the last provider, for operators that the other providers lack.

    Args:
        names: ONNX Runtime's names or short names.

    Raises:
        SinewError: The installed ONNX Runtime does not offer a provider.
    """
    offered = runtime().get_available_providers()
    if not names:
        others = ", ".join(name for name in offered if name != CPU)
        reason = (
            f"the default; on request there are {others}"
            if others
            else "the only provider of this onnxruntime"
        )
        return (CPU,), reason
    requested = [SHORT.get(name.lower(), name) for name in names]
    if missing := [name for name in requested if name not in offered]:
        raise SinewError(
            f"provider {', '.join(missing)}: this onnxruntime offers {', '.join(offered)} only; choose one of them, or"
            " install an onnxruntime with your provider"
        )
    reason = "asked for"
    if CPU not in requested:
        requested.append(CPU)
        reason += f"; {CPU} for operators that it lacks"
    return tuple(dict.fromkeys(requested)), reason


def loaded(session: Any, wanted: Sequence[str]) -> list[str]:
    """Return the providers that a session really uses.

    If the libraries of a provider do not load, ONNX Runtime continues without this provider. Sinew raises an error.

    Raises:
        SinewError: A requested provider did not load.
    """
    names = session.get_providers()
    if missing := [name for name in wanted if name not in names]:
        raise SinewError(
            f"provider {', '.join(missing)}: ONNX Runtime could not load this provider; check that its libraries are"
            " installed"
        )
    return names


def assigned(sessions: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Count for each provider the nodes that it computes in all graphs, by operator.

    The result is {} if this version of ONNX Runtime does not report the assignment.
    """
    counts: dict[str, Counter[str]] = {}
    for session in sessions.values():
        # ONNX Runtime reports the assignment since version 1.24.
        if not hasattr(session, "get_provider_graph_assignment_info"):
            return {}
        for part in session.get_provider_graph_assignment_info():
            counts.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return counts


def assigned_text(found: Mapping[str, Counter[str]]) -> str:
    """Return as text each provider's share of the nodes, and its number of matrix products.

    Minor providers are listed with their operators.
    """
    if not found:
        return (
            f"onnxruntime {runtime().__version__} does not report which provider runs which nodes (1.24 does)"
        )
    nodes, products = sum(map(Counter.total, found.values())), sum(map(_products, found.values()))
    ordered = sorted(found.items(), key=lambda item: -item[1].total())
    texts = []
    for index, (name, kinds) in enumerate(ordered):
        text = (
            f"{name} {kinds.total() / nodes:.1%} of {nodes} nodes, {_products(kinds)} of {products} products"
        )
        least = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(6))
        texts.append(f"{text} ({least}{', ...' if len(kinds) > 6 else ''})" if index else text)
    return "; ".join(texts)


def check_assigned(found: Mapping[str, Counter[str]], wanted: Sequence[str]) -> None:
    """Check the share of the graphs that the first requested provider computes.

    The function logs a warning if other providers compute more than a tenth of the products, which are most of the
    arithmetic.

    Raises:
        SinewError: The first provider computes no node.
    """
    if not found or wanted[0] == CPU:
        return
    mine = found.get(wanted[0], Counter())
    if not mine:
        raise SinewError(
            f"provider {wanted[0]}: this provider runs none of the graphs' nodes: {assigned_text(found)}; choose"
            " another one"
        )
    products = sum(map(_products, found.values()))
    if _products(mine) < (1 - LEFT) * products:
        log.warning(
            "provider %s leaves many products to other providers: %s",
            wanted[0],
            assigned_text(found),
        )


def _products(kinds: Counter[str]) -> int:
    return sum(count for kind, count in kinds.items() if PRODUCTS.search(kind))


def open_axis(node: Any) -> bool:
    """Return True if the first axis of an input or output may have any size. Its size is then a name instead of a
    number."""
    return bool(node.shape) and not isinstance(node.shape[0], int)


def open_session(ort: Any, path: Path, options: Any, providers: Sequence[str]) -> Any:
    """Open one graph in ONNX Runtime, and return the session that runs it.

    Raises:
        BundleError: ONNX Runtime cannot open the graph.
    """
    try:
        return ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # noqa: BLE001 - it has a class for each status, and none above them
        what = (str(error).splitlines() or [""])[0][:300]
        raise BundleError(
            f"{path}: ONNX Runtime cannot open this file ({type(error).__name__}: {what}); export the bundle"
            " again"
        ) from None


def session_options(
    threads: int, lent: Mapping[str, np.ndarray] | None = None, providers: Sequence[str] = ()
) -> Any:
    """Return the options for a session of this engine.

    Args:
        threads: Number of threads.
        lent: Constants that are not in the graph's file, by name.
        providers: The providers that the session will use.
    """
    ort = runtime()
    options = ort.SessionOptions()
    # OpenVINO rewrites graphs itself, and does not open graphs that ONNX Runtime has rewritten.
    if OPENVINO in providers:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if lent:
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in lent.values()]
        options.add_external_initializers(list(lent), values)
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # The three stages never run at the same time, so they share one memory arena that allocates only what is requested.
    # ONNX Runtime must not plan the memory of a whole run, because the plan would be wrong for another prompt length
    # (research/log/measurements-engines.md).
    _share_arena(ort)
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.enable_mem_pattern = False
    # The function `assigned` needs the information that this setting records.
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    # Waiting threads must sleep, because other programs need the cores (research/log/2026-11-21.md).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


@lru_cache(maxsize=1)
def _share_arena(ort: Any) -> None:
    """Create one memory arena on the CPU for all sessions, once per process."""
    cpu = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    same_as_requested = 1
    ort.create_and_register_allocator(cpu, ort.OrtArenaCfg(0, same_as_requested, 1 << 20, -1))
