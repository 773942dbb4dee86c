"""Complete control loops in simulated time, with faulty servers, clocks, sensors, leaders and hot-swaps, and a check.

A scenario is a number, which determines the settings and all events. The robot checks each command (the oracle). It
uses the commands that it received, the states that it reported, and the rules in ``docs/control.md``. It uses no code
of the controller. ``tests/control/test_promises.py`` plays a sample of scenarios. ``python -m benchmarks.promises``
plays any number of them.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sinew_client import Client, schema
from sinew_client.arm.assist import Assist, parse_assist
from sinew_client.arm.takeover import Takeover
from sinew_client.control import (
    Limits,
    Loop,
    NoCommand,
    NoObservation,
    Outcome,
    Pace,
    Refinement,
    Servers,
    Settings,
    ShadowListener,
    Stream,
)
from sinew_client.control.adapter_file import AdapterError
from sinew_client.control.motion import parse_motion
from sinew_client.control.requester import _failed
from sinew_client.control.robots import LeRobotArm, Pair
from sinew_client.errors import ClientError, ServerError
from sinew_client.faults import Faults
from sinew_client.streams import StreamWindow

HZ, DIM, STALE, DEADLINE, ALIGN = 20.0, 2, 0.25, 0.3, 0.1
PERIOD = 1.0 / HZ
STEPS = 25  # control steps of a scenario
# actions of a policy that does not fit the robot have about this size, and the robot must never execute them
FAR = 1000.0
SILENCE_S = 0.2
SLACK = 1e-5
KINDS = (
    "chunks", "streams", "split", "assist", "adapter", "take-over", "shadow", "both arms", "exchange"
)  # fmt: skip
SENSORS = (
    "missing", "not finite", "narrow", "old", "one old observation", "ahead", "frozen", "frozen without a time",
    "jumps", "false"
)  # fmt: skip
# With these sensor faults, the robot must not act on the state.
UNUSABLE = frozenset({"missing", "not finite", "old", "ahead"})
LYING = (
    "jumps",
    "false",
)  # these sensor faults cannot be detected, so the limits apply to the reported state
BAD: tuple[Callable[[], Any], ...] = (
    lambda: np.zeros((4, 1)),
    lambda: np.zeros((4, 7)),
    lambda: np.zeros((0, DIM)),
    lambda: np.full((4, DIM), np.nan),
    lambda: np.full((4, DIM), 1e300),
    lambda: np.full((4, DIM), 1j),
    lambda: [["a", "b"]],
    lambda: [[1, 2], [3]],
    lambda: None,
    lambda: np.zeros((5000, DIM), np.float32),
    lambda: RuntimeError("no"),
    lambda: ServerError("busy", "no"),
    lambda: ServerError("bad_observation", "no"),
)


class BrokenPromiseError(AssertionError):
    """A command breaks one of the rules. The message names the rule."""


class World:
    """The robot, its clock and its check of the commands.

    Attributes:
        position: Position of the robot.
        reports: States since the last command that the robot may act on.
    """

    concurrent_hold = False

    def __init__(self, seed: int, kind: str):
        rng = self.rng = random.Random(f"{kind} {seed}")
        self.kind, self.seed = kind, seed
        self.time, self.tick, self.number = 1000.0, 0, 0
        self.counts: Counter = Counter()
        motions = ["absolute", "relative", "offsets"]
        if kind in ("streams", "exchange", "split"):
            motions = ["absolute"]
        if kind == "both arms":
            motions = ["absolute"]
        self.motion = rng.choice(motions)
        self.scale = rng.choice([0.05, 0.1, 1.0]) if self.motion == "offsets" else 1.0
        self.limited = rng.random() < 0.75 and kind not in ("exchange", "split")
        self.limits, self.given = self._drawn(rng)
        self.sensor, self.until = "good", 0
        self.kept: dict[str, Any] = {}
        self.lie = np.zeros(DIM, np.float32)
        start = [rng.uniform(-0.9, 0.9) for _ in range(DIM)]
        self.position = np.float32(start)
        # The following attributes are the knowledge of the check.
        self.last: np.ndarray | None = (
            None  # last command, float64; None if the robot may have been moved since then
        )
        self.moved = [
            np.zeros(DIM)
        ]  # movement by the last command, with several values if its start is ambiguous
        # reported states since the last command, or since the robot may have been moved
        self.reports: list[np.ndarray] = []
        self.shown: np.ndarray | None = (
            None  # reported state in this control step, if the robot may act on it
        )
        self.usable = True  # False if the robot must not act on the state of this control step
        self.asks = True  # True if this observation may be sent to a server
        self.continuous = kind == "streams"
        # up to this control step, reported states may be false, so the check uses only the reported states
        self.lied = 0
        self.sent = 0  # commands and holds in this control step
        self.row: np.ndarray | None = None
        self.rows: list[np.ndarray | None] = []
        self.paused = self.driven = self.hand_back = False
        self.refuses = rng.random() < 0.1
        self.seen_since: list[int] = []

    def _drawn(self, rng: random.Random) -> tuple[Limits | None, dict[str, Any] | None]:
        if not self.limited:
            return None, None
        given: dict[str, Any] = {
            "low": -1.0,
            "high": 1.0,
            "when": rng.choice(["clip", "clip", "clip", "hold"]),
        }
        given["velocity"] = rng.choice([None, 0.4, 2.0, 20.0])
        given["acceleration"] = rng.choice([None, None, 2.0, 40.0])
        if self.kind != "streams" and rng.random() < 0.6:
            given |= {"workspace_low": -1.0, "workspace_high": 1.0}
        if self.motion == "offsets":
            given |= {"low": -2.0, "high": 2.0}
        return Limits.parse(given, DIM), given

    def motion_settings(self) -> dict[str, Any]:
        columns = {"action": list(range(DIM)), "state": list(range(DIM))}
        if self.motion == "absolute":
            return {"kind": "absolute"}
        more = {"scale": self.scale} if self.motion == "offsets" else {}
        return {"kind": self.motion, **columns, **more}

    # ------------------------------------------------------------------------- clock

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    # ------------------------------------------------------------------------- sensor

    def turn(self) -> None:
        """Change the sensor fault at random."""
        rng = self.rng
        if self.tick < self.until:
            return
        self.sensor = "good" if rng.random() < 0.6 else rng.choice(SENSORS)
        if self.sensor == "narrow" and self.kind == "both arms":
            self.sensor = (
                "good"  # the joints of both arms have names, so a state with too few values cannot occur
            )
        self.until = self.tick + rng.randint(1, 12)
        self.kept = {"images": {}, "state": self.position.copy(), "time": self.time}
        self.lie = np.float32([rng.uniform(-1, 1) for _ in range(DIM)])

    def observe(self) -> dict[str, Any]:
        kind, state = self.sensor, self.position.copy()
        seen: dict[str, Any] = {"images": {}, "time": self.time}
        self.counts[f"sensor: {kind}"] += 1
        usable = kind not in UNUSABLE
        self.asks = False
        if kind == "missing":
            self._show(None)
            raise NoObservation("front: no frame")
        if kind == "not finite":
            state[self.rng.randrange(DIM)] = self.rng.choice([np.nan, np.inf])
        elif kind == "narrow":
            state = self.rng.choice(
                [state[:1], state[:1], np.float32(0.5), state[None], np.zeros(0, np.float32)]
            )
            usable = state.ndim == 1 and (self.motion == "absolute")
        elif kind == "old":
            seen["time"] = self.time - 1.0
        elif kind == "one old observation":
            seen, state = dict(self.kept), self.kept["state"]
            usable = 0.0 <= self.time - seen["time"] <= STALE
        elif kind == "ahead":
            seen["time"] = self.time + 5.0
        elif kind.startswith("frozen"):
            state = self.kept["state"].copy()
            if kind != "frozen":
                del seen["time"]
        elif kind == "jumps":
            state = state + np.float32([self.rng.uniform(-1, 1) for _ in range(DIM)])
        elif kind == "false":
            state = state + self.lie
        if kind in LYING:
            self.lied = self.tick + STEPS
        self.asks = usable or (self.continuous and kind in ("old", "one old observation"))
        self._show(state if usable and state.shape == (DIM,) else None)
        seen["state"] = state
        return seen

    def _show(self, state: np.ndarray | None) -> None:
        self.usable = state is not None
        self.shown = None if state is None else np.asarray(state, np.float64)
        if self.shown is not None:
            self.reports.append(self.shown)

    # ------------------------------------------------------------------------- commands

    def begin_tick(self) -> None:
        self.sent, self.row, self.shown, self.usable, self.asks = 0, None, None, True, True
        self.turn()

    def act(self, row: np.ndarray) -> None:
        self.sent += 1
        if self.refuses and self.rng.random() < 0.1:
            self.sent -= 1  # the loop holds the robot in the same control step
            self._may_have_moved()
            self.counts["refused"] += 1
            raise NoCommand("out of reach")
        self._checked(row)
        self.row = row

    def hold(self) -> None:
        self.sent += 1
        self.moved = [np.zeros(DIM)]
        if self.motion == "offsets" and self.last is not None:
            self.last = np.zeros(DIM)
        self.counts["holds"] += 1

    def stop_moving(self) -> None:
        """Record that the robot got no command for at least a period."""
        self.moved = [np.zeros(DIM)]

    def _may_have_moved(self) -> None:
        self.last, self.moved, self.reports = None, [np.zeros(DIM)], []
        if self.shown is not None:
            self.reports.append(self.shown)

    def put(self, position: Any) -> None:
        """Move the robot by hand. An old sensor may still show the earlier position, which cannot be detected."""
        if self.sensor.startswith(("frozen", "one old")):
            self.lied = self.tick + STEPS
        self.position = np.float32(position)
        self._may_have_moved()

    def broken(self, why: str) -> None:
        raise BrokenPromiseError(f"{self.kind} {self.seed}: tick {self.tick}: {why}")

    def _checked(self, row: np.ndarray) -> None:
        if row.dtype != np.float32 or row.shape != (DIM,) or not np.isfinite(row).all():
            self.broken(f"not a valid command: {row}")
        self.counts["commands"] += 1
        sent = row.astype(np.float64)
        if np.abs(sent).max() > FAR / 2:
            self.broken(f"an action of a policy that does not fit the robot: {row}")
        if self.paused:
            self.broken("a command while the loop is paused")
        if self.motion == "offsets" and not self.usable:
            self.broken("a command relative to an unknown state")
        origins = self._limited(sent)
        self._boxed(sent, origins)
        self.moved = [sent - origin for origin in origins]
        self.last, self.reports = sent, []
        if self.motion == "offsets":
            self.position = (self.position + np.float32(self.scale) * row).astype(np.float32)
        else:
            self.position = row.copy()

    def _origins(self, sent: np.ndarray) -> list[np.ndarray]:
        """Return the positions from which a command may start.

        This is the last command, or each state that was reported since the robot may have been moved. For delta
        actions it is standing still.
        """
        if self.last is not None:
            return [self.last]
        if self.motion == "offsets":
            return [np.zeros(DIM)]
        return self.reports or [sent]

    def _limited(self, sent: np.ndarray) -> list[np.ndarray]:
        """Return the possible start positions from which a command is within the limits."""
        limits, origins = self.limits, self._origins(sent)
        if limits is None:
            return origins
        found, why = [], ""
        for origin in origins:
            move = sent - origin
            low, high = np.minimum(limits.low, origin), np.maximum(limits.high, origin)
            if ((sent < low - SLACK) | (sent > high + SLACK)).any():
                why = f"out of range: {sent} from {origin}"
            elif (np.abs(move) > limits.velocity * PERIOD + SLACK).any():
                why = f"faster than allowed: {sent} from {origin}"
            elif not any(
                (np.abs(move - moved) <= limits.acceleration * PERIOD**2 + SLACK).all()
                for moved in self.moved
            ):
                why = f"acceleration above the limit: {move} after {self.moved}"
            else:
                found.append(origin)
        if not found:
            self.broken(why)
        return found

    def _boxed(self, sent: np.ndarray, origins: list[np.ndarray]) -> None:
        """Check the workspace at the position of the robot. After false reports, check it at the reported position."""
        limits = self.limits
        if limits is None or not limits.boxed.any():
            return
        if self.motion != "offsets":
            ends = np.min(origins, axis=0), np.max(origins, axis=0)
            target = sent
        else:
            at = self.position.astype(np.float64)
            if self.tick <= self.lied:
                if self.shown is None:
                    return  # `_checked` has already rejected a command without a usable state
                at = self.shown
            ends = at, at
            target = at + self.scale * sent
        low, high = np.minimum(limits.workspace_low, ends[0]), np.maximum(limits.workspace_high, ends[1])
        if ((target < low - SLACK) | (target > high + SLACK)).any():
            self.broken(f"outside of the workspace: to {target} from {ends}")

    def end_tick(self, command: Any) -> None:
        if self.sent != 1:
            self.broken(f"{self.sent} commands and holds in a period, expected 1")
        if command.row is None and not command.reason:
            self.broken("a hold without a reason")
        self.rows.append(self.row)
        self.tick += 1


class Server:
    """A source of chunks that answers late, never, twice, or with invalid values.

    Args:
        made: Returns the actions of a valid answer. None uses :meth:`good`.
    """

    continuous = False

    def __init__(self, world: World, made: Callable[[Mapping[str, Any]], Any] | None = None):
        self.world, self.failures = world, 0
        self.made = made or self.good
        self.hostility = world.rng.choice([0.0, 0.1, 0.4])
        self.delays = world.rng.choice([[0], [0, 1, 2], [1, 3, 8]])
        self._due: float | None = None
        self._value: Any = None
        self.asked: list[tuple[int, str]] = []

    def ready(self, now: float) -> bool:
        return self._due is None

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        world = self.world
        if not world.asks:
            world.broken("a request with a state that the robot must not act on")
        rng = world.rng
        self.asked.append((world.tick, str(observation.get("prompt", ""))))
        self._due = now + rng.choice(self.delays) * PERIOD
        if rng.random() < 0.05:
            self._due = now + 10.0
        try:
            self._value = rng.choice(BAD)() if rng.random() < self.hostility else self.made(observation)
        except Exception as error:  # noqa: BLE001 - as a requester's thread does
            self._value = error
        self._deadline = now + DEADLINE

    def good(self, observation: Mapping[str, Any]) -> np.ndarray:
        world = self.world
        return drawn_rows(world, np.asarray(observation["state"], np.float64)[:DIM])

    def poll(self, now: float) -> Outcome | None:
        if self._due is None:
            return None
        if now > self._deadline:
            self._due = None
            self.failures += 1
            return Outcome(reason="no answer in time")
        if now < self._due - 1e-9:
            return None
        self._due = None
        value = self._value
        if isinstance(value, BaseException):
            self.failures += 1
            return (
                _failed(value)
                if isinstance(value, ClientError)
                else Outcome(reason=f"error: {value}", kind="error")
            )
        return Outcome(value)

    def cancel(self) -> None:
        self._due = None

    def close(self, wait: float = 0.0) -> None:
        self.cancel()


def drawn_rows(world: World, state: np.ndarray) -> np.ndarray:
    """Return the actions of a policy that moves in some direction, or far too fast."""
    rng = world.rng
    count = rng.randint(1, 14)
    size = rng.choice([0.01, 0.1, 1.0, 20.0])
    steps = np.array([[rng.uniform(-size, size) for _ in range(DIM)] for _ in range(count)])
    if world.motion == "offsets":
        return np.float32(steps)
    if world.motion == "relative":
        return np.float32(np.cumsum(steps, axis=0))
    return np.float32((state if len(state) == DIM else np.zeros(DIM)) + np.cumsum(steps, axis=0))


class Windows:
    """A link of a stream whose windows are late, in the wrong order, or invalid."""

    label, errors, error = "hostile", 0, ""

    def __init__(self, world: World):
        self.world, self.faults = world, Faults()
        self.sent: list[tuple[float, np.ndarray]] = []
        self.hostility = world.rng.choice([0.0, 0.1, 0.4])

    def send(self, state, time, delay=1, images=None, frame_time=None, prompt="") -> bool:  # type: ignore[no-untyped-def]
        if not self.world.asks:
            self.world.broken("a sample with a state that the robot must not act on")
        self.sent.append((float(time), np.asarray(state, np.float64)))
        return self.world.rng.random() < 0.95

    def windows(self) -> list[StreamWindow]:
        rng, found = self.world.rng, []
        while self.sent and rng.random() < 0.6:
            time, state = self.sent[-1 - min(rng.randrange(4), len(self.sent) - 1)]
            step = int(time * HZ) + rng.randint(0, 3)
            rows: Any = drawn_rows(self.world, state)
            frame = time
            if rng.random() < self.hostility:
                kind = rng.randrange(5)
                if kind == 0:
                    rows = rng.choice(BAD[:-3])()
                elif kind == 1:
                    step += rng.choice([-50, 10**6, -(10**9)])
                elif kind == 2:
                    time += rng.choice([1.0, 1e9, math.nan])
                elif kind == 3:
                    frame = rng.choice([math.nan, -1e9, 1e9])
                else:
                    self.errors += 1
                    self.error = "an error"
            found.append(StreamWindow(step, rows, time, frame))
        return found

    def restart(self) -> None:
        self.sent.clear()

    def close(self) -> None:
        pass


class Leader:
    """A leader arm that a hostile person moves."""

    def __init__(self, world: World, motors: bool):
        self.world = world
        self.at = world.position.astype(np.float64)
        self.mode, self.until = "near", 0
        self.said: np.ndarray | None = None  # command that the loop has read in this control step
        if motors:
            self.align = self._align

    def read(self) -> Any:
        rng, world = self.world.rng, self.world
        if world.tick >= self.until:
            self.mode = rng.choice(
                [
                    "near",
                    "moves",
                    "moves",
                    "moves",
                    "silent",
                    "fails",
                    "not finite",
                    "width",
                    "jumps",
                    "elsewhere",
                ]
            )
            self.until = world.tick + rng.randint(1, 10)
            if self.mode == "elsewhere":
                self.at = np.array([rng.uniform(-3, 3) for _ in range(DIM)])
        world.counts[f"leader: {self.mode}"] += 1
        mode = self.mode
        self.said = None
        if world.motion == "offsets":
            self.at = np.array([rng.uniform(-1, 1) for _ in range(DIM)])
        elif mode == "near":
            self.at = world.position + np.array([rng.uniform(-ALIGN, ALIGN) * 0.9 for _ in range(DIM)])
        elif mode == "jumps":
            self.at = self.at + np.array([rng.uniform(-1, 1) for _ in range(DIM)])
        else:  # this also covers the faults that the loop cannot detect
            self.at = self.at + np.array([rng.uniform(-ALIGN, ALIGN) * 0.9 for _ in range(DIM)])
        if mode == "silent":
            return None
        if mode == "fails":
            raise OSError("unplugged")
        if mode == "not finite":
            return [math.nan] * DIM
        if mode == "width":
            return [0.0] * (DIM + 1)
        self.said = np.float32(self.at).astype(np.float64)
        return self.at

    def _align(self, position: np.ndarray) -> None:
        if self.world.rng.random() < 0.1:
            raise OSError("stuck")
        self.at = np.where(np.isnan(position), self.at, position)


class Refiner:
    """An edge adapter that returns arbitrary actions or fails."""

    def __init__(self, world: World):
        self.world = world

    def see(self, images: Mapping[str, Any]) -> np.ndarray:
        if self.world.rng.random() < 0.02:
            raise AdapterError("images: expected front, got none")
        return np.zeros(1, np.float32)

    def refine(self, chunk: Any, then: Any, now: Any, age: int) -> Any:
        rng = self.world.rng
        if rng.random() < 0.05:
            raise AdapterError("chunk: expected another shape")
        if rng.random() < 0.1:
            return rng.choice(BAD[:-3])()
        return drawn_rows(self.world, np.asarray(now[1], np.float64)[:DIM])


class Swapped(Client):
    """A client whose server is in this process. The server may replace its policy between any two messages."""

    def __init__(self, world: World, **about: Any):
        super().__init__("tcp://127.0.0.1:5555", **about)
        self.world, self.number, self.fits = world, 1, True
        self.numbers = (
            world.rng.random() < 0.9
        )  # False: an older server, which can only replace its policy between connections

    def exchange(self) -> None:
        rng = self.world.rng
        if not self.numbers or rng.random() > 0.3:
            return
        self.number += 1
        self.fits = rng.random() < 0.5
        self.change = rng.choice(["units", "rate", "joints", "width", "motion", "cameras"])
        self.world.counts[f"exchange: {'the same' if self.fits else self.change}"] += 1

    change = ""

    def policy_form(self) -> dict[str, Any]:
        found = policy_of()
        if self.fits:
            return found
        dim = 3 if self.change == "width" else DIM
        if self.change in ("units", "joints", "width"):
            names = ["b", "a"] if self.change == "joints" else list("abc")[:dim]
            units = ["deg" if self.change == "units" else "rad"] * dim
            found["action"] = {"dim": dim, "names": names, "units": units}
        elif self.change == "rate":
            found["control_hz"] = 10 * HZ
        elif self.change == "motion":
            found["motion"] = {"kind": "offsets", "action": [0, 1], "state": [0, 1]}
        else:
            found["cameras"] = [{"name": "wrist", "height": 1, "width": 1}]
        return found

    def _tried(self, attempt: Any) -> Any:
        parts, request_id, _, _ = attempt
        request = schema.PredictRequest.FromString(b"".join(parts))
        self.exchange()
        reply = schema.PredictResponse(request_id=request_id)
        if self.numbers:
            reply.deployment = self.number
        if request.kind == schema.PredictRequest.METADATA:
            reply.metadata = json.dumps({"policy": self.policy_form(), "server": {}})
        else:
            rows = drawn_rows(self.world, np.array(request.raw_state, np.float64))
            if not self.fits:
                rows = np.full((6, 3 if self.change == "width" else DIM), FAR, np.float32)
            reply.horizon, reply.dim = rows.shape
            reply.actions.extend(rows.ravel().tolist())
        answer = reply.SerializeToString()
        self.exchange()
        return answer

    def _forget(self) -> None:
        self._spec, self.deployment = None, 0


def policy_of() -> dict[str, Any]:
    """Return the description of a policy that fits the robots of the scenarios."""
    names, units = ["a", "b"], ["rad", "rad"]
    return {
        "name": "right", "architecture": "none", "chunk_size": 50,
        "cameras": [{"name": "front", "height": 1, "width": 1}],
        "state": {"dim": DIM, "names": names, "units": units},
        "action": {"dim": DIM, "names": names, "units": units},
        "control_hz": HZ, "embodiment": "", "motion": {"kind": "absolute"}, "noise_dim": DIM, "solver_steps": 1,
        "max_prompt_tokens": 1,
    }  # fmt: skip


class Exchanged(Servers):
    """Servers whose connections are :class:`Swapped`."""

    def __init__(self, world: World):
        super().__init__("tcp://127.0.0.1:5555", policy=policy_of())
        self.world = world

    def client(self) -> Client:
        return Swapped(self.world, api_key="")


class Half:
    """One of two LeRobot arms, with one joint, ``world.position[at]``."""

    config = None

    def __init__(self, world: World, at: int):
        self.world, self.at = world, at
        self.action_features = {"a.pos": float}
        self.observation_features = {"a.pos": float}

    def get_observation(self) -> dict[str, Any]:
        if self.at == 0:
            seen = self.world.observe()
            self.world.two = seen["state"]  # type: ignore[attr-defined]
            self.world.stamp = seen.get("time", self.world.time)  # type: ignore[attr-defined]
        state = self.world.two  # type: ignore[attr-defined]
        return {"a.pos": float(state[min(self.at, len(state) - 1)])}

    def send_action(self, action: Mapping[str, float]) -> None:
        self.world.halves[self.at] = action["a.pos"]  # type: ignore[attr-defined]
        if self.at == 1:
            self.world.both(np.float32(self.world.halves))  # type: ignore[attr-defined]


class TwoArms(World):
    """Two arms that get their commands one after the other."""

    def __init__(self, seed: int, kind: str):
        super().__init__(seed, kind)
        self.halves = [0.0, 0.0]
        self.two: Any = self.position
        self.stamp = self.time
        self.refuses = False
        self.holding = False

    def both(self, row: np.ndarray) -> None:
        if self.holding:
            if self.last is not None and np.abs(row - self.last).max() > SLACK:
                self.broken(f"a hold that moves the robot: {row} after {self.last}")
            World.hold(self)
        else:
            World.act(self, row)


class BothArms(LeRobotArm):
    """Both arms together, as the control loop uses them."""

    def __init__(self, world: TwoArms):
        self.world = world
        policy = {
            "state": {"dim": DIM}, "action": {"dim": DIM}, "cameras": []
        }  # fmt: skip
        super().__init__(Pair(Half(world, 0), Half(world, 1)), policy)

    def observe(self) -> dict[str, Any]:
        found = super().observe()
        return {**found, "time": self.world.stamp}

    def hold(self) -> None:
        self.world.holding = True
        if self._last is None:
            World.hold(self.world)
        else:
            super().hold()
        self.world.holding = False


def play(seed: int, kind: str) -> Counter:
    """Play a scenario.

    Args:
        seed: Number of the scenario.
        kind: Kind of the scenario.

    Returns:
        The counts of the events.

    Raises:
        BrokenPromiseError: A command broke a rule.
    """
    world = (TwoArms if kind == "both arms" else World)(seed, kind)
    rng = world.rng
    options: dict[str, Any] = {
        "motion": world.motion_settings(), "limits": world.given, "stale": STALE, "deadline": DEADLINE,
        "max_age": rng.choice([None, 0.2, 0.5]), "chunk_size": 50,
    }  # fmt: skip
    if kind == "streams":
        options = {name: options[name] for name in ("motion", "limits", "stale", "chunk_size")}
        options["fusion"] = rng.choice(["latest_only", "weighted_average"])
    else:
        options["handover"] = rng.choice(
            ["freeze", "naive", "aligned", "aligned+halt:1.5", "ensemble", "aggregate", "rtc"]
        )
        options["replan"] = rng.choice(["1", "4", "full", "queue:0.5"])
        options["finish"] = rng.random() < 0.2
        if kind == "adapter":
            options["handover"], options["refine"] = rng.choice(["aligned", "naive"]), 8
        elif rng.random() < 0.2 and not options["handover"].startswith("rtc"):
            options["speed"] = 0.5
        if rng.random() < 0.2:
            options["filter"] = rng.choice(["lowpass:3", "ema:0.4"])
    settings = Settings(HZ, **options)
    source: Any = Server(world)
    if kind == "streams":
        source = Stream(Windows(world))  # type: ignore[arg-type]
    elif kind in ("exchange", "split"):
        call = Exchanged(world)()
        source = Server(world, lambda seen: call(seen_of(seen), DEADLINE))
    elif kind == "assist":
        far = Server(world)
        rule = parse_assist(rng.choice(["every:0.2", "disagreement:0.1", "every:0.1,uncertainty:0.5"]))
        near = lambda seen, limit: source.good(seen)  # noqa: E731
        assist = Assist(lambda: near, lambda: near, rule, HZ, 1.0, parse_motion(settings.motion), world.now)
        assist._far.close()
        assist._far = far  # type: ignore[assignment] - in this thread
        both = assist()
        source = Server(world, lambda seen: both(seen, DEADLINE))
    robot: Any = BothArms(world) if isinstance(world, TwoArms) else world
    leader = None
    takeover = None
    driven = kind in ("take-over", "shadow") or (
        kind in ("streams", "adapter", "both arms", "assist") and rng.random() < 0.4
    )
    if driven:
        motion = settings.parse_motion()
        leader = Leader(world, motors=rng.random() < 0.5)
        shadow = kind == "shadow"
        if not np.any(motion.posed(DIM)):
            driven = False
        elif shadow and rng.random() < 0.4:
            robot = leader = ShadowListener(robot, motion, DIM)
            takeover = Takeover(leader, motion, DIM, world.limits, ALIGN, True)
        else:
            takeover = Takeover(leader, motion, DIM, world.limits, ALIGN, shadow)
    edge = Refinement(Refiner(world)) if kind == "adapter" else None  # type: ignore[arg-type]
    loop = Loop(
        robot, source, settings, DIM, "go", Pace(PERIOD, world.now, world.sleep),
        [each for each in (edge, takeover) if each is not None], hold_refused=True,
    )  # type: ignore[arg-type] # fmt: skip
    Director(world, loop, source, leader, takeover).run()
    world.counts["scenarios"] += 1
    return world.counts


def seen_of(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a loop's observation that a client sends."""
    return {name: value for name, value in observation.items() if name in ("images", "state", "prompt")}


