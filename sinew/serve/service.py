"""The service: the code between the protocols and the policies. It has the policies with their schedulers, and
handles keys, deadlines, metrics and recording.

The code of a protocol owns its sockets and decodes its messages. It submits a :class:`Request`, and gets a chunk or
an error. Health, metadata, authentication, counts, logs and records are the same for all protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sinew_client.auth import role_and_key

from sinew.core import ActionChunk, BusyError, Observation, PolicySpec, RequestError, SinewError, machine
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.processing.continuation import kind_of
from sinew.records.background_writer import BackgroundWriter
from sinew.serve import access
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.job import RequestGroup, ServingJob, release
from sinew.serve.metrics import KeptRecords, Metrics, PolicyIdentities
from sinew.serve.policies import DEFAULT, MAX_NAME, Deployment, Policies
from sinew.serve.renewed import Keys
from sinew.serve.request import Outcome, Request, ShuttingDownError, WireMessage, bare
from sinew.serve.robots import Robots
from sinew.serve.scheduler import Scheduler

logger = logging.getLogger(__name__)
access_log = logging.getLogger("sinew.access")

STREAMED = "stream"  # ``Service.uses`` contains this value if a robot has used streams
MAX_SESSION = 128  # largest number of characters of a session's name, because the names are stored


class UnhealthyError(SinewError):
    """Error for a request while the server cannot compute. The server's health states the reason."""

    code = "unhealthy"


# A listener is a function of a job, its outcome, and the seconds since the request's arrival.
Listener = Callable[[ServingJob, Outcome, float], None]


