"""What an engine is: a record of facts, and two verbs. Needs numpy alone.

    context = engine.read(inputs)                    # once per observation
    chunk = engine.solve(context, noise, steps)      # as often as wished

Everything else is made of them: a chunk (:meth:`Engine.run`), batches (every array has a batch axis), streams (the two
verbs on threads of their own), split execution (a context that travels), traces and times (:class:`Watch`).
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

Context = Any  # what read leaves for solve, in the engine's own arrays


@dataclass(frozen=True)
class Facts:
    """The facts and capabilities of an open engine.

    Attributes:
        device: Such as "cpu" or "cuda:0".
        precision: Component -> precision in which it computes.
        recipe: Precisions of components that this engine quantises itself.
        weights_nbytes: Bytes of the weights in memory.
        guides: Values of an observation's ``rtc`` that :meth:`Engine.solve` supports.
        refusals: Capabilities that it lacks with this bundle on this device, each with its reason.
            :meth:`sinew.engine.backend.Backend.open` adds those that the engine always lacks.
        exact_lengths: True if prompts of a batch must have equal lengths.
        takes_frames: True if it resizes raw frames on the device.
        world_units: True if it returns un-normalised actions.
        one_graph: True if it runs all stages as one graph, unless a watch requires separate stages.
        rolling: True if actions of a chunk are denoised at their own times (:meth:`Engine.evaluate`).
        head_reads_state: True if :meth:`Engine.renew` gives a context a newer state.
        chooses_tokens: True if a rounded context may give other actions.
        assigned: Share of the graphs of each of several providers; "" with a single engine.
        files: Files of weights in addition to the bundle.
        notes: Notes for people.
        details: The same for reports, by key.
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
        operators: Operators that compute.
        nbytes: Bytes of the tensors that they allocate, in the recording's own memory.
        breaks: Operations that cannot be recorded, with their lines.
    """

    stage: str
    operators: int
    nbytes: int
    breaks: tuple[str, ...]


class Engine(ABC):
    """A model on a device. B observations are read and solved at once; one is a batch of one.

    ``run`` is not reentrant. Contexts are whole and never written to again, so :meth:`read` and :meth:`solve` may run
    on two threads unless ``facts.refusals`` has STREAM.

    model: the PyTorch model that it runs, on ``device``, with its rewrites in ``plan``; None where it runs something
        else.
    adapters: by name the engines that compute with an adapter over the same weights; contexts are their own.
    reuse: what it keeps of earlier observations; None: nothing, every read computes all.
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

        Views are encoded once, even with several prompts over them.

        inputs: Model inputs with a batch axis (:func:`sinew.processing.stack`).
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
        """Return the solution from noise float32 [B, H, A], float32 [B, H, A] in model units. A guidance with
        ``rows`` asks the head of a context of several rows for each of B."""

    def run(
        self,
        inputs: ModelInputs,
        noise: np.ndarray,
        steps: int,
        guidance: Guidance | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray:
        """Return :meth:`solve` of :meth:`read`."""
        return self.solve(self.read(inputs, watch), noise, steps, guidance, watch)

    def trace(self, inputs: ModelInputs, noise: np.ndarray, steps: int) -> Trace:
        """Return the results of each stage for one observation. The arguments have a batch axis of one."""
        found = Trace()
        self.run(inputs, noise, steps, watch=Watch(trace=found))
        return found

    def place(self, array: np.ndarray) -> Any:
        """Return an array as a guidance of this engine needs it."""
        return array

    def warm(self, inputs: ModelInputs, steps: int, longest: int) -> None:
        """Make what requests with such frames and prompts of up to ``longest`` tokens will need, so that none waits."""
        return

    def audit(self, inputs: ModelInputs, steps: int) -> list[Audited]:
        """Return the problems of a recording of the program for ``inputs``, one observation. Nothing is computed."""
        raise self.cannot(Capability.AUDIT)

    def start_reuse(self, inputs: ModelInputs) -> str:
        """Keep from now on what observations like ``inputs``, a batch of one, repeat; return why views are not kept
        one by one, "" if they are (:mod:`sinew.engine.reuse`). Call on the thread that will infer."""
        raise self.cannot(Capability.REUSE)

    def tune_threads(self, infer: Callable[[], object]) -> str:
        """Choose the number of threads by trying, and return the reason; "" where there is nothing to choose."""
        return ""

    def exchange(self, weights: Mapping[str, Any]) -> None:
        """Take other weights, by their names in the bundle, for all that is read and solved from now on; those that are
        not named stay. Raises :class:`SinewError` for weights that do not fit, and then changes none."""
        raise self.cannot(Capability.EXCHANGE)

    # ------------------------------------------------------------------------- of language heads

    def say_text(
        self,
        inputs: ModelInputs,
        most: int,
        end: int = -1,
        behind: Sequence[int] | None = (),
        watch: Watch | None = None,
    ) -> tuple[Context, list[int]]:
        """Return the context of one observation with a text behind its prompt, and the text: the likeliest token each
        time, until ``end``, which is left out, at most ``most``.

        behind: tokens that follow the text before a head acts on it; None where none will, and then there is no
        context. What the prompt left is kept: each token is one row more.
        """
        raise self.cannot(Capability.SPEAK)

    # ------------------------------------------------------------------------- of streams

    def renew(self, context: Context, state: np.ndarray) -> Context:
        """Return the context with a newer state, float32 [B, S], where the head reads it; else the same context."""
        return context

    def evaluate(self, context: Context, x: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Return the head's output for x float32 [B, H, A] whose actions are at ``times``, float64 [B, H]."""
        raise self.cannot(Capability.ROLL)

    def read_text(self, inputs: ModelInputs, text: list[int]) -> tuple[Context, int]:
        """Return the context of one observation, and the likeliest token behind ``text``, from the same pass."""
        raise self.cannot(Capability.SPEAK)

    def cannot(self, capability: Capability) -> SinewError:
        """Return the error that rejects a call which needs a capability that this engine lacks."""
        name = type(self).__name__.removesuffix("Engine").lower()
        refusal = Refusal(f"an engine {capability.clause}", f"engine {name}")
        return SinewError(str(self.facts.refusals.get(capability, refusal)))
