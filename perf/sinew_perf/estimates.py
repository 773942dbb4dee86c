"""Interface for `sinew`: memory of activations, cost of a bundle, plan, and roofline of a run.

The entry point `sinew.estimates` names this module. The libraries that trace a policy are imported only when a
function needs them.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sinew.core import SinewError
from sinew.memory import CountedMemory
from sinew_client.untrusted import parse_json

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.policy import Policy

COUNT_S = 300.0  # the process that measures the memory may run for at most this many seconds


def memory(path: str, dtype: str | None, engine: Any, device: Literal["cpu", "cuda"]) -> CountedMemory:
    """Count the memory of a bundle or of exported graphs (:mod:`sinew_perf.memory`). Needs torch.

    Args:
        path: The bundle.
        dtype: Number formats. None for the stored formats.
        engine: The engine.
        device: The device.
    """
    from sinew_perf.memory import fits

    report = fits(
        Path(path), 1 << 62, dtypes=dtype, engine=engine, device=device, runtime=0, search=False
    ).report
    return CountedMemory(report.weights_nbytes, report.peak.nbytes, report.kept + report.workspace)


def memory_apart(path: str, dtype: str | None, engine: Any, device: Literal["cpu", "cuda"]) -> CountedMemory:
    """Count the memory like :func:`memory`, but in a separate process.

    In a server, the libraries that trace a policy would keep about 150 MiB of memory and block the interpreter for
    seconds. The result is cached for unchanged files.

    Args:
        path: The bundle.
        dtype: Number formats. None for the stored formats.
        engine: The engine.
        device: The device.

    Raises:
        SinewError: The process failed.
    """
    about = Path(path).stat()
    return _memory_apart(path, dtype, engine, device, (about.st_mtime_ns, about.st_size, about.st_ino))


@functools.lru_cache(maxsize=32)
def _memory_apart(
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
        raise SinewError(
            f"{path}: counting the memory of this bundle took more than {COUNT_S:g} s; try again on an idle machine"
        ) from None
    except (OSError, ValueError, IndexError, TypeError) as error:
        error_lines = child.stderr.strip().splitlines() if isinstance(error, (ValueError, IndexError)) else []
        raise SinewError(
            f"{path}: the memory of this bundle could not be counted: {(error_lines or [str(error)])[-1][:300]}"
        ) from None


def loaded_memory(policy: Policy) -> tuple[int, str]:
    """Return the bytes that an open policy with a model needs in addition to the running program, and a text that
    explains them.
    """
    from sinew.engine.example import Shapes

    from sinew_perf.memory import memory_report
    from sinew_perf.program import of_engine

    spec, image = policy.spec, policy.bundle.manifest.processing.image
    shapes = Shapes(spec.views, image.height, image.width, spec.max_prompt_tokens, spec.solver_steps)
    device: Literal["cpu", "cuda"] = "cuda" if policy.device.startswith("cuda") else "cpu"
    report = memory_report(of_engine(policy.engine, shapes, spec.name), device)
    parts = (
        f"weights {_gib(report.resident)}, activations {_gib(report.peak.nbytes)}, as `sinew perf fit` counts"
    )
    return report.total - report.runtime, parts


def cost(bundle: Bundle) -> dict[str, Any]:
    """Return parameters, stored bytes and FLOPs of each stage.

    Raises:
        SinewError: The bundle contains exported graphs.
    """
    from sinew_perf.cost import cost_record

    return cost_record(bundle)


def plan(bundle: Bundle, dtype: str | None = None) -> dict[str, Any]:
    """Return the effect and the saving of each rewrite (a change of the program that keeps the result) for a bundle's
    model.
    """
    from sinew_perf.rewrites import plan_record

    return plan_record(bundle, dtype)


def roofline(policy: Policy, threads: int, described: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of each stage at this machine's measured peaks, or the reason why they are unknown."""
    from sinew_perf.machine.achieved import roofline_record

    return roofline_record(policy, threads, described)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(memory(*parse_json(sys.argv[1]))) + "\n")
