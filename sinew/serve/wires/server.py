"""A server inside your own program, for a loaded policy or an object of your own class, with the protocols of ``sinew
serve``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.policy import Policy

from sinew import __version__
from sinew.core import ActionChunk, Observation, ObservationError, SinewError
from sinew.policy import Policy as Computed
from sinew.policy import load
from sinew.serve.deploy import PolicyHost, deploy
from sinew.serve.limits import ServingLimits
from sinew.serve.policies import Deployment
from sinew.serve.process import GRACE_S, TEND_S
from sinew.serve.served import ServedPolicy
from sinew.serve.service import Service
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires, parse

logger = logging.getLogger(__name__)


class OwnPolicy(ServedPolicy):
    """Wraps a policy of your own class for a scheduler. The policy computes one observation at a time, always on the
    same thread.
    """

    def __init__(self, policy: Policy):
        self._policy, self.spec = policy, policy.spec

    def warm_up(self) -> None:
        """Do nothing, because an unknown class has no known warm-up."""

    def prepare(self, observation: Observation) -> Observation:
        """Check an observation and return it.

        Raises:
            ObservationError: The state has another length than the policy's, or the cameras differ.
        """
        state, cameras = observation.state, {camera.name for camera in self.spec.cameras}
        if state.shape != (self.spec.state.dim,):
            raise ObservationError("state", f"shape [{self.spec.state.dim}]", f"shape {list(state.shape)}")
        if other := set(observation.images) ^ cameras:
            expected, got = (", ".join(sorted(names)) or "none" for names in (cameras, observation.images))
            raise ObservationError(f"images.{min(other)}", f"the cameras {expected}", got)
        return observation

    def run(self, prepared: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        """Call the user's policy, check its actions, and return them as a chunk.

        Raises:
            SinewError: The policy has failed, or its actions have a wrong shape or are not finite.
        """
        chunk = self._policy.infer(prepared)
        actions, width = np.asarray(chunk.actions, np.float32), self.spec.action.dim
        if actions.ndim != 2 or actions.shape[1] != width or not np.isfinite(actions).all():
            what = f"a finite array [H, {width}]"
            raise SinewError(
                f"actions: the policy must return {what}, but returned shape {list(actions.shape)} or NaN"
            )
        return replace(chunk, actions=actions, session=prepared.session, time=prepared.time)

    def reset(self, session: str) -> None:
        self._policy.reset(session)


class Server:
    """Serves a policy to robots, on threads of this process, until :meth:`close`. The server is a context manager.

    Args:
        policy: A policy of :func:`sinew.load`, or an object with ``spec``, ``infer`` and ``reset``
            (:class:`sinew_client.policy.Policy`). The policy stays open, and you may use it while the server runs.
            A path or name that :func:`sinew.load` accepts is opened here and closed at the end.
        wires: Protocols, as for ``sinew serve --wire``: "native", "openpi:9000" ... Port 0 picks a free one. ()
            serves native and openpi.
        host: An address of this machine. By default the server is reachable from this machine only.
        api_key: Key that clients must send; "" for none.
        limits: Bounds of queues, connections and memory.
        **options: Options of :func:`sinew.load`, for a path or name.

    Attributes:
        addresses: Protocol -> address.

    Raises:
        SinewError: A protocol is unknown, or an address is in use.

    Example:
        >>> with sinew.serve("blocks", ["native:5555"]) as server:
        ...     server.wait()
    """

    def __init__(
        self,
        policy: Policy | str | Path,
        wires: Sequence[str] = (),
        *,
        host: str = "127.0.0.1",
        api_key: str = "",
        limits: ServingLimits = ServingLimits(),  # noqa: B008 - it is frozen
        **options: Any,
    ):
        if options and not isinstance(policy, str | Path):
            raise SinewError(
                f"{next(iter(options))}: this option needs a path or a name, and the policy is open already; pass the"
                " option to sinew.load"
            )
        listen = Listen(host)
        # Show the dashboard only on this machine or with a key, because it shows the robot's cameras.
        shown = listen.is_loopback or bool(api_key)
        if not shown:
            logger.warning(
                "%s is reachable from other machines, and requests are not authenticated; pass api_key", host
            )
        self._wires = open_wires(parse(wires), Listen(host, dashboard=shown))
        self._ended, self._opened = threading.Event(), ExitStack()
        try:
            if isinstance(policy, str | Path):
                policy = self._opened.enter_context(load(policy, **options))
            deployment = self._deployed(policy, limits)
        except BaseException:
            self._stop_wires()
            raise
        self._scheduler, self._service = deployment.scheduler, Service(deployment, api_key=api_key)
        try:
            for wire in self._wires:
                wire.start(self._service)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._tend, name="sinew-tend", daemon=True).start()
        self.addresses = {name: wire.address for wire in self._wires for name in wire.name.split(" and ")}

    def _deployed(self, policy: Policy, limits: ServingLimits) -> Deployment:
        if isinstance(policy, Computed):
            return deploy(policy, limits)
        spec = policy.spec
        scheduler = PolicyHost().start(OwnPolicy(policy), limits.queue)
        about = {"server": {"name": "sinew", "version": __version__}, "policy": spec.to_dict()}
        return Deployment(scheduler, spec, about, None, spec.state.dim, spec.action.dim)

    def _tend(self) -> None:
        while not self._ended.wait(TEND_S):
            self._service.tend()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until another thread closes the server. Ctrl-C raises KeyboardInterrupt.

        Args:
            seconds: Longest wait; None for no limit.

        Returns:
            True if the server was closed.
        """
        return self._ended.wait(seconds)

    def close(self) -> None:
        """Reject new requests, cancel the running inference between two stages, and free the ports. A second call has
        no effect.
        """
        if self._ended.is_set():
            return
        self._service.stopping()
        self._scheduler.stop()
        if not self._scheduler.join(GRACE_S):
            self._scheduler.give_up()
        self._stop_wires()
        self._ended.set()

    def _stop_wires(self) -> None:
        for wire in self._wires:
            wire.stop()
        self._opened.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()
