"""The memory that a policy needs, before and after it is loaded.

The package sinew-perf counts activations. Without it only the weights are counted, and messages state that.
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
    """Bytes of a policy: its weights, what each request of a batch computes with, and what stays besides."""

    weights: int
    request: int
    fixed: int


# Path of a bundle or of exported graphs, its precision, the engine, the kind of device -> bytes.
Count = Callable[[str, str | None, Any, Literal["cpu", "cuda"]], CountedMemory]


def counts_activations() -> bool:
    """Return whether activations are counted here: the package sinew-perf is installed, and so is torch."""
    return installed("torch") and providers.provider(GROUP) is not None


def memory_need(
    source: str,
    options: dict[str, Any],
    threads: int | None,
    batch: int,
    *,
    apart: bool = False,
) -> tuple[int, int]:
    """Return the bytes of a policy's weights, and of what the engine that will run it computes with.

    Loads no weights. Where activations are not counted, it is the size of the files and 0.

    Args:
        source: As of `sinew infer`.
        options: Of `sinew.load`.
        threads: Of the engine. None for its own choice.
        batch: How many requests are computed at once.
        apart: Count in a process of its own, as a server does.
    """
    from sinew.engine.backend import choose, chosen_by, exported_graphs
    from sinew.policy import open_bundle

    opened = open_bundle(source)
    choice = choose(opened, threads=threads, **chosen_by(options))
    folder = exported_graphs(opened)
    if not counts_activations():
        files = [opened.path] if folder is None else folder.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file()), 0
    estimates = providers.required(GROUP, "the memory of activations")
    count: Count = estimates.memory_apart if apart else estimates.memory
    engine = BACKENDS[choice.engine].counted_as
    dtype = None if engine == "cpu" or choice.options.dtype == "native" else choice.options.dtype
    kind: Literal["cpu", "cuda"] = "cuda" if choice.options.kind == "cuda" else "cpu"
    path = str(folder or opened.path)
    if engine == "cpu" and not opened.lowbit:
        # Without low-bit weights this engine multiplies bf16. Its weights stay as they are stored, and its
        # activations are float32.
        weights = count(path, "bf16", "plan", kind).weights
        memory = count(path, "fp32", "plan", kind)._replace(weights=weights)
    else:
        memory = count(path, dtype, engine, kind)
    return memory.weights, batch * memory.request + memory.fixed


def loaded_memory(policy: Policy) -> tuple[int, str]:
    """Return the bytes of a loaded policy, and what they contain: under PyTorch the estimate of `sinew perf fit`,
    else the weights.
    """
    if not installed("torch") or policy.engine.model is None or policy.facts.one_graph:
        return policy.facts.weights_nbytes, "weights alone"
    if (estimates := providers.provider(GROUP)) is None:
        how = providers.how_to_install("sinew-perf")
        return policy.facts.weights_nbytes, f"weights alone: the package sinew-perf counts activations, {how}"
    counted: tuple[int, str] = estimates.loaded_memory(policy)
    return counted
