"""Somebody takes over: a person at a leader arm, or an expert, drives the robot, and gives it back to the policy.

On take-over the robot holds until the leader is where the robot is; then the leader's rows are its commands, behind
the same limits as the policy's. A leader that was silent for a while, or jumped, is aligned again. On the way back the
robot holds until the policy has a fresh chunk. So neither hand-over is a jump: both begin from what the robot was sent
last, and a limit of velocity or acceleration bounds the step.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Mapping

import numpy as np

from sinew_client.control.authority import ALIGNING, HUMAN, SILENT, Leader, LeaderError
from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.interfaces import Robot
from sinew_client.control.motion import Motion, state_of
from sinew_client.control.safety import Limits, RowsError, checked_rows

if TYPE_CHECKING:
    from sinew_client.control.controller import BaseController

logger = logging.getLogger(__name__)

ALIGN_SHARE = 0.05  # of a number's range, by which a leader may be elsewhere where nothing else is said
SILENCE_S = 0.2  # seconds in which the robot was sent no row of its leader, after which that is aligned again
KEPT = 100_000  # control steps of an agreement


class Takeover:
    """Reads a leader once per control step and says who drives. It belongs to one loop.

    align: by how much each number of the leader may differ from where the robot is when it takes over, and from its row
    that was sent before while it leads; None: 0.05 of the range that ``limits`` give it. A leader that differs by more,
    or that the robot did not follow for 0.2 s, is aligned again before it leads on. shadow: the leader drives from the
    beginning and the policy only says what it would do.

    Raises :class:`LeaderError` where it is not known whether the leader's numbers are places, or how near is near.
    """

    def __init__(
        self,
        leader: Leader,
        motion: Motion,
        dim: int,
        limits: Limits | None,
        align: float | None = None,
        shadow: bool = False,
    ):
        if not np.any(motion.posed(dim)):
            raise LeaderError(
                "--takeover: expected --motion absolute, relative or offsets, which says whether the leader has to be"
                " where the robot is, got rows as they come"
            )
        self.leader, self.shadow = leader, shadow
        self._dim, self._placed = dim, motion.placed(dim)
        self._names = tuple(map(str, range(dim))) if limits is None or not limits.names else limits.names
        self._near = np.full(dim, np.inf)
        if align is not None:
            self._near[self._placed] = align
        elif self._placed.any():
            span = np.full(dim, np.inf) if limits is None else limits.high - limits.low
            if lost := [self._names[at] for at in np.flatnonzero(self._placed & ~np.isfinite(span))]:
                raise LeaderError(
                    "--align: expected by how much the leader may be elsewhere when it takes over; there is no range"
                    f" of {', '.join(lost)} to take {ALIGN_SHARE:g} of"
                )
            self._near[self._placed] = ALIGN_SHARE * span[self._placed]
        self.apart = ""  # what keeps the leader from being aligned
        self._said: set[str] = set()  # why the leader has failed
        self._wanted = bool(getattr(leader, "wanted", False))

    def asks(self) -> bool | None:
        """Return True where the leader's own button asks for a take-over, False where it gives back, None while it does
        not change."""
        wanted = getattr(self.leader, "wanted", None)
        if wanted is None or bool(wanted) == self._wanted:
            return None
        self._wanted = bool(wanted)
        return self._wanted

    def follow(
        self,
        controller: BaseController,
        step: int,
        here: np.ndarray | None,
        followed: tuple[float, np.ndarray] | None = None,
    ) -> None:
        """Do what is due in a control step while somebody drives or wants to. here: where the robot is, float [D], NaN
        where that is not known. followed: the newest row of the leader that the robot was sent, and the seconds
        since."""
        row, reason = self._read()
        if controller.driver == HUMAN and self._left(row, followed):
            controller.realign(step)
        if controller.driver == ALIGNING:
            self.apart = reason or self._apart(row, here)
            if self.apart:
                self._align(here)
                return
            self._do("free")
            if self.apart:
                return
            controller.aligned(step)
        if controller.driver == HUMAN:
            controller.led(step, row, reason)

    def _left(self, row: np.ndarray | None, followed: tuple[float, np.ndarray] | None) -> bool:
        """Return True if the leader may be elsewhere than where the robot has followed it."""
        if followed is None or isinstance(self.leader, Onlooker):  # which is where the robot is
            return False
        seconds, last = followed
        return seconds > SILENCE_S or (row is not None and bool(np.any(np.abs(row - last) > self._near)))

    def close(self) -> None:
        """End the leader, where it can be."""
        if callable(close := getattr(self.leader, "close", None)):
            close()

    def _read(self) -> tuple[np.ndarray | None, str]:
        """Return the leader's row, or why there is none."""
        try:
            given = self.leader.read()
            if given is None:
                return None, SILENT
            return checked_rows([given], self._dim, 1, what="the leader's row")[0], ""
        except RowsError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - the robot holds, whatever a leader raises
            reason = f"the leader failed: {type(error).__name__}: {error!s:.200}"
        if reason not in self._said and len(self._said) < 100:
            logger.warning("%s", reason)
            self._said.add(reason)
        return None, reason

    def _apart(self, row: np.ndarray | None, here: np.ndarray | None) -> str:
        """Return by how much the leader is elsewhere, "" where it is near enough."""
        assert row is not None
        if not self._placed.any():
            return ""
        if here is None or np.any(np.isnan(here[self._placed])):
            return "where the robot is is not known"
        differ = np.abs(row.astype(np.float64) - here)
        far = np.flatnonzero(differ > self._near)
        return ", ".join(f"{self._names[at]} by {differ[at]:.4g}, at most {self._near[at]:.4g}" for at in far)

    def _align(self, here: np.ndarray | None) -> None:
        if here is not None:
            self._do("align", here)

    def _do(self, what: str, *given: Any) -> None:
        """Call a method that a leader may have; where it fails, the robot goes on holding."""
        if not callable(method := getattr(self.leader, what, None)):
            return
        try:
            method(*given)
        except Exception as error:  # noqa: BLE001 - the robot holds, whatever a leader raises
            self.apart = f"the leader could not be aligned: {type(error).__name__}: {error!s:.200}"


