"""``sinew fleet``: policies on replicas of a Ray cluster, behind the wires of one process (docs/fleet.md)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter, validators

from sinew import hints
from sinew.auth import api_key_of
from sinew.cli import status
from sinew.cli.serve import access_logging, ready_text, say, set_up_logs, warn_of_exposure
from sinew.serve.process import HOPELESS, Process, connections_within, raise_descriptor_limit, tell_of_crashes
from sinew.serve.supervise import Supervisor
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires, parse, servers

if TYPE_CHECKING:
    from sinew.serve.fleet.cluster import Fleet
    from sinew.serve.service import Service

logger = logging.getLogger(__name__)

fleet = App(name="fleet", help="Serve policies on replicas of a Ray cluster.", version_flags=[])


@fleet.command
def up(
    config: Path,
    /,
    *,
    attach: Annotated[bool, Parameter(negative="")] = False,
    wire: Annotated[list[str] | None, Parameter(negative="")] = None,
    host: str = "127.0.0.1",
    queue: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 64,
    deadline_ms: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    api_key_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    access_log: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    allow_host: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    verbose: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Start the replicas of a configuration and answer robots with them, until SIGINT or SIGTERM.

    Robots see one server, as of `sinew serve`. A replica that dies is replaced, and its request is sent to another.
    Exit status 3: requests failed by internal errors; 70: it could not answer any more.

    Args:
        config: a YAML file: policies by name, each with a source and a number of replicas (docs/fleet.md).
        attach: the replicas run already (a RayService): change nothing of them, and leave them when this ends.
        wire: as of `sinew serve`.
        host: address to listen on; anything but loopback is open to every machine that can reach it.
        queue: requests of one policy that may wait for a replica, of one client two of them.
        deadline_ms: refuse requests that would begin later than this after their arrival.
        api_key_file: a file with the key that clients must send; SINEW_API_KEY in the environment if absent.
        tls_cert: PEM file; encrypts openpi, http and lerobot.
        tls_key: PEM file.
        access_log: file for one JSON line per request, or - for standard error.
        allow_host: as of `sinew serve`.
        verbose: log more.
    """
    from sinew.serve.fleet.cluster import Fleet
    from sinew.serve.fleet.config import read

    set_up_logs(verbose)
    found, api_key = read(config), api_key_of(api_key_file)
    raise_descriptor_limit()
    tell_of_crashes()
    ports = parse(wire or ())
    most = connections_within(Listen().max_connections, servers(ports))
    listen = Listen(host=host, max_connections=most, tls_cert=tls_cert, tls_key=tls_key, hosts=allow_host)
    listen.tls()  # refuses unusable files before anything is loaded
    listen = replace(listen, dashboard=listen.is_loopback or bool(api_key))
    replicas = Fleet(found, Supervisor(0), attach, queue)
    process = Process(open_wires(ports, listen))
    failed: list[str] = []
    try:
        if not listen.is_loopback:
            warn_of_exposure(host, process.wires, bool(api_key), tls_cert is not None)
        with access_logging(access_log), process.signals():
            failed = _answer(process, replicas, api_key, deadline_ms)
    except KeyboardInterrupt:
        logger.info("stopped before the fleet was ready")
    finally:
        process.close()
        replicas.stop()
    code = status.ended(failed)
    return code if process.hopeless is None else HOPELESS


def _answer(process: Process, replicas: Fleet, api_key: str, deadline_ms: float | None) -> list[str]:
    """Answer until the end; return what failed inside, a sentence each."""
    from sinew.serve.service import Service

    first, *others = replicas.start().items()
    service = Service(first[1], api_key=api_key, deadline_ms=deadline_ms)
    for name, other in others:
        service.policies.put(name, other)
    replicas.bind(service)
    more = {name: replicas.config.policies[name].source for name, _ in others}
    text = ready_text(replicas.first, tuple(process.wires), more)
    with process.signals(), hints.read_by("client"):  # Ray has taken the signals
        process.run(service, lambda: say(text))
    return internal(service)


def internal(service: Service) -> list[str]:
    """Return how many requests failed by errors of this program or of a policy, in a sentence; none where none did."""
    service.metrics.count()
    count = service.metrics.outcomes["internal"]
    return [f"{count} requests failed by internal errors; the log has the details"] if count else []
