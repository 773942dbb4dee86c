"""Vision and prefix on a server, the head on the robot (docs/edge-and-cloud.md): the context travels, not the actions.

The robot has the bundle too, and maps its file: of the weights it reads those of the head.
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
    """Return the context of an observation for a head on the robot, packed (:mod:`sinew.engine.contexts`): the
    server's half.

    Raises :class:`SinewError` for a head that chooses tokens if ``form`` rounds, and for a request that needs more
    than a context.
    """
    if prepared.words is not None:
        raise SinewError("context: expected an observation without a request for text, got one with it")
    if policy.facts.chooses_tokens and form != "fp32":
        kind = policy.spec.architecture
        raise SinewError(f"context: expected fp32 for {kind}, whose head chooses tokens, got {form}")
    if prepared.adapter:
        raise ObservationError("adapter", "none: the robot's head is the base's", repr(prepared.adapter))
    if prepared.unconditional is not None:
        raise SinewError(
            f"guidance_scale: expected 0, 1 or none of a policy in two places, got {prepared.scale:g}"
        )
    with policy.lock:
        policy.files.check()
        context = policy.engine.read(prepared.inputs.batched())
        policy.files.check()
    return pack(context, form)


@dataclass(frozen=True, slots=True)
class SplitTiming:
    """What one request took: bytes of the context, and milliseconds on the way, in the server and here."""

    nbytes: int
    round_trip_ms: float
    server_ms: float
    head_ms: float


class SplitCalls:
    """Opens calls of a robot's controller to a policy in two places: what a Requester takes as ``connect``.

    address: of the server's ``context.FORM``, as Client takes it.
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
    """Return the shapes of a policy's context, on no device: of the longest prompt, and of one with a token more."""
    if reason := policy.capabilities.why_not(Capability.SPLIT):
        raise SinewError(f"split: {reason}")
    meta = on_meta(policy.engine.model)
    shapes = Shapes.of(policy.manifest)
    longer = replace(shapes, tokens=shapes.tokens + 1)
    return Inputs.example(meta, shapes).read(meta), Inputs.example(meta, longer).read(meta)


class SplitPolicy(OpenPolicy):
    """policy: the bundle on this machine, on an engine of PyTorch. client: of a server's ``context.FORM``.
    template: :func:`template_of` the policy, if it is there already. whole: closing it closes the policy here, too;
    the client it closes in any case.

    Raises SinewError for a server that has another policy, or sends no contexts.
    """

    def __init__(self, policy: Policy, client: Client, template: Any = None, *, whole: bool = False):
        self.policy, self._client, self._whole = policy, client, whole
        self.spec = policy.spec
        self._compare()
        self._template = template_of(policy) if template is None else template
        self.last: SplitTiming | None = None

    def _compare(self) -> None:
        """Raise SinewError for a server of another policy, or one that sends no contexts."""
        policy, client = self.policy, self._client
        served = client.metadata()
        self.form = served["server"].get("context", "")
        if not self.form:
            raise SinewError(
                f"split: expected a server's policy context.FORM (sinew serve --context), got {client.policy!r}"
            )
        here, there = fingerprint(policy.bundle.path), served["server"].get("bundle_digest")
        if here != there:
            raise SinewError(
                f"split: expected the server's bundle, digest {there}, got {here} ({policy.bundle.path})"
            )
        if client.exchanged:
            raise SinewError(
                "split: the server has replaced the policy that read this observation; ask again"
            )

    def reset(self, session: str = "") -> None:
        """Tell the server that a new episode begins in ``session``."""
        self._refuse_closed()
        self._client.reset(session)

    def _release(self) -> None:
        self._client.close()
        if self._whole:
            self.policy.close()

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Return the chunk: the context from the server, the solution from here. Raises what both may raise.

        timeout: seconds to wait for the server, the client's own if absent."""
        self._refuse_closed()
        policy = self.policy
        found = given.observation(observation, policy.spec)
        refuse_words(found, "a split one")
        prepared = policy.processor.prepare(found, pixels=False)
        if prepared.continuation is not None:
            raise SinewError("previous: expected nothing; a split policy does not continue chunks")
        if prepared.unconditional is not None:
            raise SinewError("guidance_scale: expected 0, 1 or none; a split policy reads one prompt")
        asked = time.perf_counter()
        seen = Observation(
            found.images,
            found.state,
            found.prompt,
            session=found.session,
            earlier=found.earlier,
            advantage=found.advantage,
            guidance_scale=found.guidance_scale,
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
            raise SinewError(f"split: the head cannot use the server's context ({words})") from error
        actions = policy.processor.finish(solution, prepared.state)
        done = time.perf_counter()
        self.last = SplitTiming(len(data), 1e3 * (arrived - asked), timing.server_ms, 1e3 * (done - arrived))
        times = Timing(
            preprocess_ms=prepared.milliseconds,
            prefix_ms=1e3 * (arrived - asked),
            step_ms=(1e3 * (done - arrived),),
            total_ms=1e3 * (done - asked) + prepared.milliseconds,
        )
        said = policy.warnings(prepared)
        return ActionChunk(actions, times, prepared.seed, prepared.session, prepared.time, said)
