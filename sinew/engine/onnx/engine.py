"""Run exported graphs with ONNX Runtime. Needs onnxruntime and numpy, not torch.

What the read stage returns (keys and values of the whole prefix, masks, rotary tables) stays in ONNX Runtime's
own memory and is bound to the step stage once per observation; a step moves the noisy actions in and the
head's output out, a few kilobytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sinew import machine
from sinew.bundle.schema import COMPONENTS
from sinew.core import BundleError, CancelledError, ObservationError, SinewError, Timing
from sinew.engine.onnx.graphs import STAGES, GraphSet, table_path
from sinew.engine.onnx.providers import CPU, choose, loaded, runtime
from sinew.engine.trace import Trace
from sinew.processing import ModelInputs
from sinew.solvers import Guidance, Solver, solve


@dataclass(frozen=True)
class Device:
    """The device of a policy, as text: the part of ``torch.device`` that needs no torch."""

    type: str

    def __str__(self) -> str:
        return self.type


class OnnxEngine:
    """Not reentrant: one inference at a time.

    providers: ONNX Runtime execution providers in order of preference, by their own names or short ones; every
    one must be offered by the installed onnxruntime, and load. threads: for compute; chosen from the machine
    if None. solver: the policy's; the graphs do not hold it, and there is no default, because a wrong one gives
    plausible numbers of the wrong sign (GR00T runs from 0 to 1, openpi from 1 to 0).
    """

    guides = ("no-jacobian", "ramp")  # the graphs have neither a Jacobian nor a time per row

    def __init__(
        self,
        directory: Path | str,
        providers: Sequence[str] = (),
        threads: int | None = None,
        *,
        solver: Solver,
    ):
        ort = runtime()
        wanted, self.provider_reason = choose(providers)
        self.directory, self.solver = Path(directory), solver
        self.graphs = GraphSet.load(self.directory)
        self.threads = machine.recommended_threads()[0] if threads is None else threads
        self.device = Device(
            "cpu" if wanted[0] == CPU else wanted[0].removesuffix("ExecutionProvider").lower()
        )
        options = session_options(self.threads)
        self.sessions = {
            stage: _open(ort, self.directory / f"{stage}.onnx", options, wanted) for stage in STAGES
        }
        self.providers = loaded(self.sessions["step"], wanted)
        self.tables = {steps: _table(table_path(self.directory, steps), steps) for steps in self.graphs.steps}
        self._check_names()
        self._value = ort.OrtValue.ortvalue_from_numpy

    def _check_names(self) -> None:
        """Raise :class:`BundleError` for graphs that do not fit one another, or their record."""
        reads = set(self.graphs.reads)
        for stage, takes, gives in (
            ("vision", {"pixels"}, set()),
            ("read", {"image_tokens", "camera_mask", "tokens", "token_mask", "state"}, reads),
            ("step", {"x", "moment", *reads}, {"output"}),
        ):
            session = self.sessions[stage]
            unknown = {node.name for node in session.get_inputs()} - takes
            lacking = gives - {node.name for node in session.get_outputs()}
            if unknown or lacking or not session.get_outputs():
                raise BundleError(
                    f"{self.directory / stage}.onnx: expected inputs among {', '.join(sorted(takes))} and outputs"
                    f" {', '.join(sorted(gives)) or 'of any name'}; unknown are {sorted(unknown)}, missing"
                    f" {sorted(lacking)}"[:1000]
                )

    @property
    def recipe(self) -> dict[str, str]:
        """Components whose matrix products are quantised."""
        return {name: kind for name, kind in self.graphs.recipe.items() if kind != "fp32"}

    @property
    def precision(self) -> dict[str, str]:
        """Component -> precision of its matrix products."""
        return dict.fromkeys(COMPONENTS, "fp32") | self.recipe

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the graphs' weights on disk; ONNX Runtime keeps copies in the layouts of its kernels."""
        return sum((self.directory / f"{stage}.onnx.data").stat().st_size for stage in STAGES)

    def place(self, array: np.ndarray) -> np.ndarray:
        """Return an array as the graphs take it."""
        return array

    def trace(self, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Trace:
        """Run as :meth:`run` does and return what every stage computed."""
        found = Trace(np.empty(0))
        self.run(inputs, noise, steps, trace=found)
        return found

    def run(
        self,
        inputs: ModelInputs,
        noise: np.ndarray,
        steps: int,
        cancel: threading.Event | None = None,
        guidance: Guidance | None = None,
        *,
        trace: Trace | None = None,
    ) -> tuple[np.ndarray, Timing]:
        """noise: float32 [H, A] -> model output float32 [H, A] in model units, with per-stage times.

        guidance: one that needs no Jacobian and no time per row (``guides``).
        Looks at ``cancel`` after every stage and raises :class:`CancelledError` when it is set.
        """
        table = self.tables.get(steps)
        if table is None:
            ready = ", ".join(map(str, self.graphs.steps))
            raise ObservationError("solver_steps", f"one of the exported {ready}", str(steps))
        laps = _Laps(cancel)
        (image_tokens,) = self.sessions["vision"].run(None, {"pixels": inputs.pixels[None]})
        vision_ms = laps.next()
        image_tokens, camera_mask = self._all_views(image_tokens, inputs.camera_mask[None])
        read = self.sessions["read"]
        binding, used = read.io_binding(), {node.name for node in read.get_inputs()}
        for name, array in (
            ("image_tokens", image_tokens),
            ("camera_mask", camera_mask),
            ("tokens", inputs.tokens[None]),
            ("token_mask", inputs.token_mask[None]),
            ("state", inputs.state[None]),
        ):
            if name in used:
                binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in self.graphs.reads:
            binding.bind_output(name)
        read.run_with_iobinding(binding)
        reads = binding.get_outputs()
        act = self._act(reads, noise[None], table[:1])
        if trace is not None:
            trace.vision = image_tokens[0]
            trace.prefix = {
                name.removeprefix("context."): value.numpy().copy()
                for name, value in zip(self.graphs.reads, reads, strict=True)
            }
            act = _noted(act, trace)
        prefix_ms = laps.next()
        step_ms: list[float] = []
        moments = np.split(table, len(table))
        evaluations = self.solver.steps(steps)
        x = solve(act, noise[None], evaluations, moments, lambda: step_ms.append(laps.next()), guidance)
        if trace is not None:
            trace.head.append(x[0].copy())
        return x[0], Timing(vision_ms=vision_ms, prefix_ms=prefix_ms, step_ms=tuple(step_ms))

    def _all_views(self, image_tokens: np.ndarray, camera_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[1, V, N, C] and [1, V] -> the graph's number of views; those that are missing are masked zeros."""
        missing = self.graphs.views - camera_mask.shape[1]
        if missing < 0:
            raise SinewError(f"views: expected at most {self.graphs.views}, got {camera_mask.shape[1]}")
        if missing:
            image_tokens = np.pad(image_tokens, ((0, 0), (0, missing), (0, 0), (0, 0)))
            camera_mask = np.pad(camera_mask, ((0, 0), (0, missing)))
        return image_tokens, camera_mask

    def _act(self, reads: Sequence[Any], x: np.ndarray, moment: np.ndarray) -> Any:
        """Bind to the step stage everything that does not change during the solver's loop."""
        session = self.sessions["step"]
        binding = session.io_binding()
        used = {node.name for node in session.get_inputs()}
        for name, value in zip(self.graphs.reads, reads, strict=True):
            if name in used:
                binding.bind_ortvalue_input(name, value)
        # An OrtValue on the CPU is a window on the array: these three are ours, and filled before each step.
        x_in, moment_in, out = np.array(x), np.array(moment), np.empty_like(x)
        for name, array in (("x", x_in), ("moment", moment_in)):
            if name in used:
                binding.bind_ortvalue_input(name, self._value(array))
        binding.bind_ortvalue_output("output", self._value(out))

        def act(x: np.ndarray, moment: np.ndarray) -> np.ndarray:
            np.copyto(x_in, x)
            np.copyto(moment_in, moment)
            session.run_with_iobinding(binding)
            return out

        return act


def _open(ort: Any, path: Path, options: Any, providers: Sequence[str]) -> Any:
    """Return the session of one graph. Raises :class:`BundleError`."""
    try:
        return ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # noqa: BLE001 - it has a class for each status, and none above them
        what = (str(error).splitlines() or [""])[0][:300]
        raise BundleError(f"{path}: ONNX Runtime cannot open it ({type(error).__name__}: {what})") from None


def _table(path: Path, steps: int) -> np.ndarray:
    """Return the moments of so many steps, [steps, ...]. Raises :class:`BundleError`."""
    try:
        table: np.ndarray = np.load(path, allow_pickle=False)
    except Exception as error:  # noqa: BLE001 - numpy reads the head as Python, with what errors that has
        raise BundleError(f"{path}: expected the table of an export, got {error!r:.300}") from None
    if not isinstance(table, np.ndarray) or table.dtype != np.float32 or table.shape[:1] != (steps,):
        raise BundleError(f"{path}: expected float32 of shape [{steps}, ...]")
    return table


def _noted(act: Any, trace: Trace) -> Any:
    def noted(x: np.ndarray, moment: np.ndarray) -> np.ndarray:
        output = act(x, moment)
        trace.head.append(output[0].copy())
        return output

    return noted


def session_options(threads: int) -> Any:
    """Return the options that every session of this engine has."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # One arena for the three stages, which never run at once, that takes no more than it is asked for;
    # and no plan of a whole run's memory, which another prompt length makes void (docs/engines.md).
    _share_arena(ort)
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.enable_mem_pattern = False
    # Threads that wait shall sleep: other programs want the cores (docs/log.md has the measurement).
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


@lru_cache(maxsize=1)
def _share_arena(ort: Any) -> None:
    """Once per process: the CPU memory of all sessions."""
    cpu = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    same_as_requested = 1
    ort.create_and_register_allocator(cpu, ort.OrtArenaCfg(0, same_as_requested, 1 << 20, -1))


class _Laps:
    def __init__(self, cancel: threading.Event | None):
        self.cancel, self.start = cancel, time.perf_counter()

    def next(self) -> float:
        """Milliseconds since the last lap."""
        now = time.perf_counter()
        elapsed, self.start = 1e3 * (now - self.start), now
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError("the inference was cancelled")
        return elapsed
