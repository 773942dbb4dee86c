"""The interface of an engine: a record of facts, and two methods. This module needs numpy alone.

    context = engine.read(inputs)                    # once per observation
    chunk = engine.solve(context, noise, steps)      # any number of times

Everything else is made of the two methods: a chunk (:meth:`Engine.run`), batches (every array has a batch axis),
streams (each method runs on its own thread), split execution (the context is sent to another machine), traces and times
(:class:`Watch`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sinew.core import SinewError
from sinew.engine.capability import Capability, Refusal
from sinew.engine.reuse import Reuse
from sinew.engine.watch import Trace, Watch
from sinew.models.solvers import Guidance
from sinew.processing import ModelInputs

# The result of Engine.read, which Engine.solve needs. Each engine uses its own type of array.
Context = Any


@dataclass(frozen=True)
class Facts:
    """The facts and capabilities of an open engine.

    Attributes:
        device: The device, such as "cpu" or "cuda:0".
        precision: Component -> precision in which the component computes.
        recipe: Precisions of components that this engine quantises itself.
        weights_nbytes: Bytes of the weights in memory.
        guides: Values of an observation's ``rtc`` that :meth:`Engine.solve` supports.
        refusals: Capabilities that the engine lacks with this bundle on this device, each with its reason.
            :meth:`sinew.engine.backend.Backend.open` adds the capabilities that the engine always lacks.
        exact_lengths: True if prompts of a batch must have equal lengths.
        takes_frames: True if the engine resizes raw frames on the device.
        world_units: True if the engine returns un-normalised actions.
        one_graph: True if the engine runs all stages as one graph, unless a watch requires separate stages.
        rolling: True if actions of a chunk are denoised at their own times (:meth:`Engine.evaluate`).
        head_reads_state: True if :meth:`Engine.renew` gives a context a newer state.
        chooses_tokens: True if a rounded context may give other actions.
        providers: The providers of ONNX Runtime that compute.
        assigned: The share of the graphs that each of several providers computes; "" with a single provider.
        files: Files of weights in addition to the bundle.
        notes: Notes for people.
        details: The same notes for reports, by key.
    """

    device: str
    precision: Mapping[str, str]
    recipe: Mapping[str, str]
    weights_nbytes: int
    guides: tuple[str, ...] = ()
    refusals: Mapping[Capability, Refusal] = field(default_factory=dict)
    exact_lengths: bool = False
    takes_frames: bool = False
    world_units: bool = False
    one_graph: bool = False
    rolling: bool = False
    head_reads_state: bool = False
    chooses_tokens: bool = False
    providers: tuple[str, ...] = ()
    assigned: str = ""
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Audited:
    """The problems of a recording of one stage.

    Attributes:
        stage: The stage's name.
        operators: The number of operators that compute.
        nbytes: Bytes of the tensors that these operators allocate, in the recording's own memory.
        breaks: Operations that cannot be recorded, with their lines.
    """

    stage: str
    operators: int
    nbytes: int
    breaks: tuple[str, ...]


class Engine(ABC):
    """A model on a device. B observations are read and solved at once; one observation is a batch of one.

    ``run`` is not reentrant. A context is complete when :meth:`read` returns it and is never written to again, so
    :meth:`read` and :meth:`solve` may run on two threads unless ``facts.refusals`` has STREAM.

    Attributes:
        facts: The facts and capabilities of this engine.
        model: The PyTorch model that the engine runs, on ``device``, with its rewrites in ``plan``; None if the engine
            does not run a PyTorch model.
        adapters: Name -> engine that computes with this adapter over the same weights. A context can be solved only by
            the engine that read it.
        reuse: The results that are kept of earlier observations; None if every read computes everything.
    """

    facts: Facts
    model: Any = None
    plan: Any = None
    device: Any = None
    adapters: Mapping[str, Engine] = MappingProxyType({})
    reuse: Reuse | None = None

    @property
    @abstractmethod
    def threads(self) -> int:
        """Return the number of threads that compute."""

    @abstractmethod
    def read(self, inputs: ModelInputs, watch: Watch | None = None) -> Context:
        """Return the context of the observations for the head.

        ``inputs`` has a batch axis (:func:`sinew.processing.stack`). Views are encoded once, even with several prompts
        over them.
        """

    @abstractmethod
    def solve(
        self,
        context: Context,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        """Return the actions that the solver reaches from ``noise``: both are float32 [B, H, A], the actions in model
        units. A guidance with ``rows`` evaluates the head for several rows of the context per request."""

    def run(
        self,
        inputs: ModelInputs,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        """Read the inputs, solve their context, and return the actions of :meth:`solve`."""
        return self.solve(self.read(inputs, watch), noise, steps, guidance, watch)

    def trace(self, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Trace:
        """Return the results of each stage for one observation. The arguments have a batch axis of one."""
        trace = Trace()
        self.run(inputs, noise, steps, watch=Watch(trace=trace))
        return trace

    def place(self, array: np.ndarray) -> Any:
        """Return ``array`` in the form that a guidance of this engine needs."""
        return array

    def warm(self, inputs: ModelInputs, steps: int, longest: int) -> None:
        """Prepare everything that requests with frames of this size and prompts of up to ``longest`` tokens need, so
        that no request waits for it."""
        return

    def audit(self, inputs: ModelInputs, steps: int) -> list[Audited]:
        """Return the problems of a recording of the program for ``inputs``, one observation. Nothing is computed."""
        raise self.cannot(Capability.AUDIT)

    def start_reuse(self, inputs: ModelInputs) -> str:
        """Start to keep results for later observations that repeat inputs like ``inputs``, a batch of one.

        Return why views are not kept one by one; "" if they are (:mod:`sinew.engine.reuse`). Call this method on the
        thread that will infer."""
        raise self.cannot(Capability.REUSE)

    def tune_threads(self, infer: Callable[[], object]) -> str:
        """Try several numbers of threads, use the best number, and return the reason; "" if there is no choice."""
        return ""

    def exchange(self, weights: Mapping[str, Any]) -> None:
        """Replace weights, by their names in the bundle, for every later read and solve. Weights that are not named
        stay.

        Raises :class:`SinewError` for weights that do not fit, and then replaces none."""
        raise self.cannot(Capability.EXCHANGE)

    def say_text(
        self,
        inputs: ModelInputs,
        most: int,
        end: int = -1,
        behind: Sequence[int] | None = (),
        watch: Watch | None = None,
    ) -> tuple[Context, list[int]]:
        """Generate text behind the prompt of one observation. Return the context with the text, and the text's tokens.

        Each token is the likeliest one. The text ends before the token ``end``, or after ``most`` tokens. ``behind``
        lists the tokens that follow the text before a head reads the context; None if no head reads it, and then the
        returned context is None. The context of the prompt is computed once: each token adds one row to it.
        """
        raise self.cannot(Capability.SPEAK)

    def renew(self, context: Context, state: np.ndarray) -> Context:
        """Return the context with a newer state, float32 [B, S], if the head reads the state; else the same context."""
        return context

    def evaluate(self, context: Context, x: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Return the head's output for ``x``, float32 [B, H, A], whose actions are at the denoising times ``times``,
        float64 [B, H]."""
        raise self.cannot(Capability.ROLL)

    def read_text(self, inputs: ModelInputs, text: list[int]) -> tuple[Context, int]:
        """Return the context of one observation with ``text`` behind its prompt, and the likeliest next token, from one
        pass."""
        raise self.cannot(Capability.SPEAK)

    def check(self, capability: Capability) -> None:
        """Raise SinewError if this engine lacks a capability, for example because its backend does not state it."""
        if capability in self.facts.refusals:
            raise self.cannot(capability)

    def cannot(self, capability: Capability) -> SinewError:
        """Return the error that rejects a call which needs a capability that this engine lacks."""
        name = type(self).__name__.removesuffix("Engine").lower()
        refusal = Refusal(f"an engine {capability.clause}", f"engine {name}")
        return SinewError(str(self.facts.refusals.get(capability, refusal)))
