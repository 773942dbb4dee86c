"""A policy that explores, for reinforcement learning: chunks with log-probabilities, and weights that are exchanged."""

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
    """A chunk that was drawn, and what its probability is computed from.

    chain: of a flow, float32 [K + 1, H, A] in model units: noise, what each step led to, the solution (pi_RL's chains);
        of tokens, int64 [n].
    log_probs: of each number that was drawn, float32 [K, H, A], 0 in steps that draw nothing; of tokens, [n]. That of
        the noise at the start is no part of it: no weight changes it. Later rows of a chunk that were never executed
        may be left out of a sum, as pi_RL does.
    version: how often weights had been exchanged.
    """

    chunk: ActionChunk
    chain: np.ndarray
    log_probs: np.ndarray
    version: int
    prepared: Prepared

    @property
    def log_prob(self) -> float:
        """Return the chunk's log-probability, given the noise at its start."""
        return float(self.log_probs.sum(dtype=np.float64))


class RolloutPolicy(Policy):
    """A policy whose actions are drawn, reproducibly by an observation's seed. It is one like others: ``infer``,
    ``sinew.evaluate`` and servers take it.

    path: what :func:`sinew.load` takes. exploration: None for a policy that draws noise at its steps anyway.
    solver_steps: K; None: the bundle's.
    batch: observations of one inference, always as many: fewer are filled up. In the same place of a batch an
        observation's actions have the same bits, whatever the others are. In another place, or with another ``batch``,
        they differ by rounding: by up to 1e-5 of the largest action in float32. With 1 they always repeat to the bit.
    options: those of :func:`sinew.load`; the engine is eager, the one whose weights can be exchanged.
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
        self.pauses = False  # a run draws from one generator, so no other comes between its steps
        self.exploration, self.batch, self.version = exploration, batch, 0
        model = self.engine.model
        self._speaks = hasattr(model, "action_tokens")
        if exploration is not None and (exploration.kind == "tokens") != self._speaks:
            says = "one that says them" if exploration.kind == "tokens" else "one that integrates a velocity"
            raise SinewError(
                f"exploration: {exploration.kind}: expected a policy, {says}, got {manifest.architecture}"
            )
        if batch > 1 and self.unbatched:
            raise SinewError(f"batch: expected 1, got {batch}: {self.unbatched}")

    def sample(
        self, observations: Sequence[Observation | Mapping[str, Any]]
    ) -> list[RolloutSample | SinewError]:
        """Return a drawn chunk for each observation; an error of one of them (a sentence that spells no chunk) in its
        place. Raises :class:`ObservationError` for what is no observation of this policy."""
        return self._sampled([self.prepare(each) for each in observations])

    def log_probs(self, samples: Sequence[RolloutSample], model: nn.Module | None = None) -> Tensor:
        """Return the log-probabilities of samples under other weights, float32 [B, K, H, A], or [B, n] of tokens, 0
        behind a sentence's end. Autograd goes through them to the weights of ``model``. With the weights that drew the
        samples they equal ``RolloutSample.log_probs`` up to rounding, also in a batch of another size.

        samples: of one form: cameras, prompt length, K. model: one of :meth:`learner`; None: what computes here.
        """
        found = self.engine.model if model is None else model
        inputs = stack_prompts([each.prepared for each in samples], self.processor.recipe.prompt)
        if self._speaks:
            assert self.exploration is not None
            return token_log_probs(found, inputs, [each.chain for each in samples], self.exploration.level)
        return flow_log_probs(found, inputs, np.stack([each.chain for each in samples]))

    def learner(self) -> Any:
        """Return a copy of the model whose weights can be trained: its ``state_dict`` is what :meth:`exchange` takes.

        Raises :class:`SinewError` for weights that are no floats.
        """
        learner = copy.deepcopy(self.engine.model)
        for name, weight in learner.state_dict().items():
            if not weight.is_floating_point():
                raise SinewError(f"learner: {name}: expected a weight in floats, got {weight.dtype}")
        return learner.requires_grad_(True)

    def exchange(self, weights: Mapping[str, Any]) -> None:
        with self.lock:
            self.engine.exchange(weights)
            self.version += 1

    def save(self, path: str | Path) -> None:
        """Write a bundle with the weights of now, each stored as it was, and without the exploration.

        Raises :class:`SinewError` for a bundle with low-bit weights.
        """
        import torch

        if self.bundle.lowbit:
            raise SinewError(
                f"{self.bundle.path}: expected float weights, got {next(iter(self.bundle.lowbit.values()))}"
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
        observation = given_as(observation, self.spec)
        found = super().prepare(observation)
        if self._speaks and found.seed is None:  # such a policy draws no noise otherwise
            seed = secrets.randbits(63) if observation.seed is None else int(observation.seed)
            found = replace(found, seed=seed)
        for name, given in (
            ("previous", found.continuation),
            ("guidance_scale", found.unconditional),
            ("subtask", found.words),
            ("adapter", found.adapter or None),
        ):
            if given is not None:
                raise ObservationError(name, "none of a policy that explores", "one")
        return found

    def run_batch(
        self, members: Sequence[Prepared], *, cancel: Any = None, between: Any = None
    ) -> list[ActionChunk | SinewError]:
        found = self._sampled(members, cancel)
        return [each if isinstance(each, SinewError) else each.chunk for each in found]

    def _sampled(self, members: Sequence[Prepared], cancel: Any = None) -> list[RolloutSample | SinewError]:
        alike: dict[Any, list[int]] = {}
        for index, member in enumerate(members):  # no prompt is padded: another shape rounds differently
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
                kept = DenoisingChain()
                chunks = engine.run(inputs, noise, members[0].steps, kept, watch)
                chains, log_probs = kept.ended(chunks)
            self.files.check()
        timing, found = watch.timing(len(members)), list[RolloutSample | SinewError]()
        for member, chunk, chain, probabilities in zip(
            members, chunks, chains, log_probs, strict=False
        ):  # without what fills up
            actions = finished(chunk, member, self.processor, normalized=True)
            if isinstance(actions, SinewError):
                found.append(actions)
                continue
            answer = ActionChunk(
                actions, timing, member.seed, member.session, member.time, self.warnings(member)
            )
            found.append(RolloutSample(answer, chain, probabilities, version, member))
        return found

    def _said(
        self, rows: Sequence[Prepared], context: Any, noise: np.ndarray, watch: Watch
    ) -> tuple[Any, Any, Any]:
        """Return the chunks of drawn sentences (NaN where one spells none), the sentences, their log-probabilities."""
        engine, tokens = self.engine, self.engine.model.action_tokens
        assert self.exploration is not None
        numbers = np.stack([np.random.default_rng(row.seed).random(tokens.most) for row in rows])
        chooser = TokenChooser(numbers, None, self.exploration.level, allowed_tokens(engine.model))
        with choosing(engine.model, chooser):
            chunks = engine.solve(context, noise, 1, watch=watch)
        said, found = (each.cpu().numpy() for each in chooser.said(tokens.end))
        lengths = [
            int(np.argmax(row == tokens.end)) + 1 if (row == tokens.end).any() else len(row) for row in said
        ]
        cut = [[row[:n] for row, n in zip(each, lengths, strict=True)] for each in (said, found)]
        return chunks, cut[0], cut[1]
