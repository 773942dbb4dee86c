"""The facade: a bundle on a device, from observation to action chunk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sinew.bundle import Bundle
from sinew.bundle.schema import from_builtins
from sinew.core import ActionChunk, BundleError, Observation, SinewError
from sinew.engine.eager import EagerEngine
from sinew.engine.onnx.cache import cached_graphs
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.plan import Plan
from sinew.engine.planned import ON_CPU, PlannedEngine
from sinew.models import build_on_meta, misfit, model_class
from sinew.models.base import FlowModel
from sinew.processing import Processor

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(path: str | Path, device: str = "cpu", dtype: str | None = None, engine: str = "eager") -> Policy:
    """Load a bundle. See :class:`Policy` for ``dtype`` and ``engine``."""
    return Policy(Bundle(path), device, dtype, engine)


class Policy:
    """A loaded policy. ``infer`` is serialised by a lock; everything else may be called from any thread.

    dtype: "float32", "bfloat16", "float16", or "native" for what the bundle stores, component by component.
    None chooses and records why in ``dtype_reason``. Weights whose stored type is the chosen one stay in
    the file's memory map; the others are converted once, here.

    engine: "eager", the reference; "plan", the same model after the rewrites of ``sinew.engine.plan``; "onnx",
    the planned model in ONNX Runtime, exported beside the bundle on first use.
    """

    def __init__(self, bundle: Bundle, device: str = "cpu", dtype: str | None = None, engine: str = "eager"):
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.spec = bundle.manifest.spec
        try:
            self.device = torch.device(device)
        except RuntimeError:
            raise SinewError(f"device {device!r} is not a torch device such as cpu or cuda:0") from None
        self.dtype, self.dtype_reason = choose_dtype(dtype, self.device)
        self.processor = Processor(bundle.manifest)
        self.engine: Any = self._make_engine(engine)
        self._lock = threading.Lock()
        self._warned: set[frozenset[str]] = set()

    def _make_engine(self, name: str) -> EagerEngine | OnnxEngine:
        if name == "onnx":
            return self._onnx_engine()
        if name not in ("eager", "plan"):
            raise SinewError(f"engine {name!r} is not one of eager, plan, onnx")
        model = load_model(self.bundle, self.device, self.dtype)
        if name == "eager":
            engine = EagerEngine(model, self.device)
        else:
            rewrites = ON_CPU if self.device.type == "cpu" else None
            engine = PlannedEngine(Plan.of(model, self.spec.solver_steps, rewrites), self.device)
        self.bundle.release(engine.model.parameters())
        return engine

    def _onnx_engine(self) -> OnnxEngine:
        """Graphs from beside the bundle, exported there on first use."""
        if self.device.type != "cpu" or self.dtype != "float32":
            raise SinewError(f"engine 'onnx' runs float32 on cpu, not {self.dtype} on {self.device}")
        image, steps = self.manifest.processing.image, self.spec.solver_steps

        def export(directory: Path) -> None:
            from sinew.engine.onnx.export import export_graphs

            log.info("exporting %s to %s; this takes a minute, once", self.bundle.path, directory)
            model = load_model(self.bundle, self.device, "float32")
            export_graphs(
                Plan.of(model, steps),
                directory,
                architecture=self.manifest.architecture,
                views=len(self.spec.cameras),
                height=image.height,
                width=image.width,
                steps=(steps,),
            )
            self.bundle.release(())

        return OnnxEngine(cached_graphs(self.bundle.path, export))

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
            inputs = self.processor.inputs(observation)
            noise, seed = self.processor.noise(observation)
            ready = time.perf_counter()
            chunk, timing = self.engine.run(
                inputs, noise, observation.solver_steps or self.spec.solver_steps, cancel
            )
            computed = time.perf_counter()
            actions = self.processor.actions(chunk, observation)
            end = time.perf_counter()
        timing = replace(
            timing,
            preprocess_ms=1e3 * (ready - start),
            postprocess_ms=1e3 * (end - computed),
            total_ms=1e3 * (end - start),
        )
        return ActionChunk(actions, timing, seed, observation.session, observation.time)

    def warm_up(self) -> ActionChunk:
        """One inference on grey frames: pages the weights in and lets torch allocate and pick its kernels."""
        return self.infer(self.dummy_observation())

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


def choose_dtype(dtype: str | None, device: torch.device) -> tuple[str, str]:
    """The precision of the weights and why it was chosen."""
    if dtype is not None:
        if dtype != "native" and dtype not in DTYPES:
            raise SinewError(f"dtype {dtype!r} is not one of native, {', '.join(DTYPES)}")
        return dtype, "asked for"
    if device.type == "cpu":
        return "float32", "the reference precision; half-precision linear layers are slow on most CPUs"
    return "native", "as stored in the bundle"


def load_model(bundle: Bundle, device: torch.device, dtype: str) -> FlowModel:
    """The bundle's architecture with its weights; parameters are views of the memory map where they can be."""
    manifest = bundle.manifest
    cls = model_class(manifest.architecture)
    config: Any = from_builtins(manifest.config, cls.config_type, f"{bundle.path}: sinew.config")
    model = build_on_meta(manifest.architecture, config)
    if problems := misfit(model, {name: info.shape for name, info in bundle.infos.items()}):
        raise BundleError(f"{bundle.path}: {problems}")
    if (
        model.noise_shape != manifest.spec.noise_shape
        or model.state_size != manifest.processing.padded_state_dim
    ):
        raise BundleError(
            f"{bundle.path}: sinew.spec or sinew.processing disagrees with sinew.config about sizes"
        )

    state = {}
    for name, tensor in bundle.tensors("meta" if device.type == "meta" else "cpu").items():
        keep_wide = name.split(".")[0] in cls.float32_modules and dtype != "native"
        target = tensor.dtype if dtype == "native" else torch.float32 if keep_wide else DTYPES[dtype]
        state[name] = tensor.to(device=device, dtype=target)  # no copy when nothing changes
    model.load_state_dict(state, strict=True, assign=True)
    return model