class Service:
    """The policies of a server, for all of its protocols. Every method may be called from any thread.

    Args:
        first: The policy for requests without a policy's name. Further policies are added to ``policies``.
        api_key: Key that every client must send; "" requires no key. A function returns several valid keys.
        deadline_ms: Deadline of requests that state none; None sets no deadline.
        recorder: Writer of requests and answers.
        rerun: Writer of requests and answers for Rerun.
    """

    def __init__(
        self,
        first: Deployment,
        *,
        api_key: Keys = "",
        deadline_ms: float | None = None,
        recorder: BackgroundWriter | None = None,
        rerun: BackgroundWriter | None = None,
    ):
        self.supervisor = first.scheduler.supervisor
        self.policies = Policies(first)
        self.deadline_ms = deadline_ms
        # Loads, replaces and unloads policies (serve/swap.py). None if policies cannot change.
        self.swapper: Any = None
        # Prepares a faster form of the first policy (serve/prepare.py). None without preparation.
        self.preparing: Any = None
        # Functions that robots have used in addition to plain chunks: values of ``rtc``, and STREAMED.
        self.uses: set[str] = set()
        self.metrics = Metrics(self.policies.stats, lambda: not self.problems(), self.about)
        self.robots = Robots()  # the newest report of each robot
        self.metrics.add(self.robots)
        self.metrics.add(PolicyIdentities(self.policies.identities))
        self._listeners: tuple[Listener, ...] = ()
        self._quiet: dict[str, RateLimitedLog] = {}
        self._keys = api_key if callable(api_key) else lambda: (api_key,) if api_key else ()
        self._records = {n: r for n, r in (("recorder", recorder), ("rerun", rerun)) if r is not None}
        self.metrics.add(KeptRecords(self.records))
        self._started = time.monotonic()
        self._stopping = False

    def submit(self, job: ServingJob, on_done: Callable[[Outcome], None]) -> ServingJob:
        """Queue the job of a request, and return it.

        ``on_done`` is called exactly once, on a thread of the scheduler. The function must not block.

        Raises:
            SinewError: The request is rejected, for example with BusyError, ShuttingDownError or RequestError. In
                this case, ``on_done`` is not called.
        """
        request = job.request
        wait_ms = self.deadline_ms if request.deadline_ms is None else request.deadline_ms
        job.deadline = None if wait_ms is None else request.arrived + wait_ms / 1e3
        try:
            if wait_ms is not None and not wait_ms > 0:
                raise RequestError(f"deadline_ms: expected a number above 0, got {wait_ms}")
            self.check_session(request.session)
            while job.home is None:
                job.deployment = deployment = self.policies.get(request.policy)
                if (stuck := deployment.scheduler.stuck()) is not None:
                    raise UnhealthyError(stuck)
                try:
                    deployment.scheduler.submit(job, partial(self._answer, job, on_done))
                except ShuttingDownError:
                    # Either the server stops, or the policy has just been replaced. In the second case, try the new
                    # policy.
                    if deployment is self.policies.get(request.policy):
                        raise
        except SinewError as error:
            self._tell(job, error, self._account(job, error))
            raise
        if (episode := job.episode) is not None:
            self.metrics.session(episode)
        return job

    def _answer(self, job: ServingJob, on_done: Callable[[Outcome], None], outcome: Outcome) -> None:
        """Enforce the limits of an outcome, count and record it, and send it.

        Args:
            job: The job of the request.
            on_done: Function that sends the outcome to the client.
            outcome: The chunk or the error.
        """
        outcome = _safe(job, outcome)
        seconds = self._account(job, outcome)
        seen, deployment, request = job.observation, job.deployment, job.request
        if deployment is not None and seen is not None:
            continued = seen.continuation
            if continued is not None and isinstance(outcome, ActionChunk):
                self.uses.add(kind_of(continued, deployment.spec))
            for record in self._records.values():
                about = deployment.metadata.get("server", {})
                record.put(request.wire, job.session, seen, outcome, about, policy=request.policy)
        on_done(outcome)
        self._tell(job, outcome, seconds)

    def submit_all(self, jobs: Sequence[ServingJob], on_done: Callable[[list[Outcome]], None]) -> None:
        """Queue the jobs of one message. One inference computes the jobs that fit together (``RequestGroup``).

        ``on_done`` is called exactly once, with the outcomes of all jobs in their order. The outcome of a rejected job
        is its error, and the other jobs are computed.
        """
        count = len(jobs)
        if count == 1:
            try:
                self.submit(jobs[0], lambda outcome: on_done([outcome]))
            except SinewError as error:
                on_done([bare(error)])
            return
        outcomes: dict[int, Outcome] = {}
        lock, together = threading.Lock(), RequestGroup(count)

        def settle(index: int, outcome: Outcome) -> None:
            with lock:
                outcomes[index] = outcome
                whole = len(outcomes) == count
            if whole:
                on_done([outcomes[each] for each in range(count)])

        for index, job in enumerate(jobs):
            job.together = together
            try:
                self.submit(job, partial(settle, index))
            except SinewError as error:
                release(together.ended(job))
                settle(index, bare(error))

    async def infer_all(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run ``submit_all`` as a coroutine. If the coroutine is cancelled, its client has disconnected, and the
        requests are abandoned.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Outcome]] = loop.create_future()
        jobs = [ServingJob(request) for request in requests]
        self.submit_all(jobs, partial(_call_soon, loop, future))
        try:
            return await future
        except asyncio.CancelledError:
            for job in jobs:
                job.abandon()
            raise

    async def infer(self, request: Request) -> ActionChunk:
        """Run ``submit`` as a coroutine. If the coroutine is cancelled, its client has disconnected, and the request is
        abandoned.
        """
        (outcome,) = await self.infer_all([request])
        try:
            if isinstance(outcome, SinewError):
                raise outcome
            return outcome
        finally:
            # Delete the local name, because an error's traceback refers to this frame and the reference cycle would
            # keep the request in memory.
            del outcome

    async def outcomes(
        self, message: WireMessage, decode: Callable[[WireMessage, PixelBudget], Observation], **about: Any
    ) -> Sequence[Outcome]:
        """Return the outcome of each observation of a message. If there is only one, its error is raised.

        Args:
            message: The message.
            decode: Decodes an observation from its message.
            **about: Fields of each :class:`Request` that messages do not have.
        """
        limit = message.deadline_ms
        requests = [
            Request(decode=partial(decode, each), session=each.session, deadline_ms=limit, **about)
            for each in message.observations or (message,)
        ]
        return await self.infer_all(requests) if message.observations else [await self.infer(requests[0])]

    def reset(self, session: str = "", policy: str = "") -> None:
        """Begin a new episode. A policy that stores data of a session between requests drops this data.

        Raises:
            RequestError: The session's name is too long.
            UnknownPolicyError: There is no such policy.
        """
        self.check_session(session)
        self.policies.get(policy).scheduler.policy.reset(session)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the first policy, which answers requests without a policy's name."""
        return self.policies.get().scheduler

    @property
    def spec(self) -> PolicySpec:
        """The specification of the first policy: its inputs and outputs."""
        return self.policies.get().spec

    def about(self, policy: str = "") -> dict[str, Any]:
        """Return the server's description of itself and a policy, with the names of all policies if there are
        several.

        Raises:
            UnknownPolicyError: The server has no policy with this name.
        """
        more = {"policies": list(self.policies.names)} if self.policies.several else {}
        deployment = self.policies.get(policy)
        if deployment.changed:
            more["changed"] = list(deployment.changed)
        return deployment.metadata | more

    def authorize(self, key: str | bytes | None, role: str = access.ROBOT) -> None:
        """Raise :class:`UnauthorizedError` unless ``key`` allows ``role``, or the server has no keys."""
        access.check_key(key, self._keys(), role)

    @property
    def wants_key(self) -> bool:
        return bool(self._keys())

    def robot_keys(self) -> list[str]:
        """Return the keys that allow requests for actions, for a transport that checks keys itself."""
        return [
            key for role, key in map(role_and_key, self._keys()) if role in ("", access.ADMIN, access.ROBOT)
        ]

    def health(self) -> dict[str, Any]:
        """Return the server's health, ready for JSON: status (ok, unhealthy, stopping), problems, memory and counters.

        The memory is the largest amount that the process has used. On a GPU, its memory is added.
        """
        problems = self.problems()
        return {
            "status": "stopping" if self._stopping else "unhealthy" if problems else "ok",
            "problems": problems,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "peak_bytes": machine.resident_bytes()["peak"],
            **({"gpu": gpu} if (gpu := machine.gpu()) else {}),
            **self._engine(),
            **self.policies.stats(),
            **({"policies": self.policies.describe()} if self.policies.several else {}),
            **({"adapters": list(adapters)} if (adapters := self.policies.get().adapters) else {}),
            **self.records(),
        }

    def records(self) -> dict[str, dict[str, int]]:
        """Return the counters of each recorder (such as the number of written records), by the recorder's name."""
        return {name: record.stats() for name, record in self._records.items()}

    def _engine(self) -> dict[str, Any]:
        """Return facts about the first policy, ready for JSON: its bundle, its engine, the reason for this engine, and
        the state of a preparation of a faster engine.
        """
        server = self.policies.get().metadata.get("server", {})
        fields = {name: server[name] for name in ("identity", "engine", "engine_reason") if name in server}
        return fields if self.preparing is None else {**fields, "prepare": self.preparing.describe()}

    def problems(self) -> list[str]:
        """Return the reasons why this server cannot answer requests, one sentence each; [] while it can."""
        return self.supervisor.problems()

    def tend(self) -> None:
        """Answer requests whose deadline has passed with an error. The process calls this regularly."""
        for scheduler in self.policies.schedulers:
            scheduler.expire()

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with every answer and rejection from now on. The thread that sends a reply calls the
        listener after the reply, so the listener must not block.
        """
        self._listeners += (listener,)

    def keeps_frames(self, deployment: Deployment) -> bool:
        """Return True if a request's frames may be read after its answer."""
        return bool(self._records or self._listeners) or deployment.scheduler.policy.keeps_frames

    def stopping(self) -> None:
        """Let ``health`` report from now on that the server stops."""
        self._stopping = True

    def refused(self, wire: str, client: str, error: SinewError) -> None:
        """Count and log a request that was rejected before ``submit``.

        Args:
            wire: Name of the protocol.
            client: Address of the client.
            error: The reason for the rejection.
        """
        job = ServingJob(Request(wire, _never, client))
        self._tell(job, error, self._account(job, error))

    @contextlib.contextmanager
    def reading(self, wire: str, client: str) -> Iterator[None]:
        """Inside the ``with`` block, which reads a request before ``submit``, count and log errors."""
        try:
            yield
        except SinewError as error:
            self.refused(wire, client, error)
            raise

    @staticmethod
    def check_session(name: str) -> None:
        """Raise RequestError if a session's name is too long."""
        if len(name) > MAX_SESSION:
            raise RequestError(f"session: expected at most {MAX_SESSION} characters, got {len(name)}")

    def _account(self, job: ServingJob, outcome: Outcome) -> float:
        """Count and log an outcome. Return the seconds since the request's arrival."""
        request, now = job.request, time.perf_counter()
        seconds = now - request.arrived
        missed = job.deadline is not None and now > job.deadline
        policy = "" if job.deployment is None else request.policy or DEFAULT
        self.metrics.request(request.wire, outcome, seconds, missed, policy)
        if isinstance(outcome, SinewError) and not isinstance(outcome, (ShuttingDownError, BusyError)):
            quiet = self._quiet.setdefault(request.wire, RateLimitedLog(logger))
            quiet.warning("%s: a request failed: %s", request.wire, printable(outcome))
        if access_log.isEnabledFor(logging.INFO):
            access_log.info(json.dumps(_entry(job, outcome, seconds, missed)))
        return seconds

    def _tell(self, job: ServingJob, outcome: Outcome, seconds: float) -> None:
        """Call the listeners, and update the metrics. The reply was sent to the robot before.

        Args:
            job: The job of the request.
            outcome: The chunk or the error.
            seconds: Seconds from the request's arrival to the answer.
        """
        for listener in self._listeners:
            listener(job, outcome, seconds)
        self.metrics.count()


