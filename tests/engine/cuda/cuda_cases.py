"""What the tests of the CUDA engine share: cases to run, engines over them, and recorders that act like a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import sinew
from sinew.core import Observation, machine
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.graphs import GraphRecorder, RecordedGraph
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.export import ON_ONNX, export_graphs
from sinew.engine.plan.plan import Plan
from sinew.models.base import Model
from sinew.policy import Policy, load
from sinew.processing import ModelInputs
from tests.closeness import rounding
from tests.engines import run_one
from tests.golden import Golden

BOUND = 1e-5  # of the action scale, the largest absolute value of eager's chunk
CPU = torch.device("cpu")
CASES = ["smolvla-2cam", "smolvla-3cam-padded", "pi0-2cam", "pi05-2cam"]
ONE_PER_MODEL = ["smolvla-2cam", "pi0-2cam", "pi05-2cam"]
ASSETS = Path(sinew.__file__).parent / "assets"


@dataclass
class Case:
    """A policy under the eager engine, and one observation of it."""

    policy: Policy
    observation: Observation
    noise: np.ndarray

    @property
    def model(self) -> Model:
        return self.policy.engine.model

    def inputs(self, pixels: bool = False) -> ModelInputs:
        return self.policy.processor.inputs(self.observation, pixels=pixels)

    def eager(self, inputs: ModelInputs | None = None, steps: int = 10) -> np.ndarray:
        """Of the frames as the processor prepares them."""
        return run_one(self.policy.engine, inputs or self.inputs(pixels=True), self.noise, steps)[0]

    def engine(self, recorder: GraphRecorder | None = None, **options: Any) -> CudaEngine:
        return CudaEngine(
            Plan.of(self.model, rewrites=ON_CUDA),
            CPU,
            processing=self.policy.manifest.processing,
            options=CudaOptions(**options),
            recorder=recorder,
        )

    def onnx(self, directory: Path, steps: int) -> OnnxEngine:
        """Export the planned model for two views into ``directory`` and open it in ONNX Runtime."""
        spec, image = self.policy.spec, self.policy.manifest.processing.image
        export_graphs(
            Plan.of(self.model, rewrites=ON_ONNX),
            directory,
            architecture=spec.architecture,
            views=2,
            height=image.height,
            width=image.width,
            steps=(steps,),
        )
        return OnnxEngine(directory, threads=1, solver=spec.solver)

    def gap(
        self,
        engine: CudaEngine,
        inputs: ModelInputs | None = None,
        steps: int = 4,
        wanted: np.ndarray | None = None,
    ) -> float:
        """Largest difference between eager (``wanted`` where it has run) and ``engine``, in units of the action
        scale."""
        if wanted is None:
            wanted = self.eager(None if inputs is None else self.prepared(inputs), steps)
        got, _ = run_one(engine, inputs or self.inputs(), self.noise, steps)
        assert np.isfinite(got).all()
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    def refusal(self, found: np.ndarray, inputs: ModelInputs | None = None, steps: int = 4) -> str:
        """Return why a chunk is no other float32 computation of eager's; empty if it may be (tests/closeness.py)."""
        return rounding(lambda: self.eager(inputs, steps)).refusal(found)

    def prepared(self, inputs: ModelInputs) -> ModelInputs:
        """Raw frames as the processor prepares them."""
        from sinew.processing.image import prepare_frame

        if not inputs.frames:
            return inputs
        recipe = self.policy.manifest.processing.image
        pixels = np.stack([prepare_frame(frame, recipe) for frame in inputs.frames])
        return ModelInputs(pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)


def golden_case(directory: Path, bundle: Callable[[str], Path], name: str, dtype: str = "float32") -> Case:
    g = Golden(directory / name)
    with mock.patch.object(machine, "half_units", return_value="the references'"):  # as a GPU has them
        policy = load(bundle(name), dtype=dtype, device="cpu", engine="eager", allow_missing_cameras=True)
    return Case(policy, Observation.from_mapping(g.observation()), g.numpy("noise")[0])


def asset_case(name: str) -> Case:
    policy = load(ASSETS / f"{name}.gguf", device="cpu", engine="eager", allow_missing_cameras=True)
    observation = policy.dummy_observation()
    return Case(policy, observation, policy.processor.noise(observation)[0])


def shaken(case: Case) -> Case:
    """Norms and biases far from their initial ones and zeros, so that losing one shows."""
    generator = torch.Generator().manual_seed(5)
    for parameter in case.model.parameters():
        if parameter.ndim == 1:
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.data = (parameter.float() + noise).to(parameter.dtype)
    return case


class Frozen(GraphRecorder):
    """As a CUDA graph behaves, on a CPU: the program runs once to find its results, and every replay computes
    again, from the same input memory into the same result memory. ``log``: what was recorded and replayed."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self, program: Callable[[], Any], apart: bool = False) -> RecordedGraph:
        name = program.__name__
        held = copy.deepcopy(program())
        self.log.append(f"record {name}")

        def replay() -> None:
            self.log.append(f"replay {name}")
            for old, new in zip(tensors(held), tensors(program()), strict=True):
                memory(old).copy_(memory(new))

        for tensor in tensors(held):  # a graph has computed nothing until it is replayed
            memory(tensor).zero_()
        return RecordedGraph(replay, held)


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Each element once, where a tensor repeats some."""
    for axis, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(axis, 0, 1) if stride == 0 else tensor
    return tensor


def tensors(tree: Any) -> list[torch.Tensor]:
    """The leaves of a program's result."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    return [leaf for part in tree for leaf in tensors(part)] if isinstance(tree, (list, tuple)) else []
