"""Compare all engines that run a bundle on this machine, one after another.

Each engine runs in its own process. Its memory can then be measured separately, and the machine needs memory for only
one policy at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from sinew.core import PolicySpec, SinewError, machine

Observe = Callable[[PolicySpec], dict[str, Any]]


@dataclass(frozen=True)
class EngineResult:
    """The measurement of one engine, or the reason why it does not run the bundle on this machine.

    Attributes:
        engine: The engine's name.
        reason: The reason why the engine does not run the bundle, or "".
        about: Device, precision and recipe, as text.
        totals_ms: Milliseconds of each inference.
        cpu_s: Processor seconds of one inference.
        ready_s: Seconds from the start of the process to its first chunk.
        peak: Largest memory of the process in bytes.
        actions: The actions of the first inference, [H, D].
    """

    engine: str
    reason: str = ""
    about: str = ""
    totals_ms: tuple[float, ...] = ()
    cpu_s: float = 0.0
    ready_s: float = 0.0
    peak: int = 0
    actions: np.ndarray | None = None

    @property
    def p50_ms(self) -> float:
        """Return the median time of an inference in milliseconds."""
        return float(np.median(self.totals_ms))

    def record(self, reference: EngineResult | None) -> dict[str, Any]:
        """Return the result as a JSON-ready dict.

        Args:
            reference: The reference engine's result, with which time and actions are compared, or None.
        """
        if self.reason:
            return {"engine": self.engine, "reason": self.reason}
        entry: dict[str, Any] = {"engine": self.engine, "about": self.about, "p50_ms": round(self.p50_ms, 3)}
        entry |= {"max_ms": round(max(self.totals_ms), 3), "cpu_s": round(self.cpu_s, 4)}
        entry |= {"ready_s": round(self.ready_s, 2), "peak_bytes": self.peak}
        if reference is None or reference.actions is None or self.actions is None:
            return entry
        apart = float(np.linalg.norm(self.actions - reference.actions))
        size = float(np.linalg.norm(reference.actions)) or 1.0
        return entry | {"of_reference": round(self.p50_ms / reference.p50_ms, 3), "error": apart / size}


def ladder(
    bundle: Path,
    runs: int,
    options: dict[str, Any],
    observe: Observe,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[EngineResult]:
    """Yield the measurement of each engine over ``runs`` inferences, the reference engine first.

    Args:
        bundle: The bundle.
        runs: Number of inferences.
        options: Options of ``sinew.load``, without the engine.
        observe: Makes the observation that is sent to the policy. It is called in the engine's process.
        advance: Called with the name of each engine, for example to show progress.
    """
    from sinew.engine.backend import BACKENDS, choose
    from sinew.policy import open_bundle

    opened = open_bundle(bundle)
    for name in sorted(BACKENDS, key=lambda name: not BACKENDS[name].reference):
        advance(name)
        try:
            choose(opened, **options | {"engine": name})
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                arguments = (bundle, runs, options | {"engine": name}, observe, time.time())
                yield pool.submit(_timed, *arguments).result()
        except SinewError as error:
            yield EngineResult(name, str(error))
        except BrokenProcessPool:
            yield EngineResult(
                name, "the system ended its process, possibly because the memory was too small"
            )


def _timed(bundle: Path, runs: int, options: dict[str, Any], observe: Observe, began: float) -> EngineResult:
    from sinew.policy import load

    policy = load(bundle, **options)
    observation = observe(policy.spec)
    policy.warm_up()
    actions = policy.infer({**observation, "seed": 0}).actions
    ready, totals, before = time.time() - began, [], time.process_time()
    for seed in range(runs):
        begin = time.perf_counter()
        policy.infer({**observation, "seed": seed})
        totals.append((time.perf_counter() - begin) * 1e3)
    recipe = ", ".join(f"{part} {kind}" for part, kind in policy.facts.recipe.items())
    return EngineResult(
        policy.engine_name,
        about=f"{policy.dtype} on {policy.device}" + (f"; {recipe}" if recipe else ""),
        totals_ms=tuple(totals),
        cpu_s=(time.process_time() - before) / runs,
        ready_s=ready,
        peak=machine.resident_bytes()["peak"],
        actions=actions,
    )
