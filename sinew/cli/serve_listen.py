"""Flags of ``sinew serve`` and ``sinew fleet`` for the network: addresses, keys, encryption and logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from sinew_client.addresses import split_scheme
from sinew_client.auth import key_from_environment, keys_in
from sinew_client.tls import ALLOW_VARIABLE

from sinew.cli import terminal
from sinew.cli.options import Flag, PositiveIfAny, Texts
from sinew.core import MAX_SIZE, SinewError, hints
from sinew.serve.process import connections_within, raise_descriptor_limit, tell_of_crashes
from sinew.serve.renewed import Keys, ReloadedFile
from sinew.serve.transport.listen import Listen, RemoteSettings
from sinew.serve.wire import Listener
from sinew.serve.wires import parse, servers

logger = logging.getLogger(__name__)


@Parameter(name="*", group="Network")
@dataclass(frozen=True)
class Listening:
    """The addresses on which a server listens, and the clients that it accepts.

    Args:
        wire: Client protocol, as NAME or NAME:PORT. Repeatable. Protocols: native (5555), openpi (8000), evo1
            (9000), vla-eval (8000), http (8000), groot (5555), lerobot (8080), lerobot-remote (7447).
            Default: native and openpi. Port 0 takes a free one. native:ipc:///PATH listens on a Unix socket
            for robots of the same user.
        host: Address to listen on. Any address other than loopback is reachable from other machines.
        deadline_ms: The server rejects requests that would begin later than this after their arrival, in
            milliseconds.
        api_key_file: File with one or several keys, one per line. A role may precede a key: robot:KEY,
            metrics:KEY, admin:KEY. Default: SINEW_API_KEY in the environment.
        tls_cert: PEM file with the certificate. It encrypts native (tls://HOST:PORT), openpi, http, lerobot
            and lerobot-remote.
        tls_key: PEM file with the private key.
        allow_host: Further name of this server, for browsers that open its page. Repeatable.
        access_log: File for one JSON line per request. - writes to standard error.
        verbose: Log more, and print the complete reason for the engine.
    """

    wire: Texts = ()
    host: str = "127.0.0.1"
    deadline_ms: PositiveIfAny = None
    api_key_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allow_host: Texts = ()
    access_log: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None
    verbose: Flag = False

    def prepared(
        self, dashboard: Literal["auto", "on", "off"] = "auto", **bounds: Any
    ) -> tuple[dict[str, int | str], Listen, Keys]:
        """Return the ports by protocol, the settings of the listeners, and the required key.

        The method runs before the policy is loaded. It also raises the process's limit of file descriptors.

        Args:
            dashboard: "on", "off" or "auto", which shows the dashboard only on loopback or with a key.
            **bounds: Further settings of :class:`Listen`.

        Raises:
            SinewError: A file is not usable.
        """
        raise_descriptor_limit()
        tell_of_crashes()
        ports = parse(self.wire)
        most = connections_within(bounds.pop("max_connections", Listen().max_connections), servers(ports))
        listen = Listen(
            host=self.host, max_connections=most, tls_cert=self.tls_cert, tls_key=self.tls_key,
            hosts=self.allow_host, **bounds,
        )  # fmt: skip
        listen.tls()
        file = self.api_key_file
        key: Keys = key_from_environment() if file is None else ReloadedFile([file], partial(keys_in, file))
        # Without this rule, anybody who can connect from another machine could see the robot's camera frames.
        shown = dashboard == "on" or (dashboard == "auto" and (listen.is_loopback or bool(key)))
        return ports, replace(listen, dashboard=shown), key


LISTENING = Listening()


@Parameter(name="*", group="LeRobot's remote inference")
@dataclass(frozen=True)
class Remote:
    """Settings of the protocol lerobot-remote. LeRobot's robots compare them with their own settings.

    Args:
        deployment: Name under which LeRobot's robots find the policy (--inference.deployment). Default: the
            policy's name.
        semantics: Name of the units of state and action (--inference.semantics). Each robot has to repeat it.
            Default: the units of the bundle.
        camera_size: Size of a camera's frames, as CAMERA=WIDTHxHEIGHT, if it differs from the training data.
            The policy resizes the frames. Repeatable.
        router: Zenoh router to connect to, as tls/HOST:7447. Default: listen for robots.
        zenoh_config: JSON5 file with further settings of Zenoh, for example certificates for the router.
    """

    deployment: str = ""
    semantics: str = ""
    camera_size: Texts = ()
    router: str = ""
    zenoh_config: Path | None = None

    def settings(self) -> RemoteSettings:
        """Return these options as the settings of the protocol. Raises :class:`SinewError` for an invalid size."""
        sizes = []
        for camera, size in hints.pairs("--camera-size", "CAMERA=WIDTHxHEIGHT", self.camera_size).items():
            width, _, height = size.partition("x")
            pixels = [int(each) if each.isdecimal() and len(each) < 6 else 0 for each in (height, width)]
            if not all(1 <= each <= MAX_SIZE for each in pixels):
                raise SinewError(
                    f"--camera-size {camera}: expected WIDTHxHEIGHT, such as 640x480, got {size!r}"
                )
            sizes.append((camera, (pixels[0], pixels[1])))
        return RemoteSettings(self.deployment, self.semantics, tuple(sizes), self.router, self.zenoh_config)


REMOTE = Remote()


def warn_of_exposure(host: str, wires: Sequence[Listener], key: bool, tls: bool) -> None:
    wires = [wire for wire in wires if split_scheme(wire.address)[0] != "ipc"]
    if wires and not key:
        logger.warning(
            "%s is reachable from other machines, and requests are not authenticated; set a key with --api-key-file",
            host,
        )
    plain = [wire.name for wire in wires if not tls or split_scheme(wire.address)[0] == "tcp"]
    if plain:
        choices = "a tunnel" if tls else "--tls-cert and --tls-key, or a tunnel"
        logger.warning(
            "frames, actions and keys travel unencrypted on %s; use %s, or only a network that you trust",
            ", ".join(plain),
            choices,
        )
    if key and "native" in plain:
        logger.warning(
            "native: clients on other machines reject this port, because they would send the key unencrypted;"
            " to allow it, set %s=1 in their environment",
            ALLOW_VARIABLE,
        )


def set_up_logs(verbose: bool) -> None:
    terminal.log(
        logging.DEBUG if verbose else logging.INFO, "%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in ("aiohttp.access", "grpc._cython.cygrpc", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
