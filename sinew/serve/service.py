"""What every wire talks to: policies behind their schedulers, with keys, deadlines, metrics and a recorder.

A wire owns its sockets and its codec. It hands over a :class:`Request` and gets a chunk or an error
back; health, metadata, authentication, what is counted, logged and recorded are the same for all of them.
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

STREAMED = "stream"  # key of ``Service.uses``
MAX_SESSION = 128  # characters of a session's name, which is remembered for a while


class UnhealthyError(SinewError):
    """The server cannot compute at present; its health has the reason."""

    code = "unhealthy"


# Follows the answers: takes a job, its outcome, and seconds since its request came.
Listener = Callable[[ServingJob, Outcome, float], None]


class Service:
    """The policies for all wires. Every method may be called from any thread.

    first: what requests get that name no policy. More are put into ``policies``.
    api_key: wanted of every client if not empty; or what returns several, of which one is wanted.
    deadline_ms: of requests that bring none; None: no limit.
    recorder, rerun: take what was asked and answered.
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
        self.swapper: Any = None  # loads, exchanges and unloads policies (serve/swap.py); None: nothing does
        # Makes a faster form of the first policy (serve/prepare.py); None: nothing does
        self.preparing: Any = None
        self.uses: set[str] = set()  # what robots asked for beyond plain chunks: values of ``rtc``, STREAMED
        self.metrics = Metrics(self.policies.stats, lambda: not self.problems(), self.about)
        self.robots = Robots()  # reports of robots
        self.metrics.add(self.robots)
        self.metrics.add(PolicyIdentities(self.policies.identities))
        self._listeners: tuple[Listener, ...] = ()
        self._quiet: dict[str, RateLimitedLog] = {}
        self._keys = api_key if callable(api_key) else lambda: (api_key,) if api_key else ()
        self._records = {n: r for n, r in (("recorder", recorder), ("rerun", rerun)) if r is not None}
        self.metrics.add(KeptRecords(self.records))
        self._started = time.monotonic()
        self._stopping = False

    # ------------------------------------------------------------------------- inference

    def submit(self, job: ServingJob, on_done: Callable[[Outcome], None]) -> ServingJob:
        """Queue the job of a request, and return it. ``on_done`` is called exactly once, on a thread of the scheduler,
        and must not block. Raises BusyError, ShuttingDownError or RequestError, and then does not call it."""
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
                except ShuttingDownError:  # or was the policy exchanged meanwhile?
                    if deployment is self.policies.get(request.policy):
                        raise
        except SinewError as error:
            self._tell(job, error, self._account(job, error))
            raise
        if (episode := job.episode) is not None:
            self.metrics.session(episode)
        return job

    def _answer(self, job: ServingJob, on_done: Callable[[Outcome], None], outcome: Outcome) -> None:
        """Hand an outcome over: within limits, counted, recorded."""
        outcome = _safe(job, outcome)
        seconds = self._account(job, outcome)
        seen, deployment, request = job.observation, job.deployment, job.request
        if deployment is not None and seen is not None:
            if seen.previous is not None and isinstance(outcome, ActionChunk):
                self.uses.add(kind_of(seen, deployment.spec))
            for record in self._records.values():
                about = deployment.metadata.get("server", {})
                record.put(request.wire, job.session, seen, outcome, about, policy=request.policy)
        on_done(outcome)
        self._tell(job, outcome, seconds)

    def submit_all(self, jobs: Sequence[ServingJob], on_done: Callable[[list[Outcome]], None]) -> None:
        """Queue the jobs of one message, to be computed at once where they fit together (``RequestGroup``).

        ``on_done`` is called exactly once, with the outcome of each in their order: those that are refused here have
        their error in their place, and the others are answered.
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
        """``submit_all`` for coroutines. Cancelling the coroutine abandons the requests: the client has left."""
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
        """``submit`` for coroutines. Cancelling the coroutine abandons the request: the client has left."""
        (outcome,) = await self.infer_all([request])
        try:
            if isinstance(outcome, SinewError):
                raise outcome
            return outcome
        finally:
            del outcome  # an error knows this frame, and this the error: a circle that keeps the request

    async def outcomes(
        self, message: WireMessage, decode: Callable[[WireMessage, PixelBudget], Observation], **about: Any
    ) -> Sequence[Outcome]:
        """Return the outcome of each observation of a message. The error of a single one is raised.

        Args:
            message: The message.
            decode: Makes an observation from its message.
            **about: Fields of each :class:`Request` that messages do not have.
        """
        limit = message.deadline_ms
        requests = [
            Request(decode=partial(decode, each), session=each.session, deadline_ms=limit, **about)
            for each in message.observations or (message,)
        ]
        return await self.infer_all(requests) if message.observations else [await self.infer(requests[0])]

    def reset(self, session: str = "", policy: str = "") -> None:
        """A new episode begins: a policy that keeps state between requests forgets the session's.
        Raises RequestError for a name that is too long, UnknownPolicyError."""
        self.check_session(session)
        self.policies.get(policy).scheduler.policy.reset(session)

    # ------------------------------------------------------------------------- the first policy

    @property
    def scheduler(self) -> Scheduler:
        """Return the one that takes requests which name no policy."""
        return self.policies.get().scheduler

    @property
    def spec(self) -> PolicySpec:
        """The first policy's specification."""
        return self.policies.get().spec

    def about(self, policy: str = "") -> dict[str, Any]:
        """Return the server's description of itself and a policy, with the names of all policies if there are
        several.

        Raises UnknownPolicyError.
        """
        more = {"policies": list(self.policies.names)} if self.policies.several else {}
        deployment = self.policies.get(policy)
        if deployment.changed:
            more["changed"] = list(deployment.changed)
        return deployment.metadata | more

    # ------------------------------------------------------------------------- everything else

    def authorize(self, key: str | bytes | None, role: str = access.ROBOT) -> None:
        """Raise :class:`UnauthorizedError` unless ``key`` is one of the server's for ``role``, or it has none."""
        access.check_key(key, self._keys(), role)

    @property
    def wants_key(self) -> bool:
        return bool(self._keys())

    def robot_keys(self) -> list[str]:
        """Return the keys with which a robot may ask for actions, for a transport that checks them itself."""
        return [
            key for role, key in map(role_and_key, self._keys()) if role in ("", access.ADMIN, access.ROBOT)
        ]

    def health(self) -> dict[str, Any]:
        """Status (ok, unhealthy, stopping), what is wrong, the most memory that the process had, its GPU's, and
        counters, ready for JSON."""
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
        """Return the counters of each recorder, by its name."""
        return {name: record.stats() for name, record in self._records.items()}

    def _engine(self) -> dict[str, Any]:
        """Return the first policy's bundle, what computes it and why, and the state of a faster form of it."""
        server = self.policies.get().metadata.get("server", {})
        found = {name: server[name] for name in ("identity", "engine", "engine_reason") if name in server}
        return found if self.preparing is None else {**found, "prepare": self.preparing.describe()}

    def problems(self) -> list[str]:
        """Why this server cannot answer requests, a sentence each; empty while it can."""
        return self.supervisor.problems()

    def tend(self) -> None:
        """Answer requests whose deadline has passed; to be called now and then."""
        for scheduler in self.policies.schedulers:
            scheduler.expire()

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with every answer and rejection from now on. It is called after the reply, on the thread
        that sent it, and must not block.
        """
        self._listeners += (listener,)

    def keeps_frames(self, deployment: Deployment) -> bool:
        """Return True if a request's frames may be read after its answer."""
        return bool(self._records or self._listeners) or deployment.scheduler.policy.keeps_frames

    def stopping(self) -> None:
        """Report from now on in ``health`` that the server stops."""
        self._stopping = True

    def refused(self, wire: str, client: str, error: SinewError) -> None:
        """Count and log a request that did not get as far as ``submit``."""
        job = ServingJob(Request(wire, _never, client))
        self._tell(job, error, self._account(job, error))

    @contextlib.contextmanager
    def reading(self, wire: str, client: str) -> Iterator[None]:
        """Wrap everything before ``submit``: rejections inside are counted and logged."""
        try:
            yield
        except SinewError as error:
            self.refused(wire, client, error)
            raise

    @staticmethod
    def check_session(name: str) -> None:
        """Raise RequestError for a session's name that is too long."""
        if len(name) > MAX_SESSION:
            raise RequestError(f"session: expected at most {MAX_SESSION} characters, got {len(name)}")

    def _account(self, job: ServingJob, outcome: Outcome) -> float:
        """Count and log an outcome; return seconds since the request's arrival."""
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
        """Tell the listeners and the metrics. A robot's reply is sent before that."""
        for listener in self._listeners:
            listener(job, outcome, seconds)
        self.metrics.count()


def _safe(job: ServingJob, outcome: Outcome) -> Outcome:
    """Return the outcome as it may be sent to a robot."""
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
    """For a log: an error may quote what a client sent, of any length and with line breaks in it."""
    text = str(error)[:300]
    return text if text.isprintable() else repr(text)


def _entry(job: ServingJob, outcome: Outcome, seconds: float, missed: bool) -> dict[str, Any]:
    """A line of the access log: who, when, how long; nothing of what was seen, said or done."""
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
        logger.debug("an answer came after its wire had closed")


def _settle(future: asyncio.Future[list[Outcome]], outcomes: list[Outcome]) -> None:
    if not future.done():
        future.set_result(outcomes)


def _never(_budget: PixelBudget) -> Observation:
    raise AssertionError("a refused request is not decoded")
