"""Cost of a program: a bundle or a published model, traced, as components of a roofline.

There is no second description of any architecture. The configuration comes from the bundle, or from the converter for
a published model. The operators come from :mod:`sinew_perf.trace`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from sinew.bundle import Bundle
from sinew.core import BundleError, SinewError, did_you_mean
from sinew.core.registry import presets
from sinew.engine.clone import on_meta
from sinew.engine.engine import Engine as Running
from sinew.engine.example import Shapes
from sinew.engine.loading import load_model
from sinew.engine.plan.plan import Plan
from sinew.families.published import described, published
from sinew.models import build_on_meta
from sinew.models import on_meta as build_model_on_meta
from sinew.models.base import Model
from sinew.policy import open_bundle

from sinew_perf.flops import FUSED_ATTENTION
from sinew_perf.operators import Component, Operator, Residency, Tensor
from sinew_perf.precision import STAGE_OF, Precision, as_number_format, as_traced, by_stage, dtype_name
from sinew_perf.request import AS_THE_POLICY, TracedRequest
from sinew_perf.trace import STAGES, ProgramTrace, TracedCall, trace

PRESETS = tuple(presets())
_MODELS = files("sinew_perf") / "data" / "models"
# These models exist only as a description of their sizes, with one file for each name.
MODEL_NAMES = tuple(sorted(each.name.removesuffix(".json") for each in _MODELS.iterdir()))
# Published models have weights in bf16. The models keep some projections in fp32.
PRESET_DTYPE = "bf16"

Traffic = Literal["fused", "unfused", "weights"]
Engine = Literal["eager", "plan"]


@dataclass(frozen=True, eq=False)
class PublishedProgram:
    """A model without weights in memory, with the shapes of its requests and the precision of its stages.

    Attributes:
        name: Name of the policy or model.
        model: Model on the meta device.
        shapes: Shapes of a request by default.
        precision: The precision of each stage. None to use the formats of the model's weights.
        engine: "eager", or "plan" for the model with its rewrites.
        prepared: The plan of an engine that already has one. None to build a plan.
        like: Program with the same calls and other formats, whose trace is used. None if there is none.
        family: Name of the architecture. "" for a model in memory.
    """

    name: str
    model: Model
    shapes: Shapes
    precision: Mapping[str, Precision] | None = None
    engine: Engine = "eager"
    prepared: Plan | None = None
    like: PublishedProgram | None = None
    family: str = ""

    @classmethod
    def load(
        cls,
        source: str | Path,
        request: TracedRequest = AS_THE_POLICY,
        *,
        dtypes: str | Mapping[str, str] | None = None,
        engine: Engine = "eager",
    ) -> PublishedProgram:
        """Load the program of a policy.

        Args:
            source: Path of a bundle, one of ``PRESETS`` at its published size, one of ``MODEL_NAMES``, or a file in
                their form (:func:`sinew.families.published.described`).
            request: Sizes of a request.
            dtypes: Number formats, see :func:`sinew_perf.precision.by_stage`. None for the formats in the bundle, and
                bf16 for presets.
            engine: "eager", or "plan" with all rewrites. On a CPU, the planned engine leaves some out
                (:data:`sinew.engine.plan.engine.ON_CPU`), and :func:`of_engine` traces the program that really runs.

        Raises:
            SinewError: The source does not exist.
        """
        if engine not in ("eager", "plan"):
            raise SinewError(f"engine: expected one of eager, plan, got {engine!r}")
        if not is_sizes_alone(source):
            return replace(of_bundle(Path(source)), engine=engine).cast(dtypes).at(request)
        dtypes = dtypes or PRESET_DTYPE
        return _of_preset(
            str(source), request, dtypes if isinstance(dtypes, str) else tuple(dtypes.items()), engine
        )

    def at(self, request: TracedRequest) -> PublishedProgram:
        """Return the same program for other sizes of a request.

        Raises:
            SinewError: The policy cannot change one of the sizes.
        """
        now = {"cameras": self.shapes.views, "chunk": self.chunk, "steps": self.shapes.steps}
        for name, own in now.items():
            requested_size = getattr(request, name)
            if requested_size not in (None, own) and name in self.fixed:
                raise SinewError(
                    f"{name}: expected {self.fixed[name]}, which {self.name} cannot change, got {requested_size}"
                )
        shapes = replace(
            self.shapes,
            views=request.cameras or self.shapes.views,
            tokens=self.shapes.tokens if request.prompt_tokens is None else request.prompt_tokens,
            steps=request.steps or self.shapes.steps,
        )
        model = self.model
        if request.chunk not in (None, self.chunk):
            model = on_meta(model)
            try:
                model.config = replace(model.config, chunk_size=request.chunk)
            except ValueError as error:
                raise SinewError(f"chunk: {error}") from None
        return replace(self, model=model, shapes=shapes, like=None)

    def stack(self, name: str) -> int:
        """Return the number of layers in a part of the model, such as "vision". 0 if the model has no layers under this
        name.
        """
        layers = getattr(getattr(self.model.config, name, None), "num_layers", 0)
        return int(layers) if f"{name}.layers.0." in "\n".join(self.model.state_dict()) else 0

    def without_layers(self, name: str, count: int) -> PublishedProgram:
        """Return the same program without ``count`` of the layers in a part of the model, such as "vision" (`sinew
        skip`).
        """
        config: Any = self.model.config
        part = getattr(config, name)
        shorter = replace(part, num_layers=part.num_layers - count)
        model: Model = build_model_on_meta(type(self.model), replace(config, **{name: shorter}))
        own = self.model.state_dict()
        state = {key: tensor.to(own[key].dtype) for key, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.solver = self.model.solver
        return replace(self, model=model.eval().requires_grad_(False), like=None)

    @property
    def chunk(self) -> int:
        """Return the number of actions in a chunk."""
        return getattr(self.model.config, "chunk_size", self.model.noise_shape[0])

    @cached_property
    def fixed(self) -> dict[str, int]:
        """Return the sizes that the policy cannot change: views and actions that the weights fix, and the steps of
        a solver with a fixed number. A policy with an observation history is counted with all its observation
        steps.
        """
        moments = self.model.moments
        own = {
            "cameras": self.model.views if moments is None else math.prod(moments),
            "chunk": self.chunk if _weights_fix_chunk(self.model) else None,
            "steps": self.model.solver.fixed_steps,
        }
        return {name: value for name, value in own.items() if value is not None}

    def cast(self, dtypes: str | Mapping[str, str] | None) -> PublishedProgram:
        """Return the program with other number formats. Each weight gets the format of the stage that reads it.
        Modules in fp32 stay in fp32.
        """
        if dtypes is None:
            return self
        precision = by_stage(dtypes)
        streams = {stage.stream for stage in precision.values()}
        # This mapping is only necessary for several formats, and computing it takes a trace.
        read_by = self.read_by if len(streams) > 1 else {}
        model = on_meta(self.model)
        state = {}
        for name, tensor in model.state_dict().items():
            wide = name.split(".")[0] in model.float32_modules
            stream = precision[read_by.get(name, "prefix")].stream
            # Ternary weights keep their packed format.
            is_packed = not tensor.is_floating_point()
            state[name] = tensor if is_packed else tensor.to(torch.float32 if wide else stream)
        model.load_state_dict(state, assign=True)
        return replace(self, model=model.requires_grad_(False), precision=precision, like=None)

    @cached_property
    def read_by(self) -> dict[str, str]:
        """For each weight, return the first stage that reads it, by the name of the weight. The result does not depend
        on the shapes, so the smallest ones are traced.
        """
        views = self.fixed.get("cameras", 1)
        smallest = trace(self.model, replace(self.shapes, views=views, tokens=1))
        return {name: calls[0].stage for name, calls in smallest.readers().items()}

    @cached_property
    def plan(self) -> Plan | None:
        if self.prepared is not None:
            return self.prepared
        if self.like is not None and self.like.engine == self.engine:
            return self.like.plan
        return Plan.of(self.model, self.shapes.steps) if self.engine == "plan" else None

    @property
    def executed(self) -> Model:
        """Return the model whose weights are read: the plan's model, or the model itself without a plan."""
        return self.model if self.plan is None else self.plan.model

    @cached_property
    def trace(self) -> ProgramTrace:
        if self.like is not None and self.like.engine == self.engine:
            return self.like.trace
        return trace(self.model, self.shapes, self.plan)

    @property
    def number_format(self) -> str:
        """Return the format of the vision tower's weights, or of the first weights if the model has none."""
        if self.precision is not None:
            return self.precision["vision"].weights
        return as_traced(next(call for call in self.trace.calls if call.is_product)).weights

    def precision_of(self, call: TracedCall) -> Precision:
        return as_traced(call) if self.precision is None else self.precision[call.stage]

    def components(self, traffic: Traffic = "fused") -> list[Component]:
        """Return the stages as components. The head is one solver step, repeated.

        Args:
            traffic: "unfused": every call reads its operands from memory and writes its results there, as in the
                eager engine. "fused": only products and table look-ups use memory, with attention's scores on the
                chip. "weights": only weights use memory, and all activations, keys and values stay in the cache (the
                lower bound in arXiv 2510.26742, section 5.1).

        Raises:
            SinewError: The traffic is unknown.
        """
        if traffic not in get_args(Traffic):
            raise SinewError(f"traffic: expected one of {', '.join(get_args(Traffic))}, got {traffic!r}")
        recorded = self.trace
        return [
            Component(stage, self._operators(recorded.of(stage), traffic), _repeats(stage, recorded))
            for stage in STAGES
        ]

    def _operators(self, calls: list[TracedCall], traffic: Traffic) -> tuple[Operator, ...]:
        # A Counter keeps the order of first appearance. Equal layers become one row.
        counts: Counter[Operator] = Counter()
        for call in calls:
            if traffic == "unfused" or call.is_product or call.operator == "embedding":
                counts[self._operator(call, traffic)] += 1
        return tuple(replace(operator, count=count) for operator, count in counts.items())

    def _operator(self, call: TracedCall, traffic: Traffic) -> Operator:
        precision, fused = self.precision_of(call), traffic != "unfused"
        tensors = []
        for operand in call.operands:
            kind = operand.block.kind
            dtype, repeats = as_number_format(precision.of(operand, call, fused))
            stays = (fused and kind == "scores") or (traffic == "weights" and kind != "weight")
            residency = Residency.ON_CHIP if stays else Residency.HBM
            tensors.append(Tensor(operand.elements * repeats, dtype, residency, kind))
        compute = as_number_format(precision.compute(call, fused))[0]
        kernels = 2 if call.operator in FUSED_ATTENTION else 1
        return Operator(
            call.name,
            call.flops,
            tuple(tensors),
            compute,
            stage=call.stage,
            shape=call.shape,
            kernels=kernels,
        )


