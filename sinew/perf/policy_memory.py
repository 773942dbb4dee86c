"""What a policy takes of a machine's memory: one that is to be loaded, and one that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from sinew.engine.backend import BACKENDS, installed

if TYPE_CHECKING:
    from sinew.policy import Policy


def memory_need(source: str, options: dict[str, Any], threads: int | None, batch: int) -> tuple[int, int]:
    """Return the bytes of a policy's weights, and of what the engine that will run it computes in batches of ``batch``
    (:mod:`sinew.perf.memory`).

    options: of ``sinew.load``. Without torch, which that model traces with, it is the size of the files. Loads no
    weights.
    """
    from sinew.engine.backend import choose, chosen_by, exported_graphs
    from sinew.policy import open_bundle

    opened = open_bundle(source)
    choice = choose(opened, threads=threads, **chosen_by(options))
    folder = exported_graphs(opened)
    try:
        from sinew.perf.memory import fits
    except ModuleNotFoundError:
        files = [opened.path] if folder is None else folder.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file()), 0
    engine = BACKENDS[choice.engine].counted_as
    dtype = None if engine == "cpu" or choice.options.dtype == "native" else choice.options.dtype
    device: Literal["cpu", "cuda"] = "cuda" if choice.options.kind == "cuda" else "cpu"
    report = fits(
        folder or opened.path, 1 << 62, dtypes=dtype, engine=engine, device=device, runtime=0, search=False
    ).report
    return report.weights_nbytes, batch * report.peak.nbytes + report.kept + report.workspace


def loaded_memory(policy: Policy) -> tuple[int, str]:
    """Return the bytes that a loaded policy needs beside the running program, and what they are: of an engine under
    PyTorch what `sinew perf fit` counts, else its weights."""
    weights = policy.weights_nbytes, "weights alone"
    if not installed("torch"):
        return weights
    from sinew.engine.example import Shapes
    from sinew.perf.memory import memory_report
    from sinew.perf.program import of_engine

    if policy.engine.model is None or policy.facts.one_graph:
        return weights
    spec, image = policy.spec, policy.bundle.manifest.processing.image
    shapes = Shapes(spec.views, image.height, image.width, spec.max_prompt_tokens, spec.solver_steps)
    device: Literal["cpu", "cuda"] = "cuda" if policy.device.startswith("cuda") else "cpu"
    report = memory_report(of_engine(policy.engine, shapes, spec.name), device)
    parts = (
        f"weights {_gib(report.resident)}, activations {_gib(report.peak.nbytes)}, as `sinew perf fit` counts"
    )
    return report.total - report.runtime, parts


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
