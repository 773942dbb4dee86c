"""LeRobot's remote inference: the server for ``lerobot-rollout --inference.type=remote``.

A robot requests the descriptor of a deployment, opens a session, resets the session, and then sends one observation
after another. LeRobot's server accepts one robot. Here, each open request gets its own session, and all sessions
share the queue of the policy. The keys and the steps of a session come from ``remote_inference/{server,client}.py``
of huggingface/lerobot at 88807eb6.
"""

from __future__ import annotations

import logging
import queue
import re
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from sinew_client.addresses import split_scheme

from sinew.core import CancelledError, PolicySpec, SinewError
from sinew.core.rate_limited_log import RateLimitedLog
from sinew.serve.job import ServingJob
from sinew.serve.policies import DEFAULT
from sinew.serve.request import Outcome, Request
from sinew.serve.service import Service
from sinew.serve.transport.ledger import HELD_REQUESTS, MemoryLedger
from sinew.serve.transport.listen import Listen, reachable
from sinew.serve.transport.zenoh_node import USER, ZenohNode
from sinew.serve.wires.lerobot.features import DEFAULT_HZ
from sinew.serve.wires.lerobot_remote import contract as agreements
from sinew.serve.wires.lerobot_remote.contract import ACTION_S, GRACE_S, LANGUAGE_S, MAX_CHARS, Contract
from sinew.serve.wires.lerobot_remote.envelope import (
    IDENTIFIER,
    MAX_MESSAGE,
    MAX_TEXT,
    Envelope,
    RemoteError,
    decode,
    encode,
    envelope_of,
)
from sinew.serve.wires.lerobot_remote.sessions import Control, Recent, RemoteSession, UnderWay

logger = logging.getLogger(__name__)

NAME = "lerobot-remote"
ROOT = "lerobot/inference/v1/deployments"
ANSWERED_OPENS = 32  # number of requests to open a session whose answers are stored, to send them again
# Robots may send one request to open a session per OPENS_S seconds on average, and up to OPENS requests at once.
OPENS_S = 0.05
OPENS = 32
HEARS_S = 5.0  # seconds that the first reset waits until the robot has subscribed to its answers
LOOK_S = 0.005  # seconds between two checks of these subscriptions
TICK_S = 0.25  # seconds between two checks for sessions whose robot has disconnected
STOP_S = 4.0
OPERATIONS = ("reset", "invalidate", "close", "status")