class Onlooker:
    """A robot that somebody else drives: it is looked at and never commanded. It is its own leader.

    What was done is the ``action`` of its observations, float [D], else where its state is, of actions that are places.
    """

    def __init__(self, robot: Robot, motion: Motion, dim: int):
        self.robot, self._motion, self._dim = robot, motion, dim
        self._did: np.ndarray | None = None

    def facts(self) -> RobotFacts:
        """Return the facts of the robot itself. It is never held, so from no other thread either."""
        return replace(facts_of(self.robot), concurrent_hold=False)

    def observe(self) -> Mapping[str, Any]:
        self._did = None
        seen = dict(self.robot.observe())
        did = seen.pop("action", None)
        if did is None:
            here = self._motion.position(state_of(seen["state"]), self._dim)
            did = here if np.all(np.isfinite(here)) else None
        self._did = did
        return seen

    def read(self) -> Any:
        return self._did

    def act(self, row: np.ndarray) -> None:
        """Do nothing: somebody else drives."""

    def hold(self) -> None:
        """Do nothing: somebody else drives."""

    def close(self) -> None:
        """Close the robot, where it can be."""
        if (close := facts_of(self.robot).close) is not None:
            close()


class ShadowAgreement:
    """How near what a policy would have done is to what was done: control step by control step, as its rows would have
    been executed, and row by row of its chunks, each against the step that it is for, however late the chunk came."""

    def __init__(self, names: tuple[str, ...] = ()):
        self._names = names
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []
        self._did: dict[int, np.ndarray] = {}  # control step -> what was sent
        self._said: list[tuple[np.ndarray, np.ndarray]] = []  # steps [H] of a chunk, and its rows [H, D]
        self._rows = 0  # of all chunks that are kept
        self.missing = 0  # control steps in which the policy had no row

    def said(self, frame: int, rows: np.ndarray, speed: float) -> None:
        """Note a chunk, float32 [H, D], whose frame was exposed at control step ``frame``: row k is for k steps later,
        or for as much later as it is played slower."""
        if self._rows < KEPT:
            self._rows += len(rows)
            self._said.append((frame + np.round((np.arange(len(rows)) + 1) / speed).astype(int) - 1, rows))

    def add(self, step: int, wanted: np.ndarray | None, did: np.ndarray) -> None:
        """Note one control step: what the policy would have sent, and what was sent, float32 [D]."""
        if len(self._did) < KEPT:
            self._did[step] = did
        if wanted is None:
            self.missing += 1
        elif len(self._pairs) < KEPT:
            self._pairs.append((wanted, did))

    def to_dict(self) -> dict[str, Any]:
        """Return, for each number, the median, p95 and largest difference, and ``explained``: the share of the
        variance of what was done that the policy explains, 1 - mean squared difference / variance; None where it did
        not vary. ``rows`` has how often each row of a chunk could be compared, and each number's median and p95 of
        them."""
        if not self._pairs:
            return {"steps": 0, "missing": self.missing, "numbers": {}, "rows": {}}
        wanted, did = (np.array(rows, np.float64) for rows in zip(*self._pairs))
        apart, spread = np.abs(wanted - did), did.var(axis=0)
        numbers = {}
        for at in range(did.shape[1]):
            explained = None if spread[at] == 0.0 else 1.0 - float(np.mean(apart[:, at] ** 2) / spread[at])
            numbers[self._names[at] if at < len(self._names) else str(at)] = {
                "p50": float(np.percentile(apart[:, at], 50)),
                "p95": float(np.percentile(apart[:, at], 95)),
                "max": float(apart[:, at].max()),
                "explained": explained,
            }
        return {"steps": len(did), "missing": self.missing, "numbers": numbers, "rows": self._by_row()}

    def _by_row(self) -> dict[str, Any]:
        """Return the differences of each row of a chunk from what was done in its step."""
        found: dict[int, list[np.ndarray]] = {}
        for steps, rows in self._said:
            for index, step in enumerate(steps):
                if (did := self._did.get(int(step))) is not None:
                    found.setdefault(index, []).append(np.abs(rows[index].astype(np.float64) - did))
        if not found:
            return {}
        indices = sorted(found)
        numbers = {}
        for at in range(len(found[indices[0]][0])):
            each = [[float(difference[at]) for difference in found[index]] for index in indices]
            numbers[self._names[at] if at < len(self._names) else str(at)] = {
                name: [float(np.percentile(values, share)) for values in each]
                for name, share in (("p50", 50), ("p95", 95))
            }
        return {"row": indices, "count": [len(found[index]) for index in indices], "numbers": numbers}


def agreement_rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what :meth:`ShadowAgreement.to_dict` says in lines for people: a name and its text."""
    lines = [("agreement", f"{found['steps']} steps, {found['missing']} without a row of the policy")]
    rows = found.get("rows") or {"row": [], "numbers": {}}
    shown = sorted(
        {round(share * (len(rows["row"]) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)} if rows["row"] else ()
    )
    if shown:
        lines.append(("", "by row of a chunk, " + ", ".join(str(rows["row"][at]) for at in shown) + ":"))
    for name, each in found["numbers"].items():
        share = "-" if each["explained"] is None else f"{100 * each['explained']:.0f} %"
        own = rows["numbers"].get(name, {}).get("p50", [])
        by_row = "; by row " + ", ".join(f"{own[at]:.3g}" for at in shown) if own else ""
        lines.append(("", f"{name}: p50 {each['p50']:.3g}, p95 {each['p95']:.3g}, {share} explained{by_row}"))
    return lines
