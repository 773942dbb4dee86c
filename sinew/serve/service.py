"""What every wire talks to: policies behind their schedulers, with keys, deadlines, metrics and a recorder.

A wire owns its sockets and its codec. It hands over an :class:`Inference` and gets a chunk or an error
back; health, metadata, authentication, what is counted, logged and recorded are the same for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sinew.core import ActionChunk, BusyError, Observation, PolicySpec, RequestError, SinewError
from sinew.serve.backlog import Backlog
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.metrics import Metrics
from sinew.serve.policies import Policies, Standing
from sinew.serve.quiet import Quiet
from sinew.serve.request import Check, Job, Outcome, ShuttingDownError, bare
from sinew.serve.safety import Safety
from sinew.serve.scheduler import Scheduler

logger = logging.getLogger(__name__)
access = logging.getLogger("sinew.access")

MAX_SESSION = 128  # characters of a session's name, which is remembered for a while


class UnauthorizedError(SinewError):
    """The server wants a key, and the request came without one or with another."""

    code = "unauthorized"


class UnhealthyError(SinewError):
    """The server cannot compute at present; its health says why."""

    code = "unhealthy"


@dataclass(frozen=True, slots=True)
class Inference:
    """One request as a wire hands it over.

    decode: makes the observation of the bytes that came; runs on the scheduler's decode thread, within a budget of
        pixels that also ends it when nobody waits any more, and raises a SinewError that names the field where it
        cannot.
    client: the peer, for the log. connection: what it came through; connections take turns. None: the peer.
    session: the client's name for its episode; requests of one session replace each other while they wait, if
        they are of one ``owner`` too (None: the connection). Empty: none.
    deadline_ms: from ``arrived`` on; a request whose turn comes later is not computed.
    arrived: ``time.perf_counter()`` when the last byte was there. policy: which one is to answer; "": the first.
    """

    wire: str
    decode: Callable[[PixelBudget], Observation]
    client: str = ""
    session: str = ""
    deadline_ms: float | None = None
    arrived: float = field(default_factory=time.perf_counter)
    connection: Hashable | None = None
    owner: Hashable | None = None
    policy: str = ""


# Follows the answers. Takes the request, its observation if it was decoded, what became of it, seconds since it came,
# and how many of them it had.
Listener = Callable[[Inference, Observation | None, Outcome, float, float | None], None]


class Service:
    """The policies for all wires. Every method may be called from any thread.

    first: what requests get that name no policy. More are put into ``policies``.
    api_key: wanted of every client if not empty. deadline_ms: of requests that bring none; None: no limit.
    recorder, rerun: take what was asked and answered.
    """

    def __init__(
        self,
        first: Standing,
        *,
        api_key: str = "",
        deadline_ms: float | None = None,
        recorder: Backlog | None = None,
        rerun: Backlog | None = None,
    ):
        self.supervisor = first.scheduler.supervisor
        self.policies = Policies(first)
        self.deadline_ms = deadline_ms
        self.swapper: Any = None  # loads, exchanges and unloads policies (serve/swap.py); None: nothing does
        self.metrics = Metrics(self.policies.stats, lambda: not self.problems(), first.metadata)
        self._listeners: tuple[Listener, ...] = ()
        self._quiet: dict[str, Quiet] = {}
        self._api_key = api_key
        self._records = {n: r for n, r in (("recorder", recorder), ("rerun", rerun)) if r is not None}
        self._started = time.monotonic()
        self._stopping = False

    # ------------------------------------------------------------------------- inference

    def submit(self, inference: Inference, on_done: Callable[[Outcome], None]) -> Job:
        """Queue one inference. ``on_done`` is called exactly once, on a thread of the scheduler, and must
        not block. Raises BusyError, ShuttingDownError or RequestError, and then does not call it."""
        wait_ms = self.deadline_ms if inference.deadline_ms is None else inference.deadline_ms
        deadline = None if wait_ms is None else inference.arrived + wait_ms / 1e3
        connection = inference.connection if inference.connection is not None else inference.client
        owner = connection if inference.owner is None else inference.owner
        session = (inference.wire, owner, inference.session) if inference.session else None
        job = None
        try:
            if wait_ms is not None and not wait_ms > 0:
                raise RequestError(f"deadline_ms: expected a number above 0, got {wait_ms}")
            self.check_session(inference.session)
            while job is None:
                standing = self.policies.get(inference.policy)
                if (stuck := standing.scheduler.stuck()) is not None:
                    raise UnhealthyError(stuck)
                decode, done = self._around(inference, standing, deadline, on_done)
                try:
                    job = standing.scheduler.submit(
                        decode, done, session=session, deadline=deadline, client=connection
                    )
                except ShuttingDownError:  # or was the policy exchanged meanwhile?
                    if standing is self.policies.get(inference.policy):
                        raise
        except SinewError as error:
            self._tell(inference, error, deadline, self._account(inference, error, deadline))
            raise
        if session is not None:
            self.metrics.session(session)
        return job

    def _around(
        self,
        inference: Inference,
        standing: Standing,
        deadline: float | None,
        on_done: Callable[[Outcome], None],
    ) -> tuple[Callable[[Check], Observation], Callable[[Outcome], None]]:
        """Return what decodes the observation, and what takes the outcome: within limits, counted, recorded."""
        seen: list[Observation] = []
        warnings: list[str] = []

        def decode(check: Check) -> Observation:
            observation = inference.decode(PixelBudget(standing.pixels, check))
            seen.append(observation)
            if standing.safety is not None:
                warnings.extend(standing.safety.check(observation))
            return observation

        def done(outcome: Outcome) -> None:
            outcome = _safe(standing.safety, outcome, seen, warnings)
            seconds = self._account(inference, outcome, deadline)
            for record in self._records.values() if seen else ():
                record.put(
                    inference.wire, inference.session, seen[0], outcome, standing.metadata.get("server", {})
                )
            on_done(outcome)
            self._tell(inference, outcome, deadline, seconds, seen)

        return decode, done

    async def infer(self, inference: Inference) -> ActionChunk:
        """``submit`` for coroutines. Cancelling the coroutine abandons the request: the client has left."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ActionChunk] = loop.create_future()
        job = self.submit(inference, partial(_call_soon, loop, future))
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(job)
            raise
        finally:
            del (
                future,
                job,
            )  # an error knows this frame, and these know the error: a circle that keeps the request

    def cancel(self, job: Job) -> None:
        """The client of this job has left."""
        job.home.cancel(job)

    def reset(self, session: str = "", policy: str = "") -> None:
        """A new episode begins: a policy that keeps state between requests forgets the session's.
        Raises RequestError for a name that is too long, UnknownPolicyError."""
        self.check_session(session)
        if (forget := getattr(self.policies.get(policy).scheduler.policy, "reset", None)) is not None:
            forget(session)

    # ------------------------------------------------------------------------- the first policy

    @property
    def scheduler(self) -> Scheduler:
        """Return the one that takes requests which name no policy."""
        return self.policies.get().scheduler

    @property
    def spec(self) -> PolicySpec:
        """Return what the first policy reads and writes."""
        return self.policies.get().spec

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what the server says about itself and the first policy."""
        return self.about()

    def about(self, policy: str = "") -> dict[str, Any]:
        """Return what the server says about itself and a policy, with the names of all where there are several.

        Raises UnknownPolicyError.
        """
        more = {"policies": list(self.policies.names)} if self.policies.several else {}
        return self.policies.get(policy).metadata | more

    # ------------------------------------------------------------------------- everything else

    def authorize(self, key: str | bytes | None) -> None:
        """Raises :class:`UnauthorizedError` unless ``key`` is the server's, or the server has none."""
        if not self._api_key:
            return
        given = key.encode(errors="surrogateescape") if isinstance(key, str) else key or b""
        if not hmac.compare_digest(given, self._api_key.encode()):
            raise UnauthorizedError("this server wants an API key, and the request brought none or another")

    @property
    def wants_key(self) -> bool:
        return bool(self._api_key)

    def health(self) -> dict[str, Any]:
        """Status (ok, unhealthy, stopping), what is wrong, and counters, ready for JSON."""
        problems = self.problems()
        return {
            "status": "stopping" if self._stopping else "unhealthy" if problems else "ok",
            "problems": problems,
            "uptime_s": round(time.monotonic() - self._started, 3),
            **self.policies.stats(),
            **({"policies": self.policies.describe()} if self.policies.several else {}),
            **{name: record.stats() for name, record in self._records.items()},
        }

    def problems(self) -> list[str]:
        """Why this server cannot answer requests, a sentence each; empty while it can."""
        return self.supervisor.problems()

    def tend(self) -> None:
        """Answer requests whose deadline has passed; to be called now and then."""
        for scheduler in self.policies.schedulers:
            scheduler.expire()

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` with whatever is answered or refused from now on, after its reply and on the thread that
        sent it: it must not block."""
        self._listeners += (listener,)

    def stopping(self) -> None:
        """From now on ``health`` says so."""
        self._stopping = True

    def refused(self, wire: str, client: str, error: SinewError) -> None:
        """Count and log a request that did not get as far as ``submit``."""
        inference = Inference(wire, _never, client)
        self._tell(inference, error, None, self._account(inference, error, None))

    @contextlib.contextmanager
    def reading(self, wire: str, client: str) -> Iterator[None]:
        """Around whatever comes before ``submit``: what is refused inside is counted and logged."""
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

    def _account(self, inference: Inference, outcome: Outcome, deadline: float | None) -> float:
        """Count and log an outcome; return seconds since the request's arrival."""
        now = time.perf_counter()
        seconds = now - inference.arrived
        missed = deadline is not None and now > deadline
        self.metrics.request(inference.wire, outcome, seconds, missed)
        if isinstance(outcome, SinewError) and not isinstance(outcome, (ShuttingDownError, BusyError)):
            quiet = self._quiet.setdefault(inference.wire, Quiet(logger))
            quiet.warning("%s: a request failed: %s", inference.wire, printable(outcome))
        if access.isEnabledFor(logging.INFO):
            access.info(json.dumps(_entry(inference, outcome, seconds, missed)))
        return seconds

    def _tell(
        self,
        inference: Inference,
        outcome: Outcome,
        deadline: float | None,
        seconds: float,
        seen: Sequence[Observation] = (),
    ) -> None:
        """Tell the listeners and the metrics. A robot's reply is sent before that."""
        limit = None if deadline is None else deadline - inference.arrived
        for listener in self._listeners:
            listener(inference, seen[0] if seen else None, outcome, seconds, limit)
        self.metrics.count()


def _safe(safety: Safety | None, outcome: Outcome, seen: list[Observation], warnings: list[str]) -> Outcome:
    """Return the outcome as it may be sent to a robot."""
    if safety is None or not isinstance(outcome, ActionChunk) or outcome.context:
        return outcome
    if warnings:
        outcome = replace(outcome, warnings=(*outcome.warnings, *warnings))
    try:
        return safety.enforce(outcome, seen[0])
    except SinewError as error:
        return bare(error)


def printable(error: SinewError) -> str:
    """For a log: an error may quote what a client sent, of any length and with line breaks in it."""
    text = str(error)[:300]
    return text if text.isprintable() else repr(text)


def _entry(inference: Inference, outcome: Outcome, seconds: float, missed: bool) -> dict[str, Any]:
    """A line of the access log: who, when, how long; nothing of what was seen, said or done."""
    entry: dict[str, Any] = {
        "time": round(time.time(), 3),
        "wire": inference.wire,
        "client": inference.client,
        "session": inference.session[:64],
        **({"policy": inference.policy[:MAX_SESSION]} if inference.policy else {}),
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
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[ActionChunk], outcome: Outcome
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, future, outcome)
    except RuntimeError:  # the wire has stopped; nobody waits
        logger.debug("an answer came after its wire had closed")


def _settle(future: asyncio.Future[ActionChunk], outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, SinewError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _never(_budget: PixelBudget) -> Observation:
    raise AssertionError("a refused request is not decoded")