class LeRobotRemoteWire:
    """The server of the protocol. The constructor claims the port. After :meth:`start`, robots can connect, and one
    thread answers the robots.
    """

    name = NAME
    dashboard = ""

    def __init__(self, listen: Listen):
        self._settings = listen.remote
        if (name := self._settings.deployment) and not IDENTIFIER.fullmatch(name):
            raise SinewError(
                f"--deployment: expected letters, digits and _.- (at most 128), got {name[:200]!r}"
            )
        self._limit = min(listen.max_message_bytes, MAX_MESSAGE)
        self._node = ZenohNode(NAME, listen, self._limit)
        self.address = self._node.address
        self._instance = uuid4().hex
        self._sessions: dict[str, RemoteSession] = {}
        # Sessions with an observation in the inbox; the node's lock guards them.
        self._inbound: set[str] = set()
        # Key: session. Value: newest state of its liveliness token (True while the robot is connected), not handled
        # yet.
        self._alive: dict[str, bool] = {}
        self._ledger: MemoryLedger[RemoteSession] = MemoryLedger(
            NAME, listen.max_connections, HELD_REQUESTS * self._limit, self._expel, listen.arrival_s
        )
        self._opened = Recent(ANSWERED_OPENS)
        self._opens = 0.0  # seconds by which requests to open a session are ahead of their allowed rate
        self._served: dict[str, str] = {}  # name of a deployment -> name of its policy
        self._declared: list[Any] = []
        self._failures = RateLimitedLog(logger)
        self._thread: threading.Thread | None = None
        self._ended = False

    def start(self, service: Service) -> None:
        self._service = service
        first = self._deployment(service.spec)
        # Raise an error now if the settings do not fit the policy.
        offered = agreements.contract(service.policies.get(), self._settings)
        self._explain(service.spec, offered)
        self._zenoh = self._node.open(service.robot_keys(), _rules(self._instance))
        self._declare(first, "")
        self._adopt()
        self._thread = service.supervisor.thread(f"sinew-{NAME}", self._run)

    def stop(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._node.inbox.put(None)
        if self._thread is not None:
            self._thread.join(STOP_S)
        self._node.close()

    def guide(self, spec: PolicySpec) -> Sequence[str]:
        """Return the command line of LeRobot's own client. The user replaces the robot's type, port and camera
        indices.
        """
        hz = spec.control_hz or DEFAULT_HZ
        sizes, names = dict(self._settings.camera_sizes), agreements.robot_names(spec)
        cameras = []
        for index, camera in enumerate(spec.cameras):
            height, width = sizes.get(camera.name, (camera.height, camera.width))
            kind = f"type: opencv, index_or_path: {index}, width: {width}, height: {height}, fps: {max(1, round(hz))}"
            cameras.append(f"{names[camera.name]}: {{{kind}}}")
        robot = "{" + ", ".join(cameras) + "}"
        endpoint = (
            self._node.endpoint if self._settings.router else "/".join(split_scheme(reachable(self.address)))
        )
        return [
            "lerobot-rollout --inference.type=remote \\",
            f"    --inference.endpoint={endpoint} --inference.deployment={self._deployment(spec)} \\",
            f"    --inference.semantics={shlex.quote(self._settings.semantics or agreements.units(spec))} \\",
            f"    --inference.mode=chunk --fps={hz:g} \\",
            "    --robot.type=so101_follower --robot.port=/dev/ttyACM0 --robot.id=arm \\",
            f"    --robot.cameras={shlex.quote(robot)} \\",
            '    --task="pick up the red cube"',
        ]

    def _deployment(self, spec: PolicySpec) -> str:
        """Return the name under which robots find the first policy (its deployment name in LeRobot's protocol)."""
        words = re.sub(r"[^A-Za-z0-9_.-]+", "-", spec.name).strip("-_.")
        return self._settings.deployment or words[:128] or DEFAULT

    def _adopt(self) -> None:
        """Announce new policies of the server to robots. Robots find each policy as a deployment with the policy's
        name.
        """
        for policy in self._service.policies.names:
            if policy != DEFAULT and policy not in self._served:
                self._declare(policy, policy)

    def _declare(self, deployment: str, policy: str) -> None:
        zenoh, node, session = self._zenoh, self._node, self._node.zenoh
        self._served[deployment] = policy
        instance = f"{ROOT}/{deployment}/instances/{self._instance}"
        each = f"{instance}/sessions/*"

        def queries_of(kind: str) -> Any:
            return node.queries(lambda query: (kind, deployment, query))

        def samples_of(kind: str) -> Any:
            return node.samples(partial(self._arriving, kind))

        def alive(sample: Any) -> None:
            name = _session_in(sample.key_expr)
            if name in self._sessions:
                pending = name in self._alive
                self._alive[name] = sample.kind == session.SampleKind.PUT
                # If an earlier entry is still in the inbox, it will report the newest state. So a token that appears
                # and disappears quickly cannot fill the inbox.
                if not pending:
                    node.inbox.put(("alive", name, None))

        self._declared += [
            zenoh.declare_queryable(f"{ROOT}/{deployment}/describe", queries_of("describe"), complete=True),
            zenoh.declare_queryable(f"{instance}/open", queries_of("open"), complete=True),
            zenoh.declare_queryable(f"{each}/control", queries_of("control"), complete=True),
            zenoh.declare_subscriber(f"{each}/obs", samples_of("observation")),
            zenoh.declare_subscriber(f"{each}/language/request", samples_of("language_request")),
            zenoh.liveliness().declare_subscriber(f"{each}/alive", node.direct(alive), history=True),
            # Declare this token last, because robots take it as the sign that the server is ready.
            zenoh.liveliness().declare_token(f"{instance}/alive"),
        ]

    def _arriving(self, kind: str, sample: Any) -> Any:
        """Return the inbox entry of a robot's message; None to drop the message. A thread of Zenoh calls this
        method.
        """
        name = _session_in(sample.key_expr)
        if name not in self._sessions or name in self._inbound:
            return None
        self._inbound.add(name)
        return kind, name, sample

    def _explain(self, spec: PolicySpec, offered: Contract) -> None:
        """Log the properties that robots must match although the bundle does not state them."""
        if not spec.action.names:
            logger.warning(
                "lerobot-remote: the bundle does not name its actions, so robots must use the names %s",
                ", ".join(offered.action.names),
            )
        if not spec.control_hz:
            logger.warning(
                "lerobot-remote: the bundle has no control rate, so robots must run at %g Hz", DEFAULT_HZ
            )
        if self._service.wants_key and not self._settings.router:
            logger.info("lerobot-remote: robots need the Zenoh user %s, with the key as its password", USER)

    def _run(self) -> None:
        tick = time.monotonic()
        while True:
            hurry = any(session.controls for session in self._sessions.values())
            try:
                entry = self._node.inbox.get(timeout=LOOK_S if hurry else TICK_S)
            except queue.Empty:
                entry = ()
            if entry is None:
                for session in list(self._sessions.values()):
                    self._end(session)
                self._declared.clear()
                return
            try:
                if entry:
                    self._handle(*entry)
                if hurry:
                    self._answer_controls()
                if (now := time.monotonic()) - tick > TICK_S:
                    tick = now
                    self._tick(now)
            except Exception as error:  # noqa: BLE001 - the other robots are served on
                self._failures.error("lerobot-remote: a request failed unexpectedly", error)

    def _handle(self, kind: str, where: str, what: Any) -> None:
        if kind == "alive":
            self._presence(where, self._alive.pop(where))
        elif kind == "done":
            self._done(where, *what)
        elif kind in ("observation", "language_request"):
            payload = what.payload.to_bytes()
            self._node.taken(len(payload))
            self._inbound.discard(where)
            if (session := self._sessions.get(where)) is not None:
                self._receive(session, kind, payload)
        else:
            self._node.answered()
            self._query(kind, where, what)

    def _tick(self, now: float) -> None:
        self._adopt()
        self._opens = max(0.0, self._opens - TICK_S)
        for session in list(self._sessions.values()):
            if session.absent is None:
                # A connected robot keeps its session, however long the robot is silent.
                session.heard = now
            elif now - session.absent > GRACE_S:
                logger.info(
                    "lerobot-remote: a robot was disconnected for %g s, so its session has ended", GRACE_S
                )
                self._end(session)

    def _query(self, kind: str, deployment: str, query: Any) -> None:
        """Answer a query, or store it. A dropped query ends at once for the robot, so each query is answered,
        dropped or stored.
        """
        payload, key = b"" if query.payload is None else query.payload.to_bytes(), str(query.key_expr)
        message = None if "*" in key else envelope_of(payload)
        answer: bytes | None = b""
        if message is not None:
            try:
                answer = self._answer_to(kind, deployment, key, payload, query)
            except SinewError as error:
                self._service.refused(NAME, _session_in(key)[:8], error)
                answer = encode(message.error(error))
        if answer is not None:
            if answer:
                query.reply(key, answer)
            query.drop()

    def _answer_to(self, kind: str, deployment: str, key: str, payload: bytes, query: Any) -> bytes | None:
        """Compute the answer to a query.

        Args:
            kind: The expected type of the message.
            deployment: Name of the deployment.
            key: Zenoh's key of the query.
            payload: The message.
            query: Zenoh's query.

        Returns:
            The answer; None if the query was stored and will be answered later.

        Raises:
            SinewError: The query is rejected.
        """
        message = decode(payload)
        if message.kind != kind:
            raise RemoteError("malformed", f"message_type: expected {kind}, got {message.kind}")
        if kind == "describe":
            body = self._offer(deployment).describe(deployment, self._instance)
            body["ready"] = not self._service.problems()
            return encode(
                message.reply("descriptor", body, instance=self._instance, session="", generation=0)
            )
        if message.instance != self._instance:
            raise RemoteError("stale", "instance_id: this is not the id of this server; connect again")
        if kind == "open":
            return self._open(deployment, message)
        return self._control(key, message, query)

    def _offer(self, deployment: str) -> Contract:
        return agreements.contract(self._service.policies.get(self._served[deployment]), self._settings)

    def _open(self, deployment: str, message: Envelope) -> bytes:
        if not message.request:
            raise RemoteError("malformed", "request_id: expected an id, got an empty one")
        if message.request in self._opened:
            return self._opened[message.request]
        if self._opens > OPENS * OPENS_S:
            raise _busy("robots open sessions faster than this server allows; try again in a second")
        self._opens += OPENS_S
        agreed = agreements.agree(message.body, self._offer(deployment))
        name, policy = uuid4().hex, self._served[deployment]
        prefix, now = f"{ROOT}/{deployment}/instances/{self._instance}/sessions/{name}", time.monotonic()
        drop = self._node.zenoh.CongestionControl.DROP
        act, language = (
            self._zenoh.declare_publisher(prefix + end, congestion_control=drop)
            for end in ("/act", "/language/result")
        )
        session = RemoteSession(name, policy, prefix, agreed, act, language, now)
        if not self._ledger.admit(session, now):
            session.undeclare()
            raise _busy(
                f"this server has {self._ledger.limit} sessions, which is the limit; close another session"
            )
        self._service.reset(name, policy)
        self._sessions[name] = session
        if rtc := agreed.contract.modes[agreed.mode]:
            self._service.uses.add(rtc)
        body = agreed.contract.describe(deployment, self._instance)
        body |= {"session": name, "session_status": "active", "mode": agreed.mode}
        body["chunk_settings"] = {"chunk_merge": agreed.merge}
        answer = encode(message.reply("accepted", body, session=name, generation=0))
        self._opened[message.request] = answer
        return answer

    def _control(self, key: str, message: Envelope, query: Any) -> bytes | None:
        session = self._sessions.get(message.session)
        if session is None or _session_in(key) != message.session or not key.startswith(session.prefix):
            raise RemoteError(
                "stale",
                "session_id: expected an open session, got a closed or unknown session; open a new session",
            )
        if message.request in session.acks:
            return session.acks[message.request]
        operation = message.body.get("operation")
        if not isinstance(operation, str) or operation not in OPERATIONS:
            raise agreements.malformed("operation", " or ".join(OPERATIONS), operation)
        current = session.generation
        if message.generation < current or (operation == "status" and message.generation != current):
            raise RemoteError(
                "stale",
                f"generation: expected {current}, the generation of the last reset, got {message.generation}",
            )
        if operation == "status":
            status = "busy" if session.running else "active"
            return encode(_ack(message, session=session.name, session_status=status))
        if operation == "close":
            self._end(session)
            return encode(_ack(message))
        if len(session.controls) >= 8:
            raise RemoteError(
                "busy", "control: expected at most 8 waiting requests, got more; wait for an answer"
            )
        if session.running is not None and session.running.job is not None and message.generation > current:
            session.running.job.abandon()  # the robot does not wait for this answer any more
        control = Control(message, query)
        if self._apply(session, control):
            return session.acks[message.request]
        session.controls.append(control)
        return None

    def _apply(self, session: RemoteSession, control: Control) -> bool:
        """Apply a reset or an invalidation to a session, and store its answer.

        Returns:
            False if the request has to wait.

        Raises:
            RemoteError: The robot has not subscribed to its answers in time.
        """
        message, now = control.message, time.monotonic()
        if session.running is not None:
            return False
        first = not session.ready
        if first and not session.hears():
            control.until = control.until or now + HEARS_S
            if now < control.until:
                return False
            raise RemoteError(
                "timeout",
                f"the robot did not subscribe to its answers in {HEARS_S:g} s; check its connection",
            )
        if message.body["operation"] == "reset" and (first or message.generation > session.generation):
            self._service.reset(session.name, session.policy)
        session.generation = max(session.generation, message.generation)
        if first:
            session.ready = True
            self._ledger.prove(session)
        session.acks[message.request] = encode(_ack(message))
        return True

    def _answer_controls(self) -> None:
        for session in list(self._sessions.values()):
            for control in list(session.controls):
                try:
                    if not self._apply(session, control):
                        break
                    answer = session.acks[control.message.request]
                except SinewError as error:
                    self._service.refused(NAME, session.name[:8], error)
                    answer = encode(control.message.error(error))
                session.controls.remove(control)
                control.query.reply(f"{session.prefix}/control", answer)
                control.query.drop()

    def _receive(self, session: RemoteSession, kind: str, payload: bytes) -> None:
        self._ledger.arrived(session, len(payload), time.monotonic())
        if session not in self._ledger.open:
            return
        size = self._ledger.whole(session)
        message = envelope_of(payload)
        try:
            self._submit(session, kind, payload, size)
        except SinewError as error:
            self._ledger.answered(session, size)
            self._service.refused(NAME, session.name[:8], error)
            if message is not None:
                self._send(session, kind, message.error(error))

    def _submit(self, session: RemoteSession, kind: str, payload: bytes, size: int) -> None:
        message = decode(payload)
        if message.kind != kind:
            raise RemoteError("malformed", f"message_type: expected {kind}, got {message.kind}")
        if (message.instance, message.session) != (self._instance, session.name):
            raise RemoteError(
                "stale", "session_id: this is not the session of this Zenoh key; open a new session"
            )
        if message.generation != session.generation or session.controls or not session.ready:
            raise RemoteError(
                "stale",
                f"generation: expected {session.generation} of a session that is ready, got"
                f" {message.generation}; wait for the answer to the last reset",
            )
        if session.running is not None:
            raise RemoteError(
                "busy", "another request of this session is being computed; wait for its answer"
            )
        offered = session.agreed.contract
        if agreements.identity(self._service.policies.get(session.policy)) != offered.identity:
            raise RemoteError(
                "incompatible", "artifact_identity: the server has another policy now; open a new session"
            )
        language = kind == "language_request"
        read = agreements.read_language if language else agreements.read_observation
        fields = read(message.body, session.agreed)
        session.accept(message, fields.sequence)
        limit_ms = 1e3 * (LANGUAGE_S if language else ACTION_S)
        own = self._service.deadline_ms
        request = Request(
            NAME,
            lambda budget: agreements.observation(fields, offered, session.name, budget),
            client=session.name[:8],
            session=session.name,
            deadline_ms=limit_ms if own is None else min(own, limit_ms),
            connection=session.name,
            policy=session.policy,
        )
        session.running = running = UnderWay(message, fields, size, ServingJob(request))
        try:
            assert running.job is not None
            self._service.submit(
                running.job, lambda outcome: self._node.inbox.put(("done", session.name, (running, outcome)))
            )
        except SinewError:
            session.running = None
            raise

    def _done(self, name: str, running: UnderWay, outcome: Outcome) -> None:
        session = self._sessions.get(name)
        if session is None or session.running is not running:
            return
        session.running, running.job = None, None
        self._ledger.answered(session, running.size)
        kind, message = running.message.kind, running.message
        if isinstance(outcome, CancelledError) and (session.controls or session.absent is not None):
            answer = None  # the robot does not wait for this answer any more
        elif isinstance(outcome, SinewError):
            answer = message.error(outcome)
        else:
            try:
                answer = message.reply(*_answer(running, outcome, session.agreed))
            except RemoteError as error:
                answer = message.error(error)
        if answer is not None:
            self._send(session, kind, answer)
        self._answer_controls()

    def _send(self, session: RemoteSession, kind: str, answer: Envelope) -> None:
        publisher = session.act if kind == "observation" else session.language
        publisher.put(encode(answer))

    def _presence(self, name: str, alive: bool) -> None:
        session = self._sessions.get(name)
        if session is None:
            return
        session.absent = None if alive else time.monotonic()
        if not alive and session.running is not None and session.running.job is not None:
            session.running.job.abandon()  # the robot cannot receive the answer

    def _end(self, session: RemoteSession) -> None:
        """Remove a session. All further requests of the session are rejected as stale."""
        if self._sessions.pop(session.name, None) is None:
            return
        if session.running is not None and session.running.job is not None:
            session.running.job.abandon()
        self._ledger.forget(session)
        for control in session.controls:
            control.query.drop()
        session.controls.clear()
        session.undeclare()
        self._service.reset(session.name, session.policy)

    def _expel(self, session: RemoteSession, reason: str) -> None:
        self._failures.info("lerobot-remote: a session was closed: %s", reason)
        self._end(session)


def _rules(instance: str) -> list[dict[str, Any]]:
    """Return Zenoh's rules for robots: each robot may use its own side of the protocol, but no messages of other
    robots.
    """
    at = f"{ROOT}/*/instances/{instance}"
    each = f"{at}/sessions/*"

    def rule(name: str, flow: str, messages: Sequence[str], *keys: str) -> dict[str, Any]:
        return {
            "id": name,
            "permission": "allow",
            "flows": [flow],
            "messages": list(messages),
            "key_exprs": keys,
        }

    return [
        rule("ask", "ingress", ["query"], f"{ROOT}/*/describe", f"{at}/open", f"{each}/control"),
        rule("send", "ingress", ["put"], f"{each}/obs", f"{each}/language/request"),
        rule("hear", "ingress", ["declare_subscriber"], f"{each}/act", f"{each}/language/result"),
        rule("present", "ingress", ["liveliness_token"], f"{each}/alive"),
        rule("watch", "ingress", ["declare_liveliness_subscriber", "liveliness_query"], f"{ROOT}/*/instances/*/alive"),
        rule(
            "answer", "egress",
            ["put", "reply", "declare_queryable", "declare_subscriber", "liveliness_token",
             "declare_liveliness_subscriber", "liveliness_query"],
            f"{ROOT}/**",
        ),
    ]  # fmt: skip


def _session_in(key: Any) -> str:
    """Return the id of the session in a key; "" if the key has none."""
    return str(key).partition("/sessions/")[2].partition("/")[0]


def _busy(message: str) -> RemoteError:
    return RemoteError(
        "busy", message, {"admission_blocker": "active_session", "absence_grace_remaining_s": None}
    )


def _ack(message: Envelope, **more: Any) -> Envelope:
    return message.reply(
        "ack",
        {"operation": message.body["operation"], "applied_generation": message.generation, **more},
    )


def _answer(running: UnderWay, chunk: Any, agreed: agreements.Agreed) -> tuple[str, Mapping[str, Any]]:
    """Create the answer to a request.

    Args:
        running: The request.
        chunk: The policy's answer.
        agreed: The agreement of the session.

    Returns:
        The type and the body of the answer.

    Raises:
        RemoteError: The policy's answer does not fit the contract.
    """
    timing, offered = chunk.timing, agreed.contract
    head_s = (timing.vision_ms + timing.prefix_ms + timing.text_ms + timing.head_ms) / 1e3
    body = dict(running.request.echo)
    body["server_durations"] = {
        "preprocessing": timing.preprocess_ms / 1e3,
        "policy": head_s,
        "postprocessing": timing.postprocess_ms / 1e3,
        "queue": timing.queue_ms / 1e3,
        "worker": timing.total_ms / 1e3,
    }
    if chunk.warnings:
        body["warnings"] = [warning[:MAX_CHARS] for warning in chunk.warnings[:16]]
    if running.request.kind:
        answer = chunk.text.strip()[:MAX_CHARS]
        if not answer:
            raise RemoteError("execution", "answer: the policy generated no text")
        while len(answer.encode()) > MAX_TEXT:
            answer = answer[:-1]
        return "language_result", body | {"answer": answer, "duration_s": timing.total_ms / 1e3}
    guided = agreed.mode != "chunk"
    count = offered.prediction if guided else offered.execution
    rows = chunk.actions[:count]
    if rows.shape != (count, *offered.action.shape):
        raise RemoteError(
            "execution",
            f"actions: expected {count} actions of {offered.action.shape[0]} values, got {list(rows.shape)}",
        )
    # The robot later returns the actions that it has not executed, in both forms. Both forms are in robot units
    # here. The policy normalises the returned actions again, with the state of the new frame.
    return "action", body | {
        "canonical_actions": rows,
        "model_actions": rows if guided else None,
        "execution_steps": count,
    }
