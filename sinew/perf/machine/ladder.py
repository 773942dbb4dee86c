"""Every engine that runs a bundle on this machine, side by side: each in a process of its own, one after the other, so
that its memory is its own and a policy that fits once need not fit twice."""

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

from sinew import machine
from sinew.core import SinewError
from sinew.perf.machine.bench import make_observation


@dataclass(frozen=True)
class Rung:
    """What one engine took. reason: why it does not run this bundle here, "" if it does; then totals: milliseconds of each
    inference; cpu_s: processor seconds of one; ready_s: from the start of its process to its first chunk; peak: bytes of
    its memory; actions: those of the first inference; about: device, dtype and recipe as the policy says them."""

    engine: str
    reason: str = ""
    totals: tuple[float, ...] = ()
    cpu_s: float = 0.0
    ready_s: float = 0.0
    peak: int = 0
    actions: np.ndarray | None = None
    about: str = ""

    def record(self, reference: Rung | None) -> dict[str, Any]:
        """Return what a report shows, ready for JSON. reference: whose time and actions this one's are held against."""
        if self.reason:
            return {"engine": self.engine, "reason": self.reason}
        found = {
            "engine": self.engine,
            "about": self.about,
            "p50_ms": round(float(np.median(self.totals)), 3),
            "max_ms": round(max(self.totals), 3),
            "cpu_s": round(self.cpu_s, 4),
            "ready_s": round(self.ready_s, 2),
            "peak_bytes": self.peak,
        }
        if reference is None or reference.actions is None or self.actions is None:
            return found
        away = float(np.linalg.norm(self.actions - reference.actions))
        return found | {
            "of_reference": round(found["p50_ms"] / float(np.median(reference.totals)), 3),
            "error": away / (float(np.linalg.norm(reference.actions)) or 1.0),
        }


def ladder(
    bundle: Path,
    runs: int,
    options: dict[str, Any],
    size: tuple[int, int] | None,
    prompt: str,
    solver_steps: int | None,
    advance: Callable[[str], None] = lambda _: None,
) -> Iterator[Rung]:
    """Yield a rung for each engine there is, the reference first. options: of ``sinew.load``, but for the engine."""
    from sinew.engine.backend import BACKENDS
    from sinew.engine.choose import choose
    from sinew.policy import open_bundle

    opened = open_bundle(bundle)
    for name in sorted(BACKENDS, key=lambda name: not BACKENDS[name].reference):
        advance(name)
        chosen = options | {"engine": name}
        try:
            choose(opened, **chosen)
        except SinewError as error:
            yield Rung(name, str(error))
            continue
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            try:
                yield pool.submit(
                    _timed, bundle, runs, chosen, size, prompt, solver_steps, time.time()
                ).result()
            except SinewError as error:
                yield Rung(name, str(error))
            except BrokenProcessPool:
                yield Rung(name, "its process ended, for want of memory perhaps")


def _timed(
    bundle: Path,
    runs: int,
    options: dict[str, Any],
    size: tuple[int, int] | None,
    prompt: str,
    solver_steps: int | None,
    began: float,
) -> Rung:
    from sinew.policy import load

    policy = load(bundle, **options)
    observation = make_observation(policy.spec, size, prompt, solver_steps)
    policy.warm_up()
    actions = policy.infer({**observation, "seed": 0}).actions
    ready, totals, before = time.time() - began, [], time.process_time()
    for seed in range(runs):
        begin = time.perf_counter()
        policy.infer({**observation, "seed": seed})
        totals.append((time.perf_counter() - begin) * 1e3)
    about = f"{policy.dtype} on {policy.device}" + (f", {policy.recipe}" if policy.recipe else "")
    return Rung(
        policy.engine_name,
        totals=tuple(totals),
        cpu_s=(time.process_time() - before) / runs,
        ready_s=ready,
        peak=machine.resident_bytes()["peak"],
        actions=actions,
        about=about,
    )
