"""Estimate the memory that a policy needs, before and after it is loaded.

The package sinew-perf estimates the memory of activations (intermediate results). Without this package only the weights
are counted, and messages state this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sinew.core import providers
from sinew.engine.backend import BACKENDS, installed

if TYPE_CHECKING:
    from sinew.policy import Policy

GROUP = "sinew.estimates"


class CountedMemory(NamedTuple):
    """Memory of a policy in bytes.

    Attributes:
        weights: Bytes of the weights.
        request: Bytes for the computation of each request in a batch.
        fixed: Bytes that are used regardless of the number of requests.
    """

    weights: int
    request: int
    fixed: int


# A function that estimates the memory of a policy. Its arguments are the path of a bundle or of exported
# graphs, the precision, the engine, and "cpu" or "cuda".
Count = Callable[[str, str | None, Any, Literal["cpu", "cuda"]], CountedMemory]


def counts_activations() -> bool:
    """Return True if the memory of activations can be estimated: this requires the package sinew-perf and torch."""
    return installed("torch") and providers.provider(GROUP) is not None


def memory_need(
    source: str,
    options: dict[str, Any],
    threads: int | None,
    batch: int,
    *,
    apart: bool = False,
) -> tuple[int, int]:
    """Estimate the memory of a policy without loading its weights.

    If the memory of activations cannot be estimated, the result is the size of the files, and 0.

    Args:
        source: Path or name of the policy, as for ``sinew infer``.
        options: Options of :func:`sinew.load`.
        threads: Number of computing threads. None for the engine's default.
        batch: Number of requests that are computed together.
        apart: Estimate in a separate process, as a server does, so that this process need not import torch.

    Returns:
        (Bytes of the weights, bytes that the selected engine needs in addition for its computation).
    """
    from sinew.engine.backend import choose, chosen_by, exported_graphs
    from sinew.policy import open_bundle

    bundle = open_bundle(source)
    choice = choose(bundle, threads=threads, **chosen_by(options))
    folder = exported_graphs(bundle)
    if not counts_activations():
        files = [bundle.path] if folder is None else folder.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file()), 0
    estimates = providers.required(GROUP, "the memory of activations")
    count: Count = estimates.memory_apart if apart else estimates.memory
    engine = BACKENDS[choice.engine].counted_as
    dtype = None if engine == "cpu" or choice.options.dtype == "native" else choice.options.dtype
    kind: Literal["cpu", "cuda"] = "cuda" if choice.options.kind == "cuda" else "cpu"
    path = str(folder or bundle.path)
    if engine == "cpu" and not bundle.lowbit:
        # Without low-bit weights, the CPU engine multiplies in bf16. The weights stay in their stored type, and the
        # activations are float32.
        weights = count(path, "bf16", "plan", kind).weights
        memory = count(path, "fp32", "plan", kind)._replace(weights=weights)
    else:
        memory = count(path, dtype, engine, kind)
    return memory.weights, batch * memory.request + memory.fixed


def loaded_memory(policy: Policy) -> tuple[int, str]:
    """Return the bytes of a loaded policy, and a text that states what is counted.

    With PyTorch and the package sinew-perf the bytes are the estimate of ``sinew perf fit``, otherwise the bytes of the
    weights.
    """
    if not installed("torch") or policy.engine.model is None or policy.facts.one_graph:
        return policy.facts.weights_nbytes, "weights only"
    if (estimates := providers.provider(GROUP)) is None:
        how = providers.how_to_install("sinew-perf")
        return policy.facts.weights_nbytes, f"weights only: the package sinew-perf counts activations, {how}"
    memory: tuple[int, str] = estimates.loaded_memory(policy)
    return memory
