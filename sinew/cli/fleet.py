"""``sinew fleet``: serve policies on replicas of a Ray cluster, with the protocols of `sinew serve` (docs/ray.md)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sinew.cli import status
from sinew.cli.options import Count, Flag
from sinew.cli.serve import say
from sinew.cli.serve_listen import LISTENING, Listening, set_up_logs, warn_of_exposure
from sinew.core import hints
from sinew.serve.access_log import access_logging
from sinew.serve.process import HOPELESS, Process
from sinew.serve.supervise import Supervisor
from sinew.serve.transport.greeting import ready_text
from sinew.serve.wires import open_wires

if TYPE_CHECKING:
    from sinew.serve.fleet.cluster import Fleet
    from sinew.serve.renewed import Keys
    from sinew.serve.service import Service

logger = logging.getLogger(__name__)


def up(config: Path, /, *, attach: Flag = False, on: Listening = LISTENING, queue: Count = 64) -> int:
    """Start the replicas of a configuration and answer robots with them, until SIGINT or SIGTERM.

    For robots, the fleet is one server like that of `sinew serve`. If a replica dies, Sinew starts another one and
    sends the request again. The exit status is 3 if requests failed by internal errors, and 70 if the fleet could
    no longer answer.

    Args:
        config: YAML file that lists policies by name, each with a source and a number of replicas.
        attach: Use replicas that already run (a RayService), and leave them running at the end.
        queue: Maximum number of requests of one policy that wait for a replica. One client may have two of
            them.
    """
    from sinew.serve.fleet.cluster import Fleet
    from sinew.serve.fleet.config import read

    set_up_logs(on.verbose)
    configuration = read(config)
    ports, listen, api_key = on.prepared()
    replicas = Fleet(configuration, Supervisor(0), attach, queue)
    process = Process(open_wires(ports, listen))
    failed: list[str] = []
    try:
        if not listen.is_loopback:
            warn_of_exposure(on.host, process.wires, bool(api_key), on.tls_cert is not None)
        with access_logging(on.access_log), process.signals():
            failed = _answer(process, replicas, api_key, on.deadline_ms)
    except KeyboardInterrupt:
        logger.info("stopped before the fleet was ready")
    finally:
        process.close()
        replicas.stop()
    code = status.ended(failed)
    return code if process.hopeless is None else HOPELESS


def _answer(process: Process, replicas: Fleet, api_key: Keys, deadline_ms: float | None) -> list[str]:
    """Answer the requests of clients until a signal ends the process. Return the internal failures, one sentence
    each.
    """
    from sinew.serve.service import Service

    first, *others = replicas.start().items()
    service = Service(first[1], api_key=api_key, deadline_ms=deadline_ms)
    for name, other in others:
        service.policies.put(name, other)
    replicas.bind(service)
    more = {name: replicas.config.policies[name].source for name, _ in others}
    text = ready_text(
        replicas.first.spec, replicas.first.describe(), tuple(process.wires), more, bool(api_key)
    )
    # Set the signal handlers again, because Ray has replaced them.
    with process.signals(), hints.read_by("client"):
        process.run(service, lambda: say(text))
    return internal(service)


def internal(service: Service) -> list[str]:
    """Return a sentence with the number of requests that failed by internal errors; [] if there are none."""
    service.metrics.count()
    count = service.metrics.outcomes["internal"]
    return [f"{count} requests failed by internal errors; the log has the details"] if count else []
