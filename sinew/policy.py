"""A loaded policy, which computes action chunks from observations.

This module imports no torch, so that a policy on ONNX Runtime runs on a machine without torch.
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

from sinew.assemble import LoadOptions, shown_source
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
    stack,
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
        device: "cpu" or "cuda:N". None selects a GPU if PyTorch has one.
        dtype: "fp32", "bf16", "fp16", or "native" for the precision of the bundle. None selects by device and engine.
        engine: Name of an engine, such as "eager" or "cuda". None selects the fastest verified engine that fits.
        **options: Further options, such as ``rename``, ``threads``, ``adapters`` and ``reuse``. See
            :class:`sinew.assemble.LoadOptions`.

    Returns:
        The policy. Close the policy after use, or use it in a ``with`` block.

    Raises:
        SinewError: The policy cannot be loaded, or an option does not fit the policy or this machine.
        TypeError: An option is unknown.

    Example:
        >>> with sinew.load("blocks") as policy:
        ...     chunk = policy.infer(observation)
    """
    names = [each.name for each in fields(LoadOptions)]
    for word in options:
        if word not in names:
            raise TypeError(
                f"sinew.load: expected options {', '.join(names)}, got {word!r}{did_you_mean(word, names)}"
            )
    policy = Policy(open_bundle(path), device, dtype, engine, **options)
    policy.identity["source"] = shown_source(str(path))
    return policy


def open_bundle(path: str | Path) -> Bundle:
    """Open a bundle by path or name. Reads no weights. Imports torch only if a checkpoint must be converted first."""
    file = resolve(path)
    return Bundle(file / EXPORTED if file.is_dir() else file)


