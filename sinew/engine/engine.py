"""The interface of an engine: a record of its properties (:class:`Facts`), and two methods.

This module imports numpy, but no PyTorch.

    context = engine.read(inputs)                    # once per observation
    chunk = engine.solve(context, noise, steps)      # any number of times

``read`` runs the vision tower and the language model. The context is their result, which the action head needs.
``solve`` runs the action head in a loop and returns actions. All other functions use these two methods:

* a chunk: :meth:`Engine.run`
* batches: every array has a batch axis
* streams: each method runs on its own thread
* split execution: the context is sent to another machine
* traces and times: :class:`Watch`
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

# The context: the result of Engine.read, which Engine.solve needs. Each engine uses its own type of array.
Context = Any


@dataclass(frozen=True)
class Facts:
    """The properties and optional features of an open engine.

    Attributes:
        device: The device, such as "cpu" or "cuda:0".
        precision: The precision in which each component (vision, language, head) computes.
        recipe: The low-bit precision of each component in which this engine really multiplies, instead of converting
            the weights to floats.
        weights_nbytes: Bytes of the weights in memory.
        guides: The methods of real-time chunking (values of an observation's ``rtc``) that :meth:`Engine.solve`
            supports.
        refusals: Capabilities that the engine lacks with this bundle on this device, each with its reason.
            :meth:`sinew.engine.backend.Backend.open` adds the capabilities that the engine always lacks.
        exact_lengths: True if prompts of a batch must have equal lengths.
        takes_frames: True if the engine resizes raw frames on the device.
        world_units: True if the engine returns actions in robot units, with the normalisation inverted.
        one_graph: True if the engine runs all stages as one graph, unless a watch requires separate stages.
        rolling: True if actions of a chunk are denoised at their own times (:meth:`Engine.evaluate`).
        head_reads_state: True if :meth:`Engine.renew` gives a context a newer state.
        chooses_tokens: True if the head chooses tokens, so that a rounding error in the context may give other
            actions.
        providers: The execution providers of ONNX Runtime that compute.
        assigned: The share of the graphs that each ONNX Runtime provider computes, as text. "" with a single
            provider.
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
    """The operations of one stage of the model that a CUDA graph could not record.

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
    """A model on a device. It computes B observations at once, and one observation is a batch of one.

    ``run`` is not reentrant. A context is complete when :meth:`read` returns it, and no method changes it later.
    Therefore :meth:`read` and :meth:`solve` may run on two threads, unless ``facts.refusals`` contains STREAM.

    Attributes:
        facts: The facts and capabilities of this engine.
        model: The PyTorch model that the engine runs, on ``device``, with its rewrites in ``plan``. None if the engine
            does not run a PyTorch model.
        adapters: For each adapter's name, an engine that computes with this adapter and shares the base weights. Only
            the engine that read a context can solve this context.
        reuse: The stored results of earlier observations. None if the engine stores no results.
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
        """Return the number of threads that this engine computes with."""

    @abstractmethod
    def read(self, inputs: ModelInputs, watch: Watch | None = None) -> Context:
        """Compute the context of the observations: the results of vision tower and language model, which the action
        head needs.

        Views are encoded once, even with several prompts for the same views.

        Args:
            inputs: The observations, with a batch axis (:func:`sinew.processing.stack`).
            watch: Measures and stops the run.
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
        """Compute actions from a context: run the solver, which calls the action head once per step.

        Args:
            context: The result of :meth:`read`.
            noise: The start of the solver, float32 [B, H, A].
            steps: The number of solver steps.
            guidance: Steers the solution. A guidance with ``rows`` evaluates the head for several rows of the context
                per request.
            watch: Measures and stops the run.

        Returns:
            The actions, float32 [B, H, A] in model units.
        """

    def run(
        self,
        inputs: ModelInputs,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        """Compute actions from observations: call :meth:`read` with the inputs, then :meth:`solve` with the resulting
        context.
        """
        return self.solve(self.read(inputs, watch), noise, steps, guidance, watch)

    def trace(self, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Trace:
        """Run all stages of the model for one observation, and return the result of each stage, for comparisons.

        The arguments are those of :meth:`run`, with a batch axis of one.
        """
        trace = Trace()
        self.run(inputs, noise, steps, watch=Watch(trace=trace))
        return trace

    def place(self, array: np.ndarray) -> Any:
        """Convert a numpy array to the array type (such as a PyTorch tensor) that a guidance of this engine needs."""
        return array

    def warm(self, inputs: ModelInputs, steps: int, longest: int) -> None:
        """Prepare the engine before the first request, so that no request waits for a preparation.

        Args:
            inputs: An observation with frames of the size that requests will have. A batch prepares the engine for
                batches of up to this many observations.
            steps: The number of solver steps.
            longest: The largest number of prompt tokens.
        """
        return

    def audit(self, inputs: ModelInputs, steps: int) -> list[Audited]:
        """List the operations that a CUDA graph of the program could not record. The method computes no actions.

        Args:
            inputs: One observation.
            steps: The number of solver steps.
        """
        raise self.cannot(Capability.AUDIT)

    def start_reuse(self, inputs: ModelInputs) -> str:
        """Start to cache results, for later observations that repeat earlier ones.

        Call this method on the thread that will infer.

        Args:
            inputs: An example, a batch of one observation.

        Returns:
            The reason why the engine cannot cache each camera view alone, or "" if it can
            (:mod:`sinew.engine.reuse`).
        """
        raise self.cannot(Capability.REUSE)

    def tune_threads(self, infer: Callable[[], object]) -> str:
        """Try several numbers of threads and use the best number.

        Returns:
            The reason for the chosen number, or "" if the engine cannot choose the number.
        """
        return ""

    def exchange(self, weights: Mapping[str, Any]) -> None:
        """Replace weights. The change applies to every later call of :meth:`read` and :meth:`solve`. Weights that are
        not named stay unchanged.

        Args:
            weights: The new weights, by their names in the bundle.

        Raises:
            SinewError: A weight does not fit. No weight is replaced then.
        """
        raise self.cannot(Capability.EXCHANGE)

    def say_text(
        self,
        inputs: ModelInputs,
        most: int,
        end: int = -1,
        behind: Sequence[int] | None = (),
        watch: Watch | None = None,
    ) -> tuple[Context, list[int]]:
        """Generate text after the prompt of one observation.

        Each token is the token with the highest score. The language model reads the prompt once. Each new token adds
        its keys and values to the context.

        Args:
            inputs: The observation.
            most: The largest number of tokens.
            end: The token that ends the text. It is not part of the text.
            behind: Tokens that follow the text before an action head reads the context. None if no head reads the
                context.
            watch: Measures and stops the run.

        Returns:
            The context with the text (None if ``behind`` is None), and the text's tokens.
        """
        raise self.cannot(Capability.SPEAK)

    def renew(self, context: Context, state: np.ndarray) -> Context:
        """Return the context with a newer state of the robot, float32 [B, S].

        If the action head does not read the state, the result is the same context.
        """
        return context

    def evaluate(self, context: Context, x: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Return the head's output, float32 [B, H, A], for actions at different denoising times.

        Args:
            context: The result of :meth:`read`.
            x: The actions, float32 [B, H, A].
            times: The denoising time of each action, float64 [B, H].
        """
        raise self.cannot(Capability.ROLL)

    def read_text(self, inputs: ModelInputs, text: list[int]) -> tuple[Context, int]:
        """Read one observation with ``text`` after its prompt, in one pass.

        Returns:
            The context, and the next token with the highest score.
        """
        raise self.cannot(Capability.SPEAK)

    def check(self, capability: Capability) -> None:
        """Check that this engine has a capability.

        Raises:
            SinewError: The engine lacks the capability.
        """
        if capability in self.facts.refusals:
            raise self.cannot(capability)

    def cannot(self, capability: Capability) -> SinewError:
        """Return the exception for a call that needs ``capability``, which this engine lacks. The caller raises it."""
        name = type(self).__name__.removesuffix("Engine").lower()
        refusal = Refusal(f"an engine {capability.clause}", f"engine {name}")
        return SinewError(str(self.facts.refusals.get(capability, refusal)))
