"""A server in this process with a policy whose instruction selects its behaviour, for tests of the server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from sinew_client import protocol

from sinew.core import (
    ActionChunk,
    CameraSpec,
    CancelledError,
    Observation,
    ObservationError,
    PolicySpec,
    VectorSpec,
)
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.device_lock import DeviceLock
from sinew.serve.job import ServingJob
from sinew.serve.policies import Deployment, Policies
from sinew.serve.request import Outcome, Request
from sinew.serve.scheduler import Scheduler
from sinew.serve.served import ServedPolicy
from sinew.serve.service import Service
from sinew.serve.supervise import Supervisor
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires

WAIT_S = 60.0  # seconds to wait; no test depends on the speed of the machine
SPEC = PolicySpec(
    architecture="puppet",
    name="puppet",
    cameras=(CameraSpec("front", 48, 64),),
    state=VectorSpec(2, ("a", "b")),
    action=VectorSpec(2),
    chunk_size=3,
    noise_dim=2,
    solver_steps=1,
    max_prompt_tokens=16,
)
FRAME = np.zeros((48, 64, 3), np.uint8)
GOOD = {"images": {"front": FRAME}, "state": np.zeros(2), "prompt": "go"}


class Panic(BaseException):
    """An exception that ``except Exception`` does not catch."""


class Puppet(ServedPolicy):
    """A policy whose instruction selects its behaviour.

    The instruction "wait" waits until ``release`` or until it is cancelled. "hang" waits until ``release``. "fail",
    "panic", "exit" and "memory" raise exceptions. For any other instruction, each value of each action is the first
    number of the state.
    """

    spec = SPEC

    def __init__(self) -> None:
        self.release = threading.Event()
        self.computed: list[str] = []
        self.warm_ups = 0
        self.sick: BaseException | None = None  # every method raises this exception

    def warm_up(self) -> None:
        self.warm_ups += 1
        if self.sick is not None:
            raise self.sick

    def prepare(self, observation: Observation) -> Observation:
        shape = np.shape(observation.state)
        if shape != (self.spec.state.dim,):  # the message is that of sinew.processing
            raise ObservationError("state", f"shape [{self.spec.state.dim}]", f"shape {list(shape)}")
        return observation

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        prompt = observation.prompt
        if self.sick is not None:
            raise self.sick
        if prompt in ("wait", "hang"):
            while not self.release.wait(0.002):
                if prompt == "wait" and cancel is not None and cancel.is_set():
                    raise CancelledError("between two stages")
        failures = {"fail": RuntimeError, "panic": Panic, "exit": SystemExit, "memory": MemoryError}
        if prompt in failures:
            raise failures[prompt]("secret detail")
        self.computed.append(prompt)
        actions = np.full((3, 2), np.asarray(observation.state)[0], np.float32)
        return ActionChunk(
            actions, seed=0, session=observation.session, warnings=("it is dark",) if prompt == "dark" else ()
        )


@contextlib.contextmanager
def desk(
    wires: Sequence[str] = ("native",),
    *,
    listen: Listen | None = None,
    queue: int = 64,
    stuck_s: float = 60.0,
    policy: Any = None,
    safety: Any = None,
    manifest: Any = None,
    padded_state_dim: int = 2,
    padded_action_dim: int = 2,
    device_lock: DeviceLock | None = None,
    **options: Any,
) -> Iterator[SimpleNamespace]:
    """Run a server.

    Args:
        wires: Names of protocols, or "web" for openpi and http on one port.
        listen: Settings of the sockets.
        queue: Length of the queue.
        stuck_s: Seconds after which an inference counts as stuck.
        policy: A policy instead of the puppet.

    Yields:
        The puppet, the service, the scheduler and the address of each protocol.
    """
    puppet = policy or Puppet()
    scheduler = Scheduler(puppet, queue_size=queue, supervisor=Supervisor(stuck_s), device_lock=device_lock)
    scheduler.start()
    about = {"policy": puppet.spec.to_dict(), "server": {}}
    dims = padded_state_dim, padded_action_dim
    service = Service(Deployment(scheduler, puppet.spec, about, safety, *dims, manifest=manifest), **options)
    opened: dict[str, Any] = {}
    for name in wires:
        names = ("openpi", "http") if name == "web" else (name,)
        (opened[name],) = open_wires(dict.fromkeys(names, listen.port if listen else 0), listen or Listen())
    for wire in opened.values():
        wire.start(service)
    found = {name: wire.address for name, wire in opened.items()}
    try:
        yield SimpleNamespace(puppet=puppet, service=service, scheduler=scheduler, opened=opened, **found)
    finally:
        if policy is None:
            puppet.release.set()
        service.stopping()
        scheduler.stop()
        assert scheduler.join(WAIT_S)
        for wire in opened.values():
            wire.stop()


def lone(spec: PolicySpec, state_dim: int, action_dim: int, policy: Any = None, safety: Any = None) -> Any:
    """Return a service with one policy that computes nothing, for codecs. state_dim, action_dim: padded sizes."""
    scheduler: Any = SimpleNamespace(policy=policy, device_lock=None)
    deployment = Deployment(scheduler, spec, {}, safety, state_dim, action_dim)
    return SimpleNamespace(
        spec=spec,
        supervisor=SimpleNamespace(thread=lambda _name, _run: threading.current_thread()),  # no thread runs
        policies=Policies(deployment),
        check_session=lambda _name: None,
        keeps_frames=lambda _deployment: False,
        uses=set(),
    )


def enqueue(
    scheduler: Scheduler,
    decode: Callable[[PixelBudget], Observation],
    on_done: Callable[[Outcome], None],
    *,
    client: Hashable | None = None,
    session: str = "",
    deadline: float | None = None,
) -> ServingJob:
    """Pass a request to a scheduler without a protocol."""
    return scheduler.submit(
        ServingJob(Request("", decode, session=session, connection=client), deadline), on_done
    )


def until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end, f"the time limit ended while the test waited for {what}"
        time.sleep(0.005)
    return found


def connect(address: str) -> socket.socket:
    """Open a plain TCP connection to a server."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0, size: int | None = None) -> bytes:
    """Return a ZMTP frame. ``size`` is the size in its header, if it differs from the real size."""
    size = len(body) if size is None else size
    head = bytes((flags, size)) if size < 256 else bytes((flags | 2,)) + size.to_bytes(8, "big")
    return head + body


def shake(address: str, kind: bytes = b"DEALER", identity: bytes = b"") -> socket.socket:
    """Make a ZMTP handshake without a ZeroMQ library."""
    peer = connect(address)
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    ready += b"\x08Identity" + len(identity).to_bytes(4, "big") + identity
    peer.sendall(GREETING + frame(ready, 4))
    received = b""
    while len(received) < 64 + 2 or len(received) < 66 + received[65]:
        part = peer.recv(4096)
        assert part, "the server closed the connection during the handshake"
        received += part
    assert received[:1] == b"\xff"
    assert b"READY" in received
    return peer


def request(number: int, prompt: str = "go", state: float = 0.0, **changes: Any) -> bytes:
    return protocol.encode_infer({**GOOD, "prompt": prompt, "state": [state, 0], **changes}, number)


def closed_by_server(peer: socket.socket) -> bool:
    """Read until the server closes the connection. Returns whether it did."""
    try:
        while peer.recv(1 << 16):
            pass
    except (ConnectionError, TimeoutError) as error:
        return not isinstance(error, TimeoutError)
    return True


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
