"""Test cases for engine cuda, engines for these cases, and recorders that behave like a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import sinew
from sinew.bundle.quant import SCALE
from sinew.bundle.schema import COMPONENTS
from sinew.core import Observation, machine
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fp8.scales import calibrate, linears
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.graphs import GraphRecorder, RecordedGraph
from sinew.engine.cuda.lowbit.weights import keep_codes
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.engine import Engine
from sinew.engine.loading import load_model
from sinew.engine.onnx.engine import OnnxEngine
from sinew.engine.onnx.export import ON_ONNX, export_graphs
from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import Plan
from sinew.models.base import Model
from sinew.policy import Policy, load
from sinew.processing import ModelInputs
from tests.closeness import rounding
from tests.engines import run_one
from tests.golden import Golden

BOUND = 1e-5  # largest difference, as a fraction of the largest absolute value in eager's chunk
CPU = torch.device("cpu")
CASES = ["smolvla-2cam", "smolvla-3cam-padded", "pi0-2cam", "pi05-2cam"]
ONE_PER_MODEL = ["smolvla-2cam", "pi0-2cam", "pi05-2cam"]
ASSETS = Path(sinew.__file__).parent / "assets"


@dataclass
class Case:
    """A policy on engine eager, and one observation."""

    policy: Policy
    observation: Observation
    noise: np.ndarray

    @property
    def reference(self) -> Engine:
        """The engine with which others are compared."""
        return self.policy.engine

    @property
    def model(self) -> Model:
        return self.reference.model

    def inputs(self, pixels: bool = False) -> ModelInputs:
        return self.policy.processor.inputs(self.observation, pixels=pixels)

    def eager(self, inputs: ModelInputs | None = None, steps: int = 10) -> np.ndarray:
        """Return eager's chunk for the frames that the processor has prepared."""
        return run_one(self.reference, inputs or self.inputs(pixels=True), self.noise, steps)[0]

    def engine(self, recorder: GraphRecorder | None = None, **options: Any) -> CudaEngine:
        """Return an engine. FP8 layers get scales that are calibrated with the observation."""
        plan = Plan.of(self.model, rewrites=ON_CUDA)
        return CudaEngine(
            plan,
            CPU,
            processing=self.policy.manifest.processing,
            options=CudaOptions(**options),
            scales=self.scales(plan) if options.get("fp8") else None,
            recorder=recorder,
        )

    def scales(self, plan: Plan) -> dict[str, float]:
        engine, layers = PlannedEngine(plan, CPU), linears(plan.model, ("language",))
        runs = [lambda: run_one(engine, self.inputs(pixels=True), self.noise, 1)]
        return calibrate(layers, runs, "0" * 64, "the observation of the case").scales

    def onnx(self, directory: Path, steps: int) -> OnnxEngine:
        """Export the planned model for two views to ``directory``, and open it in ONNX Runtime."""
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
        """Return the largest difference between eager and ``engine``, as a fraction of the largest absolute value in
        eager's chunk.

        Args:
            engine: The engine.
            inputs: The inputs. None uses those of the case.
            steps: Solver steps.
            wanted: Eager's chunk, if it is already computed.
        """
        if wanted is None:
            wanted = self.eager(None if inputs is None else self.prepared(inputs), steps)
        got, _ = run_one(engine, inputs or self.inputs(), self.noise, steps)
        assert np.isfinite(got).all()
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    def refusal(self, found: np.ndarray, inputs: ModelInputs | None = None, steps: int = 4) -> str:
        """Return the reason why a chunk cannot be a float32 computation of eager's chunk. "" if it can be
        (tests/closeness.py)."""
        return rounding(lambda: self.eager(inputs, steps)).refusal(found)

    def prepared(self, inputs: ModelInputs) -> ModelInputs:
        """Prepare raw frames as the processor does."""
        from sinew.processing.image import prepare_frame

        if not inputs.frames:
            return inputs
        recipe = self.policy.manifest.processing.image
        pixels = np.stack([prepare_frame(frame, recipe) for frame in inputs.frames])
        return ModelInputs(pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)


def golden_case(directory: Path, bundle: Callable[[str], Path], name: str, dtype: str = "float32") -> Case:
    g = Golden(directory / name)
    # use the kernels that a GPU uses for half precision
    with mock.patch.object(machine, "half_units", return_value="the references'"):
        policy = load(bundle(name), dtype=dtype, device="cpu", engine="eager", allow_missing_cameras=True)
    return Case(policy, Observation.from_mapping(g.observation()), g.numpy("noise")[0])


@dataclass
class LowbitCase(Case):
    """A case whose weights stay low-bit, in the reference and in the engines. Their references multiply the same codes
    and scales.

    Attributes:
        held: The reference.
    """

    held: EagerEngine

    @property
    def reference(self) -> Engine:
        return self.held


def lowbit_case(path: Path, parts: Collection[str] = COMPONENTS) -> LowbitCase:
    """Return a case over a bundle with low-bit weights.

    Norms and biases are set to values far from their initial values, as in :func:`shaken`.

    Args:
        path: The bundle.
        parts: Components whose weights stay low-bit.
    """
    policy = load(path, "cpu", "float32", "eager", allow_missing_cameras=True)
    model = load_model(policy.bundle, CPU, "fp32", lowbit=parts)
    keep_codes(model, torch.float32)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and not name.endswith(SCALE):
            parameter.data += torch.rand(parameter.shape, generator=generator) - 0.5
    observation = policy.dummy_observation()
    return LowbitCase(policy, observation, policy.processor.noise(observation)[0], EagerEngine(model, CPU))


def asset_case(name: str) -> Case:
    policy = load(ASSETS / f"{name}.gguf", device="cpu", engine="eager", allow_missing_cameras=True)
    observation = policy.dummy_observation()
    return Case(policy, observation, policy.processor.noise(observation)[0])


def shaken(case: Case) -> Case:
    """Set norms and biases to values far from their initial values, so that a missing norm or bias changes the
    result."""
    generator = torch.Generator().manual_seed(5)
    for parameter in case.model.parameters():
        if parameter.ndim == 1:
            noise = torch.rand(parameter.shape, generator=generator) - 0.5
            parameter.data = (parameter.float() + noise).to(parameter.dtype)
    return case


class Frozen(GraphRecorder):
    """A recorder that behaves like a CUDA graph, on a CPU.

    The program runs once to record its results. Each replay computes again, from the same input memory into the same
    result memory. ``log`` contains the recordings and the replays.
    """

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

        for tensor in tensors(held):  # a CUDA graph has computed nothing before its first replay
            memory(tensor).zero_()
        return RecordedGraph(replay, held)


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with each element once, also if the tensor repeats elements."""
    for axis, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(axis, 0, 1) if stride == 0 else tensor
    return tensor


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in the result of a program."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if is_dataclass(tree):
        tree = [getattr(tree, field.name) for field in fields(tree)]
    return [leaf for part in tree for leaf in tensors(part)] if isinstance(tree, (list, tuple)) else []
