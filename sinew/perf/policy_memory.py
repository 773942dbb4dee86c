"""What a policy takes of a machine's memory: one that is to be loaded, and one that is."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sinew_client.untrusted import parse_json

from sinew.core import SinewError
from sinew.engine.backend import BACKENDS, installed

if TYPE_CHECKING:
    from sinew.policy import Policy

COUNT_S = 300.0  # for the process that counts


class CountedMemory(NamedTuple):
    """Bytes of a policy: its weights, what each request of a batch computes with, and what stays besides."""

    weights: int
    request: int
    fixed: int


def counted(path: str, dtype: str | None, engine: Any, device: Literal["cpu", "cuda"]) -> CountedMemory:
    """Count the memory of a bundle or of exported graphs (:mod:`sinew.perf.memory`). Needs torch."""
    from sinew.perf.memory import fits

    report = fits(
        Path(path), 1 << 62, dtypes=dtype, engine=engine, device=device, runtime=0, search=False
    ).report
    return CountedMemory(report.weights_nbytes, report.peak.nbytes, report.kept + report.workspace)


def counted_apart(path: str, dtype: str | None, engine: Any, device: Literal["cpu", "cuda"]) -> CountedMemory:
    """Count as :func:`counted` does, in a process of its own.

    In a server, the libraries that trace a policy would stay in memory for good (about 150 MiB), and hold the
    interpreter for seconds. Files that are counted once are not counted again.

    Raises:
        SinewError: the process fails.
    """
    about = Path(path).stat()
    return _counted_apart(path, dtype, engine, device, (about.st_mtime_ns, about.st_size, about.st_ino))


@functools.lru_cache(maxsize=32)
def _counted_apart(
    path: str, dtype: str | None, engine: str, device: str, _file: tuple[int, ...]
) -> CountedMemory:
    from sinew.serve.prepare import ONE_THREAD, python_module

    try:
        child = subprocess.run(
            [*python_module(), __name__, json.dumps([path, dtype, engine, device])],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=COUNT_S,
            env={**os.environ, **ONE_THREAD}, check=False,
        )  # fmt: skip
        return CountedMemory(*map(int, parse_json(child.stdout.splitlines()[-1])))
    except subprocess.TimeoutExpired:
        raise SinewError(f"{path}: its memory was not counted within {COUNT_S:g} s") from None
    except (OSError, ValueError, IndexError, TypeError) as error:
        said = child.stderr.strip().splitlines() if isinstance(error, (ValueError, IndexError)) else []
        raise SinewError(
            f"{path}: its memory could not be counted: {(said or [str(error)])[-1][:300]}"
        ) from None


def memory_need(
    source: str,
    options: dict[str, Any],
    threads: int | None,
    batch: int,
    count: Callable[[str, str | None, str, Literal["cpu", "cuda"]], CountedMemory] = counted,
) -> tuple[int, int]:
    """Return the bytes of a policy's weights, and of what the engine that will run it computes in batches of ``batch``.

    options: of ``sinew.load``. Without torch it is the size of the files. Loads no weights. count: :func:`counted`, or
    :func:`counted_apart` in a server.
    """
    from sinew.engine.backend import choose, chosen_by, exported_graphs
    from sinew.policy import open_bundle

    opened = open_bundle(source)
    choice = choose(opened, threads=threads, **chosen_by(options))
    folder = exported_graphs(opened)
    if not installed("torch"):
        files = [opened.path] if folder is None else folder.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file()), 0
    engine = BACKENDS[choice.engine].counted_as
    dtype = None if engine == "cpu" or choice.options.dtype == "native" else choice.options.dtype
    found = count(
        str(folder or opened.path), dtype, engine, "cuda" if choice.options.kind == "cuda" else "cpu"
    )
    return found.weights, batch * found.request + found.fixed


def loaded_memory(policy: Policy) -> tuple[int, str]:
    """Return the bytes that a loaded policy needs beside the running program, and what they are: of an engine under
    PyTorch what `sinew perf fit` counts, else its weights."""
    weights = policy.facts.weights_nbytes, "weights alone"
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


if __name__ == "__main__":
    sys.stdout.write(json.dumps(counted(*parse_json(sys.argv[1]))) + "\n")
