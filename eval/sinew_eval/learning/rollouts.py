"""A policy that explores, for reinforcement learning: chunks with log-probabilities, and replaceable weights."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew.bundle.writer import ArraySlice, TensorSource, write_bundle
from sinew.core import ActionChunk, Observation, ObservationError, SinewError
from sinew.engine.watch import Watch
from sinew.policy import Policy, finished, open_bundle
from sinew.processing import Prepared, stack_prompts
from sinew.processing.given import observation as given_as

from sinew_eval.learning.exploration import (
    DenoisingChain,
    Exploration,
    TokenChooser,
    allowed_tokens,
    choosing,
    exploring,
    flow_log_probs,
    token_log_probs,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class RolloutSample:
    """A sampled chunk, with all that its probability is computed from.

    Attributes:
        chunk: The chunk.
        chain: For a flow, float32 [K + 1, H, A] in model units: the noise, the result of each step, the solution
            (pi_RL's chains). For tokens, int64 [n].
        log_probs: Log-probability of each sampled number, float32 [K, H, A], 0 in steps without sampling; for tokens,
            [n]. The initial noise is not part of it, because no weight changes it. A sum may leave out later actions
            that were never executed, as in pi_RL.
        version: How often the weights had been replaced before this chunk was sampled.
        prepared: The model inputs.
    """

    chunk: ActionChunk
    chain: np.ndarray
    log_probs: np.ndarray
    version: int
    prepared: Prepared

    @property
    def log_prob(self) -> float:
        """Log-probability of the chunk, given the initial noise."""
        return float(self.log_probs.sum(dtype=np.float64))


class RolloutPolicy(Policy):
    """A policy that samples its actions, reproducibly by an observation's seed. ``infer``, ``sinew.evaluate`` and
    servers accept it like any policy.

    Args:
        path: A source as for :func:`sinew.load`.
        exploration: How actions are sampled; None for a policy that draws noise in its steps anyway.
        batch: Observations of one inference. Smaller batches are filled up to it. At the same place of a batch, an
            observation's actions have the same bits, independent of the others. At another place, or with another
            ``batch``, they differ by rounding: by up to 1e-5 of the largest action in float32. With 1 they always
            repeat to the bit.
        solver_steps: K, number of solver steps; None for the bundle's.
        device: As for :func:`sinew.load`.
        dtype: As for :func:`sinew.load`.
        **options: Further options of :func:`sinew.load`. The engine is eager, whose weights can be replaced.

    Raises:
        SinewError: An option does not fit the policy.
    """

    def __init__(
        self,
        path: str | Path,
        exploration: Exploration | None,
        *,
        batch: int = 1,
        solver_steps: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        **options: Any,
    ):
        if batch < 1:
            raise SinewError(f"batch: expected 1 or more, got {batch}")
        bundle = open_bundle(path)
        self._stored = manifest = bundle.manifest
        solver = exploring(manifest.spec.solver, exploration)
        steps = solver_steps or manifest.spec.solver_steps
        try:
            solver.steps(steps)
        except ValueError as error:
            raise SinewError(str(error)) from None
        bundle.manifest = replace(manifest, spec=replace(manifest.spec, solver=solver, solver_steps=steps))
        super().__init__(bundle, device, dtype, "eager", **options)
        # One random generator serves the whole run, so no other inference may run between its steps.
        self.pauses = False
        self.exploration, self.batch, self.version = exploration, batch, 0
        model = self.engine.model
        self._speaks = hasattr(model, "action_tokens")
        if exploration is not None and (exploration.kind == "tokens") != self._speaks:
            says = "an autoregressive policy" if exploration.kind == "tokens" else "a flow policy"
            raise SinewError(f"exploration: {exploration.kind}: expected {says}, got {manifest.architecture}")
        if batch > 1 and self.unbatched:
            raise SinewError(f"batch: expected 1, got {batch}: {self.unbatched}")

    def sample(
        self, observations: Sequence[Observation | Mapping[str, Any]]
    ) -> list[RolloutSample | SinewError]:
        """Sample a chunk for each observation.

        Args:
            observations: As in :meth:`infer`.

        Returns:
            One entry per observation: its sample, or its error, such as a token sequence that encodes no chunk.

        Raises:
            ObservationError: An observation does not fit the policy.
        """
        return self._sampled([self.prepare(each) for each in observations])

    def log_probs(self, samples: Sequence[RolloutSample], model: nn.Module | None = None) -> Tensor:
        """Compute the log-probabilities of samples under other weights. Autograd goes through them to the weights of
        ``model``.

        With the weights that drew the samples, they equal ``RolloutSample.log_probs`` up to rounding, also in a batch
        of another size.

        Args:
            samples: Samples with equal cameras, prompt length and K.
            model: A model of :meth:`learner`; None for the policy's own.

        Returns:
            float32 [B, K, H, A], or [B, n] for tokens, 0 after a sequence's end.
        """
        source_model = self.engine.model if model is None else model
        inputs = stack_prompts([each.prepared for each in samples], self.processor.recipe.prompt)
        if self._speaks:
            assert self.exploration is not None
            return token_log_probs(
                source_model, inputs, [each.chain for each in samples], self.exploration.level
            )
        return flow_log_probs(source_model, inputs, np.stack([each.chain for each in samples]))

    def learner(self) -> Any:
        """Return a copy of the model with trainable weights. :meth:`exchange` accepts its ``state_dict``.

        Raises:
            SinewError: A weight is not in floats.
        """
        learner = copy.deepcopy(self.engine.model)
        for name, weight in learner.state_dict().items():
            if not weight.is_floating_point():
                raise SinewError(f"learner: {name}: expected a weight in floats, got {weight.dtype}")
        return learner.requires_grad_(True)

    def exchange(self, weights: Mapping[str, Any]) -> None:
        """Replace weights between two inferences.

        Args:
            weights: The new tensors or arrays, by the weight's name in the bundle.
        """
        with self.lock:
            self.engine.exchange(weights)
            self.version += 1

    def save(self, path: str | Path) -> None:
        """Write a bundle with the present weights, each in its stored type, without the exploration.

        Args:
            path: The new bundle.

        Raises:
            SinewError: The bundle has low-bit weights.
        """
        import torch

        if self.bundle.lowbit:
            raise SinewError(
                f"{self.bundle.path}: expected float weights, got {next(iter(self.bundle.lowbit.values()))}; load a"
                " bundle without low-bit weights"
            )
        with self.lock:
            state = self.engine.model.state_dict()
            tensors = []
            for info in sorted(self.bundle.infos.values(), key=lambda info: info.offset):
                stored = state[info.name].to("cpu", self.bundle.tensor(info.name).dtype).contiguous()
                data = stored.reshape(-1).view(torch.uint8).numpy()
                tensors.append(TensorSource(info.name, info.shape, info.type, info.nbytes, ArraySlice(data)))
        write_bundle(Path(path), lambda: self._stored, tensors)

    def prepare(self, observation: Observation | Mapping[str, Any]) -> Prepared:
        """Prepare an observation. If it has no seed, choose one. An ObservationError is raised for a request that
        cannot be combined with sampling.

        Args:
            observation: As in :meth:`infer`.

        Returns:
            The inputs for :meth:`run_batch`.
        """
        observation = given_as(observation, self.spec)
        prepared = super().prepare(observation)
        # This kind of policy draws no noise, so it may have no seed yet. Choose one here.
        if self._speaks and prepared.seed is None:
            seed = secrets.randbits(63) if observation.seed is None else int(observation.seed)
            prepared = replace(prepared, seed=seed)
        for name, given in (
            ("previous", prepared.continuation),
            ("guidance_scale", prepared.unconditional),
            ("subtask", prepared.words),
            ("adapter", prepared.adapter or None),
        ):
            if given is not None:
                raise ObservationError(name, "no value for a policy that samples its actions", "one")
        return prepared

    def run_batch(
        self, members: Sequence[Prepared], *, cancel: Any = None, between: Any = None
    ) -> list[ActionChunk | SinewError]:
        """Sample the chunks of several prepared observations.

        Args:
            members: Results of :meth:`prepare`.
            cancel: An event that cancels the inference.
            between: Not used, because one generator serves the whole run.

        Returns:
            One entry per member: its chunk, or its error.
        """
        samples = self._sampled(members, cancel)
        return [each if isinstance(each, SinewError) else each.chunk for each in samples]

    def _sampled(self, members: Sequence[Prepared], cancel: Any = None) -> list[RolloutSample | SinewError]:
        alike: dict[Any, list[int]] = {}
        # Group observations with equal shapes. Padding a prompt would change the rounding.
        for index, member in enumerate(members):
            alike.setdefault((self.batch_key(member), len(member.inputs.tokens)), []).append(index)
        found: dict[int, RolloutSample | SinewError] = {}
        for indices in alike.values():
            for start in range(0, len(indices), self.batch):
                some = indices[start : start + self.batch]
                found |= zip(some, self._drawn([members[index] for index in some], cancel), strict=True)
        return [found[index] for index in range(len(members))]

    def _drawn(self, members: Sequence[Prepared], cancel: Any) -> list[RolloutSample | SinewError]:
        rows = [*members, *[members[-1]] * (self.batch - len(members))]
        inputs = stack_prompts(rows, self.processor.recipe.prompt)
        noise = np.stack([row.noise for row in rows])
        watch = Watch(cancel)
        with self.lock:
            self.files.check()
            engine, version = self.engine, self.version
            if self._speaks:
                chunks, chains, log_probs = self._said(rows, engine.read(inputs, watch), noise, watch)
            else:
                recorder = DenoisingChain()
                chunks = engine.run(inputs, noise, members[0].steps, recorder, watch)
                chains, log_probs = recorder.ended(chunks)
            self.files.check()
        timing, samples = watch.timing(len(members)), list[RolloutSample | SinewError]()
        # zip ignores the results of the observations that only fill up the batch.
        for member, chunk, chain, probabilities in zip(members, chunks, chains, log_probs, strict=False):
            actions = finished(chunk, member, self.processor, normalized=True)
            if isinstance(actions, SinewError):
                samples.append(actions)
                continue
            answer = ActionChunk(
                actions, timing, member.seed, member.session, member.time, self.warnings(member)
            )
            samples.append(RolloutSample(answer, chain, probabilities, version, member))
        return samples

    def _said(
        self, rows: Sequence[Prepared], context: Any, noise: np.ndarray, watch: Watch
    ) -> tuple[Any, Any, Any]:
        """Sample token sequences. Return the chunks that they encode (NaN if a sequence encodes no chunk), the
        sequences, and their log-probabilities.
        """
        engine, tokens = self.engine, self.engine.model.action_tokens
        assert self.exploration is not None
        numbers = np.stack([np.random.default_rng(row.seed).random(tokens.most) for row in rows])
        chooser = TokenChooser(numbers, None, self.exploration.level, allowed_tokens(engine.model))
        with choosing(engine.model, chooser):
            chunks = engine.solve(context, noise, 1, watch=watch)
        sequences, probabilities = (each.cpu().numpy() for each in chooser.said(tokens.end))
        lengths = [
            int(np.argmax(row == tokens.end)) + 1 if (row == tokens.end).any() else len(row)
            for row in sequences
        ]
        cut = [[row[:n] for row, n in zip(each, lengths, strict=True)] for each in (sequences, probabilities)]
        return chunks, cut[0], cut[1]