def _weights_fix_chunk(model: Model) -> bool:
    """Return True if the weights determine the number of actions in a chunk. Then a model with another number has
    other shapes, or its configuration rejects the number.
    """
    config = model.config
    if "chunk_size" not in (field.name for field in fields(config)):
        return True
    shapes = []
    for rows in (config.chunk_size, config.chunk_size - 1 or 2):
        try:
            other = replace(config, chunk_size=rows)
        except ValueError:
            return True
        with torch.device("meta"):
            made = type(model)(other)
        shapes.append({name: tensor.shape for name, tensor in made.state_dict().items()})
    return shapes[0] != shapes[1]


def _repeats(stage: str, recorded: ProgramTrace) -> int:
    return recorded.steps if stage == "head" else 1


def is_sizes_alone(source: str | Path) -> bool:
    """Return True for the name of a published model or a file that describes one. Such a model has no weights."""
    return str(source) in (*PRESETS, *MODEL_NAMES) or Path(source).suffix == ".json"


def of_bundle(path: Path) -> PublishedProgram:
    """Return a bundle's program. Only the header is read.

    Raises:
        SinewError: There is no such bundle.
    """
    try:
        bundle = open_bundle(path)
    except BundleError as error:
        raise SinewError(
            f"{error}{did_you_mean(path.name.lower(), (*PRESETS, *MODEL_NAMES))}; expected one of "
            f"{', '.join((*PRESETS, *MODEL_NAMES))}, FILE.json of a model's sizes, or a policy as for `sinew serve`"
        ) from None
    return of_opened(bundle)


