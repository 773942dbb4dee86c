"""A policy for split inference. Its answer is a context: the result of the vision tower and the language model for an
observation. The robot itself computes the actions from the context (``sinew/stream/split.py``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sinew_client.open_policy import refuse_words

from sinew.core import ActionChunk, Observation, PolicySpec, RequestError, SinewError, Timing
from sinew.engine.fingerprint import fingerprint
from sinew.policy import Policy
from sinew.serve.deploy import PolicyHost
from sinew.serve.policies import Deployment
from sinew.serve.served import ServedPolicy
from sinew.serve.service import Service
from sinew.stream.split import read_context


class ContextPolicy(ServedPolicy):
    """A policy whose answers are contexts instead of actions. A context is the input of the action head, the part of
    the model that runs on the robot (split inference).

    Args:
        policy: Returns the policy in use. It is called for each request, because the policy may be replaced.
        form: Type of the floats in a context.

    Attributes:
        digest: Fingerprint of the first bundle. Robots have compared it with the fingerprint of their bundle.
    """

    def __init__(self, policy: Callable[[], Policy], form: str):
        self._policy, self.form = policy, form
        self.digest = fingerprint(policy().bundle.path)
        self._known = weakref.ref(policy())  # weak reference to the policy with this digest

    @property
    def spec(self) -> PolicySpec:
        """The specification of the policy in use."""
        return self._policy().spec

    def describe(self) -> dict[str, Any]:
        """Return the engine and the precision of the policy in use, ready for JSON."""
        return {**self._policy().describe(), "context": self.form}

    def warm_up(self) -> None:
        """Compute the context of grey frames once."""
        self.run(self.prepare(self._policy().dummy_observation()))

    def prepare(self, observation: Observation) -> tuple[Policy, Any]:
        """Return the policy in use and the prepared observation.

        Raises:
            ObservationError: The observation does not fit the policy.
            RequestError: A hot-swap has changed the bundle, but the robots' heads belong to the first bundle.
        """
        policy = self._policy()
        if policy is not self._known():
            if fingerprint(policy.bundle.path) != self.digest:
                raise RequestError(
                    f"context.{self.form}: the policy was replaced by a bundle that differs from the robots' bundle;"
                    " restart the server with the robots' bundle"
                )
            self._known = weakref.ref(policy)
        refuse_words(observation, "one that gives contexts")
        return policy, policy.prepare(observation)

    def run(self, prepared: tuple[Policy, Any], *, cancel: threading.Event | None = None) -> ActionChunk:
        """Return a chunk that has the context and no actions."""
        policy, member = prepared
        begun = time.perf_counter()
        context = read_context(policy, member, self.form)
        took = 1e3 * (time.perf_counter() - begun)
        timing = Timing(
            preprocess_ms=member.milliseconds, prefix_ms=took, total_ms=took + member.milliseconds
        )
        actions = np.zeros((0, policy.spec.action.dim), np.float32)
        warnings = policy.warnings(member)
        return ActionChunk(actions, timing, None, member.session, member.time, warnings, context)


def add(service: Service, forms: Sequence[str], host: PolicyHost) -> None:
    """For each form, add a policy with the name ``context.FORM`` to a service. Its answers are contexts for split
    inference.

    Args:
        service: The service of the server.
        forms: Types of the floats in the contexts, such as "bf16".
        host: The resources that all policies of the server share.

    Raises:
        SinewError: The engine does not support split inference.
    """

    def standing() -> Policy:
        policy: Policy = service.policies.get().scheduler.policy  # type: ignore[assignment]
        return policy

    for form in forms:
        policy = ContextPolicy(standing, form)
        with SinewError.at(f"--context {form}", SinewError):
            scheduler = host.start(policy)
        first = service.policies.get()
        about = first.metadata | {
            "server": first.metadata["server"] | {"context": form, "bundle_digest": policy.digest}
        }
        service.policies.put(
            f"context.{form}",
            Deployment(scheduler, first.spec, about, first.safety, max_pixels=first.max_pixels),
        )
