"""Every cut of a policy over a robot's machine and a server: which stage runs where, over which network."""

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
CALLED = {"vision": "vision", "prefix": "language", "head": "action"}


@dataclass(frozen=True, slots=True)
class Cut:
    """places: "robot" or "server" for each stage of ``STAGES``; server: None where the robot has all. Milliseconds on
    each and between them; up, down: bytes. refused: why the memory does not hold it, else empty."""

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
        """Milliseconds from an observation to its actions at the robot."""
        return self.robot_ms + self.server_ms + self.network_ms

    @property
    def network(self) -> str:
        """Return the route's links in words, empty where there is none."""
        return " + ".join(link.title for link in self.route)

    @property
    def where(self) -> str:
        """Say which stages run where, as "action on the robot, vision and language on H200 over WiFi 7"."""
        said = []
        for place in (ROBOT, SERVER):
            here = [CALLED[stage] for stage, at in zip(STAGES, self.places, strict=True) if at == place]
            title = (
                f"{self.server.title} over {self.network}" if self.server and place == SERVER else "the robot"
            )
            if here:
                said.append(f"{'all' if len(here) == len(STAGES) else ' and '.join(here)} on {title}")
        return ", ".join(said)

    def record(self) -> dict[str, Any]:
        """Return it, ready for JSON."""
        names = [link.name for link in self.route]
        where = dict(zip(CALLED.values(), self.places, strict=True))
        at = {"server": self.server.name if self.server else None, "network": names}
        ms = {name: getattr(self, name) for name in ("latency_ms", "robot_ms", "server_ms", "network_ms")}
        return where | at | ms | {"up_bytes": self.up, "down_bytes": self.down, "refused": self.refused}

    def against(self, best: Cut) -> str:
        """Return the differences to ``best``, for people."""
        parts = {
            name: getattr(self, f"{name}_ms") - getattr(best, f"{name}_ms")
            for name in (ROBOT, SERVER, "network")
        }
        shown = ", ".join(f"{name} {ms:+.1f}" for name, ms in parts.items() if abs(ms) >= 0.05)
        return f"{self.latency_ms - best.latency_ms:.1f} ms more" + (f" ({shown})" if shown else "")


def crossing(program: PublishedProgram) -> dict[tuple[str, str], int]:
    """Return the bytes of what one stage makes and a later one reads, by (maker, reader): whole blocks of memory, the
    prefix's keys and values in the format that the program keeps them in."""
    scale = cache_scale(program)
    found = {}
    for number, maker in enumerate(STAGES):
        for reader in STAGES[number + 1 :]:
            read = dict.fromkeys(
                o.block for call in program.trace.of(reader) for o in call.operands if not o.written
            )
            blocks = [block for block in read if block.maker is not None and block.maker.stage == maker]
            found[maker, reader] = sum(round(b.nbytes * (scale if b.kind == "cache" else 1)) for b in blocks)
    return found


def all_cuts(
    program: PublishedProgram,
    near: Hardware,
    servers: Sequence[Hardware],
    routes: Sequence[Sequence[Network]],
    size: Payload,
    traffic: Traffic = "fused",
) -> list[Cut]:
    """Return all cuts of a program's stages over ``near``, the robot's, and each of the servers behind each of the
    routes: what fits first, the quickest before the others.

    size: bytes of an observation on its way up and of a chunk on its way down. A message takes a route as of
    :func:`sinew_perf.scenarios.synchronous_s`; frames go up where vision is on the server, what a stage reads of
    earlier ones goes where it runs, once. A stage without operators stays with its neighbour. The
    state is counted with the frames. traffic: on the robot's machine; a server fuses.
    """
    parts, between = program.components(), crossing(program)
    nearby = program.components(traffic)
    idle = [not part.operators for part in parts]
    here = [1e3 * timing(part, near).seconds for part in nearby]
    found = []
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
            found.append(Cut(places, server, tuple(route), robot_ms, there, ms, up, down, refused))
    return sorted(found, key=lambda cut: (bool(cut.refused), cut.latency_ms))


def _messages(
    places: Sequence[str], between: dict[tuple[str, str], int], size: Payload
) -> list[tuple[str, float]]:
    """Return (where to, bytes) of each message, in order: the robot has the frames and wants the actions."""
    messages: list[tuple[str, float]] = []
    at, held = ROBOT, {stage: {place} for stage, place in zip(STAGES, places, strict=True)}
    for number, (stage, place) in enumerate(zip(STAGES, places, strict=True)):
        nbytes = size.up if number == 0 and place == SERVER else 0.0
        for maker in STAGES[:number]:
            if place not in held[maker]:
                nbytes += between[maker, stage]
                held[maker].add(place)
        if nbytes or place != at:
            messages.append((place, nbytes))
        at = place
    return messages if at == ROBOT else [*messages, (ROBOT, size.down)]
