"""Split inference: a server computes the large first part of the model (vision and prefix), and the robot computes the
actions with the small second part, the head (docs/edge-and-cloud.md).

The server sends the context and no actions. The robot needs the same bundle and maps its file to memory, but
reads only the weights of the head.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sinew_client import Client
from sinew_client.control.servers import PolicyCall
from sinew_client.open_policy import OpenPolicy, refuse_words

from sinew.core import ActionChunk, Observation, ObservationError, SinewError, Timing
from sinew.engine.capability import Capability
from sinew.engine.clone import on_meta
from sinew.engine.contexts import pack, unpack
from sinew.engine.example import Inputs, Shapes
from sinew.engine.fingerprint import fingerprint
from sinew.processing import Prepared, given

if TYPE_CHECKING:
    from sinew.policy import Policy


def read_context(policy: Policy, prepared: Prepared, form: str) -> bytes:
    """Compute the context of an observation on the server: the results of vision tower and language model. The
    context is the input of the action head, which runs on the robot.

    Args:
        policy: The policy.
        prepared: The prepared observation.
        form: Type of the floats in the context.

    Returns:
        The packed context (:mod:`sinew.engine.contexts`).

    Raises:
        SinewError: The head chooses tokens and ``form`` rounds, or the request needs more than a context.
    """
    if prepared.words is not None:
        raise SinewError(
            "context: a request for text needs the whole policy; omit it, or use a policy without split inference"
        )
    if policy.facts.chooses_tokens and form != "fp32":
        kind = policy.spec.architecture
        raise SinewError(f"context: expected fp32 for {kind}, because its head chooses tokens, got {form}")
    if prepared.adapter:
        raise ObservationError(
            "adapter", "none, because the robot runs the base policy's head", repr(prepared.adapter)
        )
    if prepared.unconditional is not None:
        raise SinewError(
            f"guidance_scale: expected 0, 1 or none with split inference, got {prepared.scale:g}"
        )
    with policy.lock:
        policy.files.check()
        context = policy.engine.read(prepared.inputs.batched())
        policy.files.check()
    return pack(context, form)


@dataclass(frozen=True, slots=True)
class SplitTiming:
    """Measurements of one request of split inference.

    Attributes:
        nbytes: Bytes of the context.
        round_trip_ms: Milliseconds from the request to the received context.
        server_ms: Milliseconds on the server.
        head_ms: Milliseconds of the head on this machine.
    """

    nbytes: int
    round_trip_ms: float
    server_ms: float
    head_ms: float


class SplitCalls:
    """Creates the calls of a robot's controller for split inference. A Requester accepts it as ``connect``.

    Args:
        policy: The policy on this machine.
        address: Address of the server's policy ``context.FORM``, as Client accepts it.
        api_key: Key of the server; "" for no key.
    """

    def __init__(self, policy: Policy, address: str, api_key: str = ""):
        self._policy, self._address, self._key = policy, address, api_key
        # Compute the template once, because it takes seconds and is the same for every connection.
        self._template = template_of(policy)

    def __call__(self) -> PolicyCall:
        client = Client(self._address, api_key=self._key)
        try:
            return PolicyCall(SplitPolicy(self._policy, client, self._template))
        except Exception:
            client.close()
            raise


def template_of(policy: Policy) -> tuple[Any, Any]:
    """Return two contexts that show the shapes of a policy's context: one for the longest prompt, and one for a prompt
    with one more token.

    Their tensors are on torch's meta device, so they take no memory.

    Raises:
        SinewError: The policy does not support split inference.
    """
    if reason := policy.capabilities.why_not(Capability.SPLIT):
        raise SinewError(f"split: {reason}")
    meta = on_meta(policy.engine.model)
    shapes = Shapes.of(policy.manifest)
    longer = replace(shapes, tokens=shapes.tokens + 1)
    return Inputs.example(meta, shapes).read(meta), Inputs.example(meta, longer).read(meta)


class SplitPolicy(OpenPolicy):
    """A policy that is split between two machines: a server computes the context, and this machine runs the head, which
    computes the actions.

    Args:
        policy: The bundle on this machine, on a PyTorch engine.
        client: Client of the server's policy ``context.FORM``. :meth:`close` always closes this client.
        template: Result of :func:`template_of` for the policy; None computes it.
        whole: True if :meth:`close` also closes ``policy``.

    Raises:
        SinewError: The server has another policy, or sends no contexts.
    """

    def __init__(self, policy: Policy, client: Client, template: Any = None, *, whole: bool = False):
        self.policy, self._client, self._whole = policy, client, whole
        self.spec = policy.spec
        self._compare()
        self._template = template_of(policy) if template is None else template
        self.last: SplitTiming | None = None

    def _compare(self) -> None:
        """Raise SinewError if the server has another policy, or sends no contexts."""
        policy, client = self.policy, self._client
        served = client.metadata()
        self.form = served["server"].get("context", "")
        if not self.form:
            raise SinewError(
                f"split: expected a policy context.FORM, got {client.policy!r}; start `sinew serve --context FORM`"
            )
        here, there = fingerprint(policy.bundle.path), served["server"].get("bundle_digest")
        if here != there:
            raise SinewError(
                f"split: expected the server's bundle, digest {there}, got {here} ({policy.bundle.path});"
                " copy the server's bundle to the robot"
            )
        if client.exchanged:
            raise SinewError(
                "split: the server has replaced the policy in the meantime; send the observation again"
            )

    def reset(self, session: str = "") -> None:
        """Notify the server that a new episode begins in ``session``."""
        self._refuse_closed()
        self._client.reset(session)

    def _release(self) -> None:
        self._client.close()
        if self._whole:
            self.policy.close()

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Compute a chunk with the context from the server and the head on this machine.

        Args:
            observation: The observation.
            timeout: Seconds to wait for the server; None uses the client's time limit.

        Returns:
            The chunk.

        Raises:
            SinewError: The server or the head on this machine rejects the observation.
        """
        self._refuse_closed()
        policy = self.policy
        request = given.observation(observation, policy.spec)
        refuse_words(request, "a split one")
        prepared = policy.processor.prepare(request, pixels=False)
        if prepared.continuation is not None:
            raise SinewError("previous: omit it, because a split policy does not continue chunks")
        if prepared.unconditional is not None:
            raise SinewError(
                "guidance_scale: expected 0, 1 or none, because a split policy reads only one prompt"
            )
        requested_at = time.perf_counter()
        seen = Observation(
            request.images,
            request.state,
            request.prompt,
            session=request.session,
            earlier=request.earlier,
            advantage=request.advantage,
            guidance_scale=request.guidance_scale,
        )
        data, timing = self._client.context(seen, timeout=timeout)
        arrived = time.perf_counter()
        if self._client.exchanged:
            self._compare()
        template, longer = self._template
        context = unpack(data, template, policy.engine.device, longer)
        try:
            (solution,) = policy.engine.solve(context, prepared.noise[None], prepared.steps)
        except (RuntimeError, ValueError, ArithmeticError, IndexError) as error:
            words = (str(error).splitlines() or [""])[0][:200]
            raise SinewError(
                f"split: the head cannot use the server's context ({words}); use the same bundle and version"
            ) from error
        actions = policy.processor.finish(solution, prepared.state)
        done = time.perf_counter()
        self.last = SplitTiming(
            len(data), 1e3 * (arrived - requested_at), timing.server_ms, 1e3 * (done - arrived)
        )
        times = Timing(
            preprocess_ms=prepared.milliseconds,
            prefix_ms=1e3 * (arrived - requested_at),
            step_ms=(1e3 * (done - arrived),),
            total_ms=1e3 * (done - requested_at) + prepared.milliseconds,
        )
        warnings = policy.warnings(prepared)
        return ActionChunk(actions, times, prepared.seed, prepared.session, prepared.time, warnings)