def of_opened(bundle: Bundle) -> PublishedProgram:
    """Return the program of an opened bundle.

    Raises:
        SinewError: The bundle contains exported graphs, which have no weights.
    """
    if not bundle.infos:
        raise SinewError(f"{bundle.path}: expected a bundle with weights, got the head of exported graphs")
    model = load_model(bundle, torch.device("meta"), "native").eval().requires_grad_(False)
    name, family = bundle.manifest.spec.name, bundle.manifest.architecture
    return PublishedProgram(name, model, Shapes.of(bundle.manifest), family=family)


def of_model(model: Model, shapes: Shapes, name: str = "model") -> PublishedProgram:
    """Return the program of a model in memory, with the dtypes of its weights."""
    return PublishedProgram(name, on_meta(model).eval().requires_grad_(False), shapes)


def of_engine(engine: Running, shapes: Shapes, name: str) -> PublishedProgram:
    """Return the program that an engine runs, including its plan."""
    if engine.plan is None:
        return of_model(engine.model, shapes, name)
    plan = Plan(on_meta(engine.plan.model), engine.plan.outcomes)
    return PublishedProgram(name, plan.model, shapes, engine="plan", prepared=plan)


# A trace takes seconds, and `needs` and `scenarios` load the same programs again and again.
@lru_cache(maxsize=8)
def _of_preset(
    name: str,
    request: TracedRequest,
    dtypes: str | tuple[tuple[str, str], ...],
    engine: Engine,
) -> PublishedProgram:
    """Load a preset. Formats share one trace if torch computes their products in the same type, because then only the
    names of the formats differ.
    """
    precision = by_stage(dtypes if isinstance(dtypes, str) else dict(dtypes))
    floats = tuple((part, dtype_name(precision[stage].stream)) for part, stage in STAGE_OF.items())
    traced = _in_floats(name, request, floats, engine)
    return replace(traced, precision=precision, like=traced)


@lru_cache(maxsize=8)
def _in_floats(
    name: str, request: TracedRequest, floats: tuple[tuple[str, str], ...], engine: Engine
) -> PublishedProgram:
    return replace(preset(name).cast(dict(floats)), engine=engine).at(request)


@lru_cache
def preset(name: str) -> PublishedProgram:
    """Return a model at its published size, or as a file describes it. It has no checkpoint, and its weights are
    in fp32.
    """
    if name in PRESETS:
        description = published(name)
    else:
        description = described(_MODELS / f"{name}.json" if name in MODEL_NAMES else Path(name))
    model = build_on_meta(description.architecture, description.config).eval().requires_grad_(False)
    shapes = Shapes(
        description.views,
        description.side,
        description.width or description.side,
        description.tokens,
        description.steps,
    )
    return PublishedProgram(name, model, shapes, family=description.architecture)