class Director:
    """Runs a loop through its scenario, and checks the rules that concern several commands."""

    def __init__(self, world: World, loop: Loop, source: Any, leader: Any, takeover: Takeover | None):
        self.world, self.loop, self.source, self.leader, self.takeover = world, loop, source, leader, takeover
        self.onlooker = isinstance(leader, ShadowListener)
        self.human = self.wants_human = takeover is not None and takeover.shadow
        self.prompt = "go"
        self.fresh_from = 0  # control step of the oldest request whose answer may be executed
        self.followed = -(10**9)  # control step of the last command that followed the leader
        self.last_said: np.ndarray | None = None

    def run(self) -> None:
        world, loop, rng = self.world, self.loop, self.world.rng
        for _ in range(STEPS):
            self.happen()
            world.begin_tick()
            number = loop.pace.next()
            if number > world.number + 1:
                world.stop_moving()
            world.number = number
            before = world.last
            if isinstance(self.leader, Leader):
                self.leader.said = None
            loop.tick(number)
            if self.onlooker:
                self.quiet()
                continue
            command = loop._command
            world.end_tick(command)
            self.checked(before)
            if rng.random() < 0.03:
                world.time += rng.choice([-5.0, -0.02, 0.02, 0.07, 0.4, 3.0])
                world.counts["clock jumps"] += 1

    def quiet(self) -> None:
        """Check that a robot in watch mode gets no command. Another driver moves the robot."""
        world = self.world
        if world.sent:
            world.broken("a command to a robot in watch mode")
        world.tick += 1
        world.counts["watched"] += 1
        world.put(world.position + np.float32([world.rng.uniform(-0.2, 0.2) for _ in range(DIM)]))

    def happen(self) -> None:
        """Cause the events between two control steps: pause, resume, new instruction, new episode, take-over."""
        world, loop, rng = self.world, self.loop, self.world.rng
        what = rng.random()
        if what < 0.03 and not world.paused:
            loop.pause()
            world.paused = True
            self.human = self.wants_human = self.takeover is not None and self.takeover.shadow
            self.fresh_from = world.tick
        elif what < 0.05 or (world.paused and what < 0.3):
            if world.paused:
                world.put([rng.uniform(-1, 1) for _ in range(DIM)])
                loop.resume()
                world.paused = False
                self.fresh_from = world.tick
                self.followed = -(10**9)
        elif what < 0.07:
            self.prompt = f"prompt {world.tick}"
            loop.say(self.prompt)
            if not loop.controller.continuous:
                self.fresh_from = world.tick
        elif what < 0.08:
            loop.restart("another episode", "")
            world.put([rng.uniform(-1, 1) for _ in range(DIM)])
            self.human = self.wants_human = self.takeover is not None and self.takeover.shadow
            self.fresh_from = world.tick
            self.followed = -(10**9)
        elif self.takeover is not None and not self.takeover.shadow and what < 0.2:
            if self.wants_human and what < 0.1:
                self.takeover.hand_back()
                self.human = self.wants_human = False
                self.fresh_from = world.tick
            elif not self.wants_human and not world.paused:
                self.takeover.take_over()
                self.wants_human = True
                self.followed = -(10**9)

    def checked(self, before: np.ndarray | None) -> None:
        world = self.world
        row = world.row
        if row is None:
            return
        if self.wants_human:
            self.by_hand(row, before)
        elif isinstance(self.source, Server):
            asked = [each for each, _ in self.source.asked if each >= self.fresh_from]
            if not asked:
                world.broken("an action from a request before the last restart")

    def by_hand(self, row: np.ndarray, before: np.ndarray | None) -> None:
        """Check a command during a take-over: it equals the leader's command within the limits, and the leader was
        aligned."""
        world, said = self.world, self.leader.said
        world.counts["by hand"] += 1
        if said is None:
            world.broken("a command without a command of the leader")
        if world.limits is None and np.abs(row - said).max() > SLACK:
            world.broken(f"not the command of the leader: {row}, expected {said}")
        if world.motion == "offsets":
            self.followed = world.tick
            return
        gap = (
            world.tick - 1 - self.followed - 1
        ) * PERIOD  # `tick` is already the number of the next control step
        if world.limits is None and before is not None and np.abs(row - before).max() > ALIGN + SLACK:
            world.broken(f"a jump by hand: {row} after {before}")
        if gap > SILENCE_S + 1e-9 and before is not None and np.abs(said - before).max() > ALIGN + SLACK:
            world.broken(f"the leader was not aligned: leader {said}, robot {before}")
        if (
            self.last_said is not None
            and gap <= SILENCE_S
            and np.abs(said - self.last_said).max() > ALIGN + SLACK
        ):
            at = before if before is not None else said
            if np.abs(said - at).max() > ALIGN + SLACK:
                world.broken(f"the robot followed a jump of the leader: {said} after {self.last_said}")
        self.followed, self.last_said = world.tick - 1, said
