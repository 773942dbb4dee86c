"""Many simulated episodes in one process: each is played by ``run_episode``, their inferences run as one batch.

A small head costs almost as much for one observation as for thirty, so a hundred episodes take a quarter of the time.
Simulated time does not notice that others are played beside it. Chunks equal those of single inferences up to the
rounding of a batched product (tests/eval/test_side_by_side.py holds them against each other).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from sinew.engine.eager import EagerEngine
from sinew.engine.example import Inputs
from sinew.guidance import Inpainting, Ramp, guide
from sinew.policy import Policy
from sinew.processing.processor import Prepared
from sinew.solvers import Guidance, solve

Result = TypeVar("Result")


class SideBySide:
    """A policy of the evaluator that waits until every episode needs a chunk, and then computes them all.

    policy: on engine eager or plan, of a model whose inputs have the same shapes but for the prompt's length.
    """

    def __init__(self, policy: Policy, solver_steps: int | None = None):
        if not isinstance(policy.engine, EagerEngine):
            raise ValueError(f"engine: expected eager or plan, got {policy.engine_name}")
        self.policy, self.solver_steps = policy, solver_steps
        self.chunk_size = policy.spec.chunk_size
        self._engine = policy.engine
        self._waiting: dict[int, Prepared] = {}  # place of an episode -> what it asks
        self._answers: dict[int, np.ndarray | Exception] = {}
        self._playing = 0
        self._changed = threading.Condition()
        self._place = threading.local()

    # ------------------------------------------------------------------------- the evaluator's policy

    def start(self, env: Any) -> None:
        """Do nothing: policies have no memory between chunks."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        images = {
            name: frame() if callable(frame) else frame for name, frame in observation["images"].items()
        }
        request = {**observation, "images": images, "seed": seed, "solver_steps": self.solver_steps}
        prepared, place = self.policy.prepare(request), self._place.number
        with self._changed:
            self._waiting[place] = prepared
            self._changed.notify_all()
            self._changed.wait_for(lambda: place in self._answers)
            answer = self._answers.pop(place)
        if isinstance(answer, Exception):
            raise answer
        return answer, 0.0

    # ------------------------------------------------------------------------- together

    def play(self, episode: Callable[[int], Result], seeds: Iterable[int], width: int = 25) -> list[Result]:
        """Return ``episode(seed)`` of every seed, ``width`` at a time. Raises what the first that failed raised."""
        wanted = list(seeds)
        results: dict[int, Result] = {}
        failures: list[BaseException] = []

        def worker(place: int) -> None:
            self._place.number = place
            try:
                # Every place has its own share, so that who is beside whom does not depend on the clock.
                for seed in wanted[place::width]:
                    results[seed] = episode(seed)
            except Exception as error:  # noqa: BLE001 - raised again where all are waited for
                failures.append(error)
            finally:
                with self._changed:
                    self._playing -= 1
                    self._changed.notify_all()

        self._playing = width = min(width, len(wanted))
        threads = [threading.Thread(target=worker, args=(place,), daemon=True) for place in range(width)]
        for thread in threads:
            thread.start()
        while self._playing:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) == self._playing)
                asked, self._waiting = sorted(self._waiting.items()), {}
            if not asked:
                break
            try:
                answers: list[Any] = list(self.batch([prepared for _, prepared in asked]))
            except Exception as error:  # noqa: BLE001 - each episode gets it
                answers = [error] * len(asked)
            with self._changed:
                self._answers.update({place: found for (place, _), found in zip(asked, answers, strict=True)})
                self._changed.notify_all()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return [results[seed] for seed in wanted]

    def batch(self, asked: list[Prepared]) -> list[np.ndarray]:
        """Return the chunk of each, float32 [H, D] in world units: what ``Policy.run`` gives for it alone."""
        engine, processor = self._engine, self.policy.processor
        guidance, noise = _together(asked, self.policy)
        with torch.inference_mode(guidance is None), torch.no_grad():
            batch = _stacked([Inputs.of(prepared.inputs, engine.device) for prepared in asked])
            context = engine.model.read(engine.model.embed_images(batch.pixels), *batch[1:])
            x = solve(
                lambda x, moment: engine.model.act(x, moment, context),
                noise,
                engine.model.solver.steps(asked[0].steps),
                engine.moments(asked[0].steps),
                guidance=guidance,
            ).numpy()
        return [processor.finish(x[i], prepared.state) for i, prepared in enumerate(asked)]


def _stacked(items: list[Inputs]) -> Inputs:
    """Return one batch; shorter prompts are padded on the right with tokens that are masked."""
    length = max(item.tokens.shape[1] for item in items)

    def padded(tokens: torch.Tensor) -> torch.Tensor:  # [1, L] -> [1, length]
        return torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]))

    level = [item._replace(tokens=padded(item.tokens), token_mask=padded(item.token_mask)) for item in items]
    return Inputs(*(torch.cat([item[k] for item in level]) for k in range(len(Inputs._fields))))


def _together(asked: list[Prepared], policy: Policy) -> tuple[Guidance | None, torch.Tensor]:
    """Return one guidance for all rows of a batch, and their noise [B, H, A]. All ask for the same kind, or none."""
    own: list[Any] = []
    noises = []
    for prepared in asked:
        guidance, noise = None, prepared.noise
        if prepared.continuation is not None:
            guidance, noise = guide(prepared.continuation, policy.spec.solver, noise, policy.device)
        own.append(guidance)
        noises.append(torch.from_numpy(noise))
    return _joined(own), torch.stack(noises)


def _joined(own: list[Any]) -> Guidance | None:
    first = next((guidance for guidance in own if guidance is not None), None)
    if first is None:
        return None
    if isinstance(first, Ramp):
        free = torch.ones_like(first.strength)  # the whole velocity
        return Ramp(torch.cat([free if g is None else g.strength for g in own]))
    none = torch.zeros_like(first.weights)  # pulled nowhere
    return Inpainting(
        first.solver,
        torch.cat([none if g is None else g.target for g in own]),
        torch.cat([none if g is None else g.weights for g in own]),
        first.beta,
        first.jacobian,
    )
