"""The facade: a bundle on a device, from observation to action chunk.

Imports no torch: a policy whose engine is ONNX Runtime runs where torch is not installed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle import Bundle
from sinew.core import ActionChunk, Observation, SinewError
from sinew.processing import Processor

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
ENGINES = ("eager", "plan", "onnx", "cuda")
EXPORTED = "policy.gguf"  # the bundle without weights in a folder of graphs, as `sinew export` writes it


def load(
    path: str | Path,
    device: str = "cpu",
    dtype: str | None = None,
    engine: str | None = None,
    *,
    threads: int | None = None,
    providers: Sequence[str] = (),
) -> Policy:
    """Load a bundle, or a folder that ``sinew export`` wrote. See :class:`Policy` for the rest."""
    path = Path(path)
    file = path / EXPORTED if path.is_dir() else path
    return Policy(Bundle(file), device, dtype, engine, threads=threads, providers=providers)


class Policy:
    """A loaded policy. ``infer`` is serialised by a lock; everything else may be called from any thread.

    dtype: "float32", "bfloat16", "float16", or "native" for what the bundle stores, component by component.
    None chooses and records why in ``dtype_reason``. Weights whose stored type is the chosen one stay in
    the file's memory map; the others are converted once, here.

    engine: "eager", the reference; "plan", the same model after the rewrites of ``sinew.engine.plan``; "onnx",
    the planned model in ONNX Runtime, exported beside the bundle on first use (which needs torch; afterwards
    nothing does), with the bundle's own quantisation; "cuda", the planned model with our kernels in one CUDA graph.
    None: "onnx" for an exported folder, else "eager", on every device.

    threads: for compute. None gives ONNX Runtime one per usable core, and lets ``warm_up`` find out by trying
    whether PyTorch is faster with one or with its own choice.
    providers: of ONNX Runtime, in order of preference, by its names or short ones such as "cuda".
    """

    def __init__(
        self,
        bundle: Bundle,
        device: str = "cpu",
        dtype: str | None = None,
        engine: str | None = None,
        *,
        threads: int | None = None,
        providers: Sequence[str] = (),
    ):
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.spec = bundle.manifest.spec
        graphs = exported_graphs(bundle)
        self.engine_name = engine or ("eager" if graphs is None else "onnx")
        if self.engine_name not in ENGINES:
            raise SinewError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
        if graphs is not None and self.engine_name != "onnx":
            raise SinewError(
                f"engine {engine!r}: {graphs} holds graphs and no weights; expected engine onnx, or the bundle"
            )
        if providers and self.engine_name != "onnx":
            raise SinewError(f"provider {', '.join(providers)}: expected engine onnx, got {self.engine_name}")
        self.dtype, self.dtype_reason = choose_dtype(dtype, device, self.engine_name)
        self.processor = Processor(bundle.manifest)
        self.engine: Any
        if self.engine_name == "onnx":
            from sinew.engine.onnx.opening import open_onnx

            self.engine = open_onnx(bundle, device, self.dtype, graphs, threads, providers)
        else:
            from sinew.engine.loading import torch_engine

            self.engine = torch_engine(bundle, self.engine_name, device, self.dtype, threads)
        self.device = self.engine.device
        self.threads_reason = "one per core" if threads is None else "asked for"
        self._threads_open = threads is None and hasattr(self.engine, "settle_threads")
        self._takes_frames = getattr(self.engine, "takes_frames", False)  # it resizes on the device
        self._unnormalizes = getattr(
            self.engine, "unnormalizes", False
        )  # and it has the actions' statistics there
        self._lock = threading.Lock()
        self._warned: set[frozenset[str]] = set()

    @property
    def threads(self) -> int:
        """For compute."""
        return self.engine.threads

    @property
    def recipe(self) -> dict[str, str]:
        """Precision of each component that the engine quantises; empty where it computes as ``dtype`` says."""
        return self.engine.recipe

    @property
    def padded_state_dim(self) -> int:
        """Width to which the model pads states; what vla.cpp clients send."""
        return self.manifest.processing.padded_state_dim

    @property
    def padded_action_dim(self) -> int:
        """Width of the model's own action rows; what vla.cpp clients receive."""
        return self.manifest.processing.padded_action_dim

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the model's weights, as the engine holds them."""
        return self.engine.weights_nbytes

    def check(self, observation: Observation | Mapping[str, Any]) -> None:
        """Raise :class:`ObservationError` for a field that this policy cannot take; computes nothing."""
        self.processor.check(_observation(observation))

    def infer(
        self, observation: Observation | Mapping[str, Any], *, cancel: threading.Event | None = None
    ) -> ActionChunk:
        """One action chunk, float32 [H, action_dim] in world units.

        Raises :class:`ObservationError` for a bad observation and :class:`CancelledError` between two stages
        once ``cancel`` is set.
        """
        observation = _observation(observation)
        self.processor.check(observation)
        self._warn_missing_cameras(observation)
        with self._lock:
            start = time.perf_counter()
            inputs = self.processor.inputs(observation, pixels=not self._takes_frames)
            noise, seed = self.processor.noise(observation)
            ready = time.perf_counter()
            chunk, timing = self.engine.run(
                inputs, noise, observation.solver_steps or self.spec.solver_steps, cancel
            )
            computed = time.perf_counter()
            actions = self.processor.actions(chunk, observation, normalized=not self._unnormalizes)
            end = time.perf_counter()
        timing = replace(
            timing,
            preprocess_ms=1e3 * (ready - start),
            postprocess_ms=1e3 * (end - computed),
            total_ms=1e3 * (end - start),
        )
        return ActionChunk(actions, timing, seed, observation.session, observation.time)

    def warm_up(self) -> ActionChunk:
        """Inference on grey frames: pages the weights in, lets torch allocate and pick its kernels, records the CUDA
        engine's graphs for frames of the declared sizes, and settles the number of threads where it was left open.
        Call on the thread that will infer."""
        observation = self.dummy_observation()
        chunk = self.infer(observation)
        if self.engine_name == "cuda":
            inputs = self.processor.inputs(observation, pixels=not self._takes_frames)
            self.engine.prepare_like(inputs, self.spec.solver_steps, self.spec.max_prompt_tokens)
        if self._threads_open:
            self._threads_open = False
            self.threads_reason = self.engine.settle_threads(lambda: self.infer(observation))
        return chunk

    def dummy_observation(self) -> Observation:
        """A valid observation of the spec's shapes: grey frames, zero state, a short instruction."""
        return Observation(
            images={c.name: np.full((c.height, c.width, 3), 128, np.uint8) for c in self.spec.cameras},
            state=np.zeros(self.spec.state.dim, np.float32),
            prompt="pick up the cube",
            seed=0,
        )

    def _warn_missing_cameras(self, observation: Observation) -> None:
        missing = frozenset(c.name for c in self.spec.cameras).difference(observation.images)
        if missing and missing not in self._warned:
            self._warned.add(missing)
            log.warning(
                "no frame for %s; the policy runs without, as upstream does", ", ".join(sorted(missing))
            )


def _observation(observation: Observation | Mapping[str, Any]) -> Observation:
    return observation if isinstance(observation, Observation) else Observation.from_mapping(observation)


def choose_dtype(dtype: str | None, device: str, engine: str = "eager") -> tuple[str, str]:
    """The precision of the weights and why it was chosen. ``device``: cpu, cuda:N ..."""
    if dtype is not None:
        if dtype != "native" and dtype not in DTYPES:
            raise SinewError(f"dtype {dtype!r} is not one of native, {', '.join(DTYPES)}")
        return dtype, "asked for"
    if device.partition(":")[0] == "cpu":
        return "float32", "the reference precision; half-precision linear layers are slow on most CPUs"
    if engine == "cuda":
        return "bfloat16", "what the kernels' tensor cores multiply; projections of the head stay float32"
    return "native", "as stored in the bundle"


def exported_graphs(bundle: Bundle) -> Path | None:
    """The folder of graphs that this bundle is the head of; None for a bundle with weights."""
    folder = bundle.path.parent
    return folder if not bundle.infos and (folder / "graphs.json").is_file() else None
