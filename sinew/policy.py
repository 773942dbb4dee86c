"""A loaded policy, which turns observations into action chunks.

Imports no torch: a policy whose engine is ONNX Runtime runs without torch installed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.open_policy import Limit, OpenPolicy, asking

from sinew.assemble import LoadOptions, assemble, shown_source
from sinew.bundle import EXPORTED, Bundle
from sinew.bundle.adapter import unknown
from sinew.convert.sources import resolve
from sinew.core import ActionChunk, Moment, Observation, ObservationError, SinewError, did_you_mean
from sinew.describe import DescribedPolicy
from sinew.engine.capability import Capability
from sinew.engine.engine import Engine
from sinew.engine.watch import Watch
from sinew.models.solvers import Solver
from sinew.processing import (
    BatchKey,
    Prepared,
    Processor,
    batch_key,
    given,
    stack_prompts,
)


def load(
    path: str | Path,
    device: str | None = None,
    dtype: str | None = None,
    engine: str | None = None,
    **options: Any,
) -> Policy:
    """Load a policy from a bundle, a checkpoint or a hub name.

    Args:
        path: The bundle, a checkpoint or training run, or a name of the hub.
        device: "cpu" or "cuda:N". None takes a GPU if PyTorch has one.
        dtype: "fp32", "bf16", "fp16", or "native" for the precision of the bundle. None chooses by device and engine.
        engine: Name of an engine, such as "eager" or "cuda". None takes the fastest one that fits and is verified.
        **options: Further options: ``rename``, ``threads``, ``adapters``, ``reuse`` ... See
            :class:`sinew.assemble.LoadOptions`.

    Returns:
        The policy. Close it, or use it in a ``with`` block.

    Raises:
        SinewError: The policy cannot be loaded, or an option does not fit it or this machine.
        TypeError: There is no such option.

    Example:
        >>> with sinew.load("blocks") as policy:
        ...     chunk = policy.infer(observation)
    """
    known = [each.name for each in fields(LoadOptions)]
    for word in options:
        if word not in known:
            raise TypeError(
                f"sinew.load: expected {', '.join(known)}, got {word!r}{did_you_mean(word, known)}"
            )
    policy = Policy(open_bundle(path), device, dtype, engine, **options)
    policy.identity["source"] = shown_source(str(path))
    return policy


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle by path or name. Reads no weights, and imports torch only if a checkpoint has to be converted."""
    found = resolve(path)
    return Bundle(found / EXPORTED if found.is_dir() else found)