class Policy(DescribedPolicy, OpenPolicy):
    """A loaded policy. Any thread may call its methods; one inference runs at a time.

    Args:
        bundle: The bundle.
        device: See :class:`sinew.assemble.LoadOptions`.
        dtype: Precision; see :class:`sinew.assemble.LoadOptions`.
        engine: Name of an engine; see :class:`sinew.assemble.LoadOptions`.
        **options: Further fields of :class:`sinew.assemble.LoadOptions`.

    Raises:
        SinewError: An option does not fit the bundle or this machine.
    """

    # False means: no code reads a camera frame after `infer` has returned. The caller may then reuse the
    # memory of the frame.
    keeps_frames = False

    def __init__(
        self,
        bundle: Bundle,
        device: str | None = None,
        dtype: str | None = None,
        engine: str | None = None,
        **options: Any,
    ):
        super().__init__(bundle, LoadOptions(device, dtype, engine, **options))
        self.processor, processing = self.processors[""], self.manifest.processing
        self.engine_name, self.device = self.choice.engine, self.facts.device
        self.dtype = self.choice.options.dtype
        self.unbatched = self.capabilities.why_not(Capability.BATCH)
        # With an engine that supports streams, another run may start between two steps of a run, unless one graph
        # contains all steps.
        self.pauses = Capability.STREAM not in self.capabilities.refusals and not self.facts.one_graph
        # Clients of vla.cpp pad states and actions to these widths.
        self.padded_state_dim = processing.padded_state_dim
        self.padded_action_dim = processing.padded_action_dim

    @property
    def engine(self) -> Engine:
        """The engine, which computes the model. Raises :class:`ClosedError` after :meth:`close`."""
        if self.opened is None:
            self._refuse_closed()
        assert self.opened is not None
        return self.opened

    @property
    def threads(self) -> int:
        """Number of threads that the engine computes with."""
        return self.engine.threads

    def check(self, observation: Observation | Mapping[str, Any]) -> None:
        """Check an observation without running the policy.

        Args:
            observation: As in :meth:`infer`.

        Raises:
            ObservationError: The policy does not accept a field of the observation.
        """
        request, processor = self._accept(observation)
        processor.check(request)

    def infer(
        self,
        observation: Observation | Mapping[str, Any],
        *,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
    ) -> ActionChunk:
        """Compute one action chunk.

        Args:
            observation: An observation, or a dict with the fields of an observation. Frames may be PIL images or torch
                tensors, and keys may be LeRobot's flat keys (:mod:`sinew.processing.given`).
            timeout: Seconds until RequestTimeout is raised. It is checked between two stages. None: no limit.
            cancel: An event that cancels the inference between two stages.

        Returns:
            The chunk, float32 [H, action_dim] in robot units.

        Raises:
            ObservationError: A field is not valid.
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

        Observations with the same :meth:`batch_key` are computed in one inference. In float32 the result differs from
        :meth:`infer` by at most 1e-5. If the engine does not support batches (``unbatched`` has the reason), the
        observations are computed one after the other.

        Args:
            observations: As in :meth:`infer`.
            timeout: Seconds for all observations together. None: no limit.
            cancel: An event that cancels the inference.

        Returns:
            One entry per observation, in the same order: its chunk, or its error.

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
        """Answer a question about an observation with the language head. The decoding is greedy.

        Args:
            observation: As in :meth:`infer`.
            question: The question, which must not be empty.
            max_tokens: Maximum number of tokens in the answer. None for the bundle's default.
            timeout: As in :meth:`infer`.
            cancel: As in :meth:`infer`, but checked between two tokens.

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
        """Return the next subtask of the instruction, which the language head decodes, without actions.

        For a subtask and actions in one call, set ``subtask`` in the observation.

        Args:
            observation: As in :meth:`infer`.
            max_tokens: Maximum number of tokens in the subtask. None for the bundle's default.
            timeout: As in :meth:`infer`.
            cancel: As in :meth:`infer`, but checked between two tokens.

        Returns:
            The subtask.

        Raises:
            ObservationError: The bundle has no language head. All errors of :meth:`infer` are possible too.
        """
        return self.infer(asking(observation, None, max_tokens), timeout=timeout, cancel=cancel).text

    def prepare(self, observation: Observation | Mapping[str, Any]) -> Prepared:
        """Run the first half of :meth:`infer`: check, tokenise, normalise and resize.

        This half needs no lock, so a server can prepare one observation while another observation is computed.

        Args:
            observation: As in :meth:`infer`.

        Returns:
            The inputs for :meth:`run`.

        Raises:
            ObservationError: A field is not valid.
        """
        self._refuse_closed()
        request, processor = self._accept(observation)
        return processor.prepare(request, pixels=not self.facts.takes_frames)

    def _accept(self, observation: Observation | Mapping[str, Any]) -> tuple[Observation, Processor]:
        """Convert an observation to Sinew's form and check that the policy supports its requests.

        Returns:
            The observation, and the processor of its adapter.
        """
        request = given.observation(observation, self.spec)
        self.capabilities.check(request, self.spec)
        name: object = request.adapter
        if not isinstance(name, str) or name not in self.processors:
            raise ObservationError("adapter", *unknown(name, self.adapters))
        return request, self.processors[name]

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
            between: Called after each solver step. If ``pauses`` is True, another run may start inside this call.

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
        """Run several prepared observations together, as one batch.

        All must have the same :func:`sinew.processing.batch_key`. In float32 the result differs from :meth:`run` by at
        most 1e-5.

        Args:
            members: The prepared observations, which are results of :meth:`prepare`.
            cancel: As in :meth:`infer`.
            between: As in :meth:`run`.

        Returns:
            One entry per member: its chunk, or its error. An error of one member does not affect other members.

        Raises:
            SinewError: An error of the whole batch: the engine does not support batches, the members have different
                batch keys, ``cancel`` was set, or a file of weights was changed.
        """
        first = members[0]
        self._check_batch(members)
        guidance, noise = _steered(members, self.spec.solver, self.engine.place)
        alone = len(members) == 1 and first.unconditional is None
        prompt = self.processors[first.adapter].recipe.prompt
        inputs = first.inputs.batched() if alone else stack_prompts(members, prompt)
        with self.lock:
            # Check the files before the weights are read, because the system ends a process that reads from a truncated
            # memory-mapped file.
            self.files.check()
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
            normalized = not self.facts.world_units
            outcomes = [
                finished(chunk, member, self.processors[member.adapter], normalized=normalized)
                for chunk, member in zip(chunks, members, strict=True)
            ]
            end_time = time.perf_counter()
            self.files.check()

        def answer(actions: np.ndarray, member: Prepared) -> ActionChunk:
            timing = watch.timing(
                len(members),
                postprocess_ms=1e3 * (end_time - computed),
                preprocess_ms=member.milliseconds,
                total_ms=1e3 * (end_time - start) + member.milliseconds,
            )
            return ActionChunk(
                actions,
                timing,
                member.seed if len(actions) else None,
                member.session,
                member.time,
                self.warnings(member),
                text=text,
                adapter=member.adapter,
            )

        return [
            outcome if isinstance(outcome, SinewError) else answer(outcome, member)
            for outcome, member in zip(outcomes, members, strict=True)
        ]

    def _check_batch(self, members: Sequence[Prepared]) -> None:
        """Raise :class:`SinewError` if several prepared observations cannot be computed in one inference."""
        if len(members) == 1:
            return
        if self.unbatched:
            raise SinewError(f"a batch of {len(members)} observations: {self.unbatched}")
        keys = {self.batch_key(member) for member in members}
        if None in keys or len(keys) > 1:
            raise SinewError(
                "a batch: expected observations with the same batch_key; use Policy.infer_all, which groups them"
            )

    def exchange(self, weights: Mapping[str, Any]) -> None:
        """Replace weights of the policy between two inferences.

        Requests that are waiting are computed with the new weights.

        Args:
            weights: Name of a tensor in the bundle -> tensor or array, which is copied. All other weights stay.

        Raises:
            SinewError: A name, shape or number does not fit, or the engine does not support the replacement. The old
                weights then stay.
        """
        with self.lock:
            self.engine.exchange(weights)

    def batch_key(self, prepared: Prepared) -> BatchKey | None:
        """Return the properties that observations must share to run in one batch.

        Args:
            prepared: The result of :meth:`prepare`.

        Returns:
            The properties. None for a request for text, which always runs alone.
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
            The properties. Observations with equal keys need the same time.
        """
        key, words = batch_key(prepared), prepared.words
        return key if words is None else (key, words.most, words.behind is None)

    def problem(self) -> str | None:
        """Return an error message if a file of weights was changed after the load, otherwise None."""
        return self.files.problem()

    def warm_batches(self, largest: int) -> None:
        """Prepare batches of up to ``largest`` observations with frames of the declared sizes.

        The CUDA engine records its graphs, so that no batch waits for a recording. Other engines need no preparation.

        Args:
            largest: The largest number of observations in a batch.
        """
        members = [self.prepare(self.dummy_observation()).inputs] * largest
        inputs = stack(members, self.manifest.processing.prompt)
        self.engine.warm(inputs, self.spec.solver_steps, self.spec.max_prompt_tokens)

    def warm_up(self) -> ActionChunk:
        """Run one inference on grey frames. Call this on the thread that will call ``infer`` later.

        This call loads the weights into memory, lets torch allocate memory and select kernels, and records the CUDA
        engine's graphs for frames of the declared sizes. It also selects the number of threads if you did not.

        Returns:
            The chunk for the grey frames.
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
        """Return a valid observation with grey frames, a short instruction, and a state of zeros or allowed choices."""
        grey = {c.name: np.full((c.height, c.width, 3), 128, np.uint8) for c in self.spec.cameras}
        state = np.zeros(self.spec.state.dim, np.float32)
        for step in self.processor.recipe.state_steps:
            if step.choices:
                state[list(step.dims)] = step.choices[0]
        earlier = (Moment(grey, state),) * (self.spec.history - 1)
        return Observation(grey, state, prompt="pick up the cube", seed=0, earlier=earlier)

    def _release(self) -> None:
        """Release the engine and the weights after the current inference."""
        with self.lock:
            self.opened = None


def _steered(
    members: Sequence[Prepared], solver: Solver, place: Callable[[np.ndarray], Any]
) -> tuple[Any, np.ndarray]:
    """Prepare the guidance of a batch, which makes each new chunk continue the running chunk, and the initial
    noise.

    Args:
        members: The prepared observations of the batch.
        solver: The solver of the policy.
        place: Function that copies an array to the engine's device.

    Returns:
        The guidance, which corrects each solver step (None if no observation requests it), and the noise [B,
        H, A]: observations, actions of a chunk, numbers of an action.
    """
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
    """Convert the output of the model for one observation to actions in robot units.

    Args:
        chunk: Output of the model for one observation of the batch.
        member: The prepared observation.
        processor: The processor that prepared the observation. An adapter has a processor of its own.
        normalized: True if ``chunk`` is not yet in robot units.

    Returns:
        The actions in robot units, or the error of this observation.
    """
    if not len(chunk):
        return chunk
    try:
        return processor.finish(chunk, member.state, normalized=normalized)
    except SinewError as error:
        return error