def _safe(job: ServingJob, outcome: Outcome) -> Outcome:
    """Return the outcome in the form that may be sent to a robot: the actions are within the limits, and all warnings
    are added.
    """
    if not isinstance(outcome, ActionChunk):
        return outcome
    if job.deployment is not None:
        outcome = replace(outcome, deployment=job.deployment.number)
    decoded = job.decoded
    if decoded is None or outcome.context:
        return outcome
    if decoded.borrowed is not None:
        try:
            decoded.borrowed()
        except SinewError as error:
            return bare(error)
    if decoded.warnings:
        outcome = replace(outcome, warnings=(*outcome.warnings, *decoded.warnings))
    try:
        return outcome if decoded.safety is None else decoded.safety.enforce(outcome, decoded.observation)
    except SinewError as error:
        return bare(error)


def printable(error: SinewError) -> str:
    """Return an error as one short line for a log. Its text may contain a client's text of any length."""
    text = str(error)[:300]
    return text if text.isprintable() else repr(text)


def _entry(job: ServingJob, outcome: Outcome, seconds: float, missed: bool) -> dict[str, Any]:
    """Return a line of the access log, ready for JSON. It has the client, the time and the duration, but no frames,
    texts or actions.

    Args:
        job: The request.
        outcome: The chunk or the error.
        seconds: Seconds from the request's arrival to the answer.
        missed: True if the answer came after the deadline.
    """
    request, seen = job.request, job.observation
    entry: dict[str, Any] = {
        "time": round(time.time(), 3),
        "wire": request.wire,
        "client": request.client,
        "session": job.session[:64],
        **({"policy": request.policy[:MAX_SESSION]} if request.policy else {}),
        **({"adapter": seen.adapter[:MAX_NAME]} if seen is not None and seen.adapter else {}),
        "outcome": outcome.code if isinstance(outcome, SinewError) else "ok",
        "ms": round(1e3 * seconds, 3),
    }
    if isinstance(outcome, ActionChunk):
        entry["queue_ms"] = round(outcome.timing.queue_ms, 3)
        entry["infer_ms"] = round(outcome.timing.total_ms, 3)
    if missed:
        entry["deadline_missed"] = True
    return entry


def _call_soon(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[list[Outcome]], outcomes: list[Outcome]
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, future, outcomes)
    except RuntimeError:  # the protocol has stopped, so no client waits
        logger.debug("an answer came after its protocol had stopped")


def _settle(future: asyncio.Future[list[Outcome]], outcomes: list[Outcome]) -> None:
    if not future.done():
        future.set_result(outcomes)


def _never(_budget: PixelBudget) -> Observation:
    raise AssertionError("a rejected request is not decoded")