class Policy(DescribedPolicy, OpenPolicy):
    """A loaded policy. Any thread may call its methods; one inference runs at a time.

    Args:
        bundle: The bundle.
        device: See :class:`sinew.assemble.LoadOptions`, as for all other options.
        dtype: Precision.
        engine: Name of an engine.
        **options: The other options.

    Raises:
        SinewError: An option does not fit the bundle or this machine.
    """

    keeps_frames = False  # no frame is read after infer has returned

    def __init__(
        self,
        bundle: Bundle,
        device: str | None = None,
        dtype: str | None = None,
        engine: str | None = None,
        **options: Any,
    ):
        vars(self).update(vars(assemble(bundle, LoadOptions(device, dtype, engine, **options))))
        self.processor, processing = self.processors[""], self.manifest.processing
        self.engine_name, self.device = self.choice.engine, self.facts.device
        self.dtype = self.choice.options.dtype
        self.unbatched = self.capabilities.why_not(Capability.BATCH)
        # Another run may begin between two steps of one
        self.pauses = Capability.STREAM not in self.capabilities.refusals
        # The widths of vla.cpp's clients: of the states that they send, and of the actions that they receive
        self.padded_state_dim = processing.padded_state_dim
        self.padded_action_dim = processing.padded_action_dim

    @property
    def engine(self) -> Engine:
        """The engine that computes. Raises :class:`ClosedError` after :meth:`close`."""
        if self.opened is None:
            self._refuse_closed()
        assert self.opened is not None
        return self.opened

    @property
    def threads(self) -> int:
        """Number of threads that compute."""
        return self.engine.threads

    def check(self, observation: Observation | Mapping[str, Any]) -> None:
        """Check an observation without computing anything.

        Args:
            observation: As in :meth:`infer`.

        Raises:
            ObservationError: This policy does not accept a field of it.
        """
        taken, processor = self._taken(observation)
        processor.check(taken)

    def infer(
        self,
        observation: Observation | Mapping[str, Any],
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> ActionChunk:
        """Compute one action chunk.

        Args:
            observation: An observation, or a dict with its fields. Frames may be PIL images or torch tensors, and
                keys may be LeRobot's flat ones (:mod:`sinew.processing.given`).
            timeout: Seconds until RequestTimeout is raised; checked between two stages. None waits until the end.
            cancel: An event that cancels the inference between two stages.

        Returns:
            The chunk, float32 [H, action_dim] in robot units.

        Raises:
            ObservationError: A field is wrong.
            RequestTimeout: ``timeout`` has passed.
            CancelledError: ``cancel`` was set.
            BundleError: A file of weights was changed after the load.
            ClosedError: The policy is closed.
        """
        if timeout is None:
            return self.run(self.prepare(observation), cancel=cancel)
        with Limit(timeout, cancel) as limit:
            return self.run(self.prepare(observation), cancel=limit)

    def infer_all(
        self,
        observations: Sequence[Observation | Mapping[str, Any]],
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> list[ActionChunk | SinewError]:
        """Compute the chunks of several observations.

        Observations with the same :meth:`batch_key` are computed in one inference, in float32 within 1e-5 of
        :meth:`infer`. If the engine does not support batches (``unbatched`` has the reason), they are computed one by
        one.

        Args:
            observations: As in :meth:`infer`.
            timeout: Seconds for all of them; None waits until the end.
            cancel: An event that cancels the inference.

        Returns:
            One entry per observation, in their order: its chunk, or its error.

        Raises:
            SinewError: An error that concerns all observations, as in :meth:`infer`.
        """
        self._refuse_closed()
        outcomes: list[Any] = []
        kinds: dict[Any, list[int]] = {}
        with Limit(timeout, cancel) as limit:
            for index, each in enumerate(observations):
                try:
                    outcomes.append(self.prepare(each))
                except SinewError as error:
                    outcomes.append(error)
                    continue
                key = None if self.unbatched else self.batch_key(outcomes[-1])
                kinds.setdefault(index if key is None else key, []).append(index)
            for members in kinds.values():
                chunks = self.run_batch([outcomes[index] for index in members], cancel=limit)
                for index, chunk in zip(members, chunks, strict=True):
                    outcomes[index] = chunk
        return outcomes

    def ask(
        self,
        observation: Observation | Mapping[str, Any],
        question: str,
        max_tokens: int | None = None,
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> str:
        """Let the language head answer a question about an observation. Decoding is greedy.

        Args:
            observation: As in :meth:`infer`.
            question: The question; not empty.
            max_tokens: Largest number of tokens in the answer; None for the bundle's own.
            timeout: As in :meth:`infer`.
            cancel: As in :meth:`infer`; checked between two tokens.

        Returns:
            The answer.

        Raises:
            ObservationError: The question is empty, or the bundle has no language head. All errors of :meth:`infer`
                are possible too.
        """
        return self.infer(asking(observation, question, max_tokens), timeout=timeout, cancel=cancel).text

    def subtask(
        self,
        observation: Observation | Mapping[str, Any],
        max_tokens: int | None = None,
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> str:
        """Let the language head name the next subtask of the instruction, without actions.

        For a subtask and actions in one call, set ``subtask`` in the observation.

        Args:
            observation: As in :meth:`infer`.
            max_tokens: Largest number of tokens; None for the bundle's own.
            timeout: As in :meth:`infer`.
            cancel: As in :meth:`infer`; checked between two tokens.

        Returns:
            The subtask.

        Raises:
            ObservationError: The bundle has no language head. All errors of :meth:`infer` are possible too.
        """
        return self.infer(asking(observation, None, max_tokens), timeout=timeout, cancel=cancel).text

    def prepare(self, observation: Observation | Mapping[str, Any]) -> Prepared:
        """Run the first half of :meth:`infer`: check, tokenise, normalise, resize.

        It needs no lock, so a server prepares one observation while another one is computed.

        Args:
            observation: As in :meth:`infer`.

        Returns:
            The inputs for :meth:`run`.

        Raises:
            ObservationError: A field is wrong.
        """
        self._refuse_closed()
        taken, processor = self._taken(observation)
        return processor.prepare(taken, pixels=not self.facts.takes_frames)

    def _taken(self, observation: Observation | Mapping[str, Any]) -> tuple[Observation, Processor]:
        """Convert an observation to our form, check that this policy supports its requests, and return it with its
        processor.
        """
        taken = given.observation(observation, self.spec)
        self.capabilities.check(taken, self.spec)
        name: object = taken.adapter
        if not isinstance(name, str) or name not in self.processors:
            raise ObservationError("adapter", *unknown(name, self.adapters))
        return taken, self.processors[name]

    def run(
        self,
        prepared: Prepared,
        *,
        cancel: threading.Event | None = None,
        between: Callable[[], None] | None = None,
    ) -> ActionChunk:
        """Run the second half of :meth:`infer`, one observation at a time.

        Args:
            prepared: The result of :meth:`prepare`.
            cancel: As in :meth:`infer`.
            between: Called after each solver step. Another run may begin inside it if ``pauses`` is True.

        Returns:
            The chunk.

        Raises:
            SinewError: As in :meth:`infer`.
        """
        (outcome,) = self.run_batch([prepared], cancel=cancel, between=between)
        if isinstance(outcome, SinewError):
            raise outcome
        return outcome

    def run_batch(
        self,
        members: Sequence[Prepared],
        *,
        cancel: threading.Event | None = None,
        between: Callable[[], None] | None = None,
    ) -> list[ActionChunk | SinewError]:
        """Run several observations of one :func:`sinew.processing.batch_key` together, in float32 within 1e-5 of
        :meth:`run` (docs/batches.md).

        Args:
            members: Results of :meth:`prepare`.
            cancel: As in :meth:`infer`.
            between: As in :meth:`run`.

        Returns:
            One entry per member: its chunk, or its error, which does not affect the others.

        Raises:
            SinewError: An error that concerns all: the engine does not support batches, the members do not fit
                together, ``cancel`` was set, or a file of weights was changed.
        """
        first = members[0]
        if len(members) > 1:
            if self.unbatched:
                raise SinewError(f"a batch of {len(members)}: {self.unbatched}")
            if None in (keys := {self.batch_key(member) for member in members}) or len(keys) > 1:
                raise SinewError("a batch: expected observations of one batch_key")
        guidance, noise = _steered(members, self.spec.solver, self.engine.place)
        alone = len(members) == 1 and first.unconditional is None
        prompt = self.processors[first.adapter].recipe.prompt
        inputs = first.inputs.batched() if alone else stack_prompts(members, prompt)
        with self.lock:
            self.files.check()  # before the weights are read: reading a truncated file would end the process
            start, watch = time.perf_counter(), Watch(cancel, between=between)
            if self.start.reuse_open:
                self.start.start_reuse(self.engine, self.prepare(self.dummy_observation()).inputs.batched())
            engine, text = self.engine.adapters[first.adapter] if first.adapter else self.engine, ""
            if (words := first.words) is None:
                chunks = engine.run(inputs, noise, first.steps, guidance, watch)
            else:
                end = self.manifest.processing.prompt.eos_token_id
                context, tokens = engine.say_text(inputs, words.most, end, words.behind, watch)
                text = self.processor.prompter.words(tokens)
                if words.behind is None:
                    chunks = np.zeros((1, 0, self.spec.action.dim), np.float32)
                else:
                    chunks = engine.solve(context, noise, first.steps, guidance, watch)
            computed = time.perf_counter()
            outcomes = [
                finished(
                    chunk, member, self.processors[member.adapter], normalized=not self.facts.world_units
                )
                for chunk, member in zip(chunks, members, strict=True)
            ]
            end_time = time.perf_counter()
            self.files.check()
        return [
            actions
            if isinstance(actions, SinewError)
            else ActionChunk(
                actions,
                watch.timing(
                    len(members),
                    postprocess_ms=1e3 * (end_time - computed),
                    preprocess_ms=member.milliseconds,
                    total_ms=1e3 * (end_time - start) + member.milliseconds,
                ),
                member.seed if len(actions) else None,
                member.session,
                member.time,
                self.warnings(member),
                text=text,
                adapter=member.adapter,
            )
            for actions, member in zip(outcomes, members, strict=True)
        ]

    def exchange(self, weights: Mapping[str, Any]) -> None:
        """Replace weights between two inferences. Waiting requests are computed with the new weights, and none is
        dropped.

        Args:
            weights: Name in the bundle -> tensor or array, which is copied. Other weights stay.

        Raises:
            SinewError: A name, shape or number does not fit, or the engine does not support it. The old weights then
                stay.
        """
        with self.lock:
            self.engine.exchange(weights)

    def batch_key(self, prepared: Prepared) -> BatchKey | None:
        """Return the properties that observations must share to run in one batch.

        Args:
            prepared: The result of :meth:`prepare`.

        Returns:
            The properties; None for a request for text, which always runs alone.
        """
        if prepared.words is not None:
            return None
        key = batch_key(prepared)
        return key._replace(prompt=len(prepared.inputs.tokens)) if self.facts.exact_lengths else key

    def cost_key(self, prepared: Prepared) -> Hashable:
        """Return the properties that determine how long an observation takes.

        Args:
            prepared: The result of :meth:`prepare`.

        Returns:
            The properties. Observations with equal keys take equally long.
        """
        key, words = batch_key(prepared), prepared.words
        return key if words is None else (key, words.most, words.behind is None)

    def problem(self) -> str | None:
        """Return the error of a file of weights that was changed after the load, in a sentence; None if there is
        none.
        """
        return self.files.problem()

    def warm_up(self) -> ActionChunk:
        """Run one inference on grey frames, on the thread that will infer later.

        It loads the weights into memory, lets torch allocate and pick its kernels, records the CUDA engine's graphs
        for frames of the declared sizes, and chooses the number of threads if you did not.

        Returns:
            The chunk of the grey frames.
        """
        observation = self.dummy_observation()
        self.start.pause_reuse(self.engine)
        chunk = self.infer(observation)
        inputs = self.prepare(observation).inputs.batched()
        self.engine.warm(inputs, self.spec.solver_steps, self.spec.max_prompt_tokens)
        for name in self.adapters:
            self.infer(replace(observation, adapter=name))
        self.start.tune_threads(self.engine, lambda: self.infer(observation))
        self.start.start_reuse(self.engine, inputs)
        return chunk

    def dummy_observation(self) -> Observation:
        """Return a valid observation with grey frames, a short instruction, a state of zeros and allowed choices."""
        grey = {c.name: np.full((c.height, c.width, 3), 128, np.uint8) for c in self.spec.cameras}
        state = np.zeros(self.spec.state.dim, np.float32)
        for step in self.processor.recipe.state_steps:
            if step.choices:
                state[list(step.dims)] = step.choices[0]
        earlier = (Moment(grey, state),) * (self.spec.history - 1)
        return Observation(grey, state, prompt="pick up the cube", seed=0, earlier=earlier)

    def _release(self) -> None:
        """Release engine and weights, after the present inference."""
        with self.lock:
            self.opened = None


def _steered(
    members: Sequence[Prepared], solver: Solver, place: Callable[[np.ndarray], Any]
) -> tuple[Any, np.ndarray]:
    """Return the guidance of members of one batch, None for none, and the noise that they start from, [B, H, A]."""
    first, guidance = members[0], None
    noise = np.stack([member.noise for member in members]) if len(members) > 1 else first.noise[None].copy()
    if first.continuation is not None:
        from sinew.engine.guidance import guide

        running = [member.continuation for member in members if member.continuation is not None]
        guidance, noise = guide(running, solver, noise, place)
    if first.unconditional is not None:
        from sinew.engine.guidance import ClassifierFree

        scales = np.array([member.scale for member in members], np.float32)
        guidance = ClassifierFree(scales, place, guidance)
    return guidance, noise


def finished(
    chunk: np.ndarray, member: Prepared, processor: Processor, *, normalized: bool
) -> np.ndarray | SinewError:
    """Return the actions of a member in robot units, or the error that concerns it alone."""
    if not len(chunk):
        return chunk
    try:
        return processor.finish(chunk, member.state, normalized=normalized)
    except SinewError as error:
        return error
