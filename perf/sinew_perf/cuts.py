"""All ways to divide the stages of a policy between a robot's machine and a server, over several networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from sinew_perf.hardware import Hardware, Network
from sinew_perf.memory import cache_scale, missing, too_large
from sinew_perf.program import PublishedProgram, Traffic
from sinew_perf.roofline import timing
from sinew_perf.scenarios import Payload
from sinew_perf.trace import STAGES

ROBOT, SERVER = "robot", "server"
STAGE_NAMES = {"vision": "vision", "prefix": "language", "head": "action"}


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to divide the stages of a policy between the robot and a server.

    Attributes:
        places: "robot" or "server" for each stage of ``STAGES``.
        server: The server. None if the robot runs all stages.
        route: Links between robot and server.
        robot_ms: Computing time on the robot, in milliseconds.
        server_ms: Computing time on the server, in milliseconds.
        network_ms: Time of all messages, in milliseconds.
        up: Bytes from the robot to the server.
        down: Bytes from the server to the robot.
        refused: Why the memory of a machine is too small. "" if it fits.
    """

    places: tuple[str, ...]
    server: Hardware | None
    route: tuple[Network, ...]
    robot_ms: float
    server_ms: float
    network_ms: float
    up: float
    down: float
    refused: str = ""

    @property
    def latency_ms(self) -> float:
        """Return the milliseconds from an observation to its actions at the robot."""
        return self.robot_ms + self.server_ms + self.network_ms

    @property
    def network(self) -> str:
        """Return a text with the titles of the network links on the route. "" if there are none."""
        return " + ".join(link.title for link in self.route)

    @property
    def where(self) -> str:
        """Return a text such as "action on the robot, vision and language on H200 over WiFi 7"."""
        texts = []
        for place in (ROBOT, SERVER):
            here = [STAGE_NAMES[stage] for stage, at in zip(STAGES, self.places, strict=True) if at == place]
            title = (
                f"{self.server.title} over {self.network}" if self.server and place == SERVER else "the robot"
            )
            if here:
                texts.append(f"{'all' if len(here) == len(STAGES) else ' and '.join(here)} on {title}")
        return ", ".join(texts)

    def record(self) -> dict[str, Any]:
        """Return this division of the stages, ready for JSON."""
        names = [link.name for link in self.route]
        where = dict(zip(STAGE_NAMES.values(), self.places, strict=True))
        at = {"server": self.server.name if self.server else None, "network": names}
        ms = {name: getattr(self, name) for name in ("latency_ms", "robot_ms", "server_ms", "network_ms")}
        return where | at | ms | {"up_bytes": self.up, "down_bytes": self.down, "refused": self.refused}

    def against(self, best: Cut) -> str:
        """Return a text that states how this division differs from ``best`` in milliseconds."""
        parts = {
            name: getattr(self, f"{name}_ms") - getattr(best, f"{name}_ms")
            for name in (ROBOT, SERVER, "network")
        }
        shown = ", ".join(f"{name} {ms:+.1f}" for name, ms in parts.items() if abs(ms) >= 0.05)
        return f"{self.latency_ms - best.latency_ms:.1f} ms more" + (f" ({shown})" if shown else "")


def crossing(program: PublishedProgram) -> dict[tuple[str, str], int]:
    """Count the bytes that later stages read from earlier stages.

    Args:
        program: The program.

    Returns:
        A dict. The key is (stage that writes, stage that reads), and the value is the number of bytes of whole memory
        blocks. The prefix's keys and values count in the program's format of the cache.
    """
    scale = cache_scale(program)
    sizes = {}
    for number, maker in enumerate(STAGES):
        for reader in STAGES[number + 1 :]:
            read = dict.fromkeys(
                o.block for call in program.trace.of(reader) for o in call.operands if not o.written
            )
            blocks = [block for block in read if block.maker is not None and block.maker.stage == maker]
            sizes[maker, reader] = sum(round(b.nbytes * (scale if b.kind == "cache" else 1)) for b in blocks)
    return sizes


def all_cuts(
    program: PublishedProgram,
    near: Hardware,
    servers: Sequence[Hardware],
    routes: Sequence[Sequence[Network]],
    size: Payload,
    traffic: Traffic = "fused",
) -> list[Cut]:
    """Compute all ways to divide a program's stages between the robot and a server.

    Camera frames are sent if vision runs on the server, together with the state. Data that a stage reads from earlier
    stages is sent once to the machine of this stage. A stage without operators stays with its neighbour. The time of
    a message is that of :func:`sinew_perf.scenarios.synchronous_s`.

    Args:
        program: The program.
        near: Machine on the robot.
        servers: Possible servers.
        routes: Possible routes to a server.
        size: Bytes of an observation and of a chunk.
        traffic: Memory traffic on the robot's machine. A server fuses its operators.

    Returns:
        The cuts. The cuts that fit the memory come first, and among these the fastest.
    """
    parts, between = program.components(), crossing(program)
    nearby = program.components(traffic)
    idle = [not part.operators for part in parts]
    here = [1e3 * timing(part, near).seconds for part in nearby]
    cuts = []
    for places in product((ROBOT, SERVER), repeat=len(STAGES)):
        if any(empty and places[n] != places[n - 1 if n else 1] for n, empty in enumerate(idle)):
            continue
        on = {
            at: [stage for stage, place in zip(STAGES, places, strict=True) if place == at]
            for at in (ROBOT, SERVER)
        }
        robot_ms = sum(ms for ms, place in zip(here, places, strict=True) if place == ROBOT)
        messages = _messages(places, between, size)
        up, down = (sum(nbytes for way, nbytes in messages if way == to) for to in (SERVER, ROBOT))
        for server, route in product(servers, routes) if on[SERVER] else [(None, ())]:
            there = 0.0
            short = [(ROBOT, missing(program, near, on[ROBOT]))] if on[ROBOT] else []
            if server is not None:
                there = sum(1e3 * timing(part, server).seconds for part in parts if part.name in on[SERVER])
                short.append((server.title, missing(program, server, on[SERVER])))
            refused = "; ".join(f"the {name} {too_large(nbytes)}" for name, nbytes in short if nbytes)
            ms = 1e3 * sum(
                link.base_ms / 1e3 + (link.up_s if way == SERVER else link.down_s)(nbytes)
                for way, nbytes in messages
                for link in route
            )
            cuts.append(Cut(places, server, tuple(route), robot_ms, there, ms, up, down, refused))
    return sorted(cuts, key=lambda cut: (bool(cut.refused), cut.latency_ms))


def _messages(
    places: Sequence[str], between: dict[tuple[str, str], int], size: Payload
) -> list[tuple[str, float]]:
    """List the messages of a cut in their order. The robot has the frames and needs the actions.

    Args:
        places: Machine of each stage.
        between: Number of bytes that a later stage reads from an earlier stage. The key is (earlier stage, later
            stage).
        size: Bytes of an observation and of a chunk.

    Returns:
        (destination, bytes) of each message.
    """
    messages: list[tuple[str, float]] = []
    at, places_of = ROBOT, {stage: {place} for stage, place in zip(STAGES, places, strict=True)}
    for number, (stage, place) in enumerate(zip(STAGES, places, strict=True)):
        nbytes = size.up if number == 0 and place == SERVER else 0.0
        for maker in STAGES[:number]:
            if place not in places_of[maker]:
                nbytes += between[maker, stage]
                places_of[maker].add(place)
        if nbytes or place != at:
            messages.append((place, nbytes))
        at = place
    return messages if at == ROBOT else [*messages, (ROBOT, size.down)]
