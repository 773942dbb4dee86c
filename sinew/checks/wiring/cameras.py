"""Whether frames come from the camera that they are said to come from, which way up, and in which order of colours.

Two explanations of what a camera shows, "its own place" and another (the place of another camera, a turn, red and blue
exchanged), are compared in the direction in which they differ, so that another light or another table, which lie across
it, decide nothing. An explanation is said only where the spread of the training data cannot be mistaken for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sinew.bundle.schema import Seen, SeenCamera
from sinew.checks.wiring.finding import CANNOT_TELL, LOOKS_WRONG, Finding
from sinew.checks.wiring.thumbnails import FLOOR, distance, level, opponent, unpacked

TOWARDS = 0.7  # share of the way from the camera's own mean to another's from which the other is taken
CERTAIN = 0.4  # largest share of that way that the spread may explain if all cells vary together
BETTER = 0.5  # largest remaining share of the distance from its own mean
UNLIKE = 4.0  # times the farthest frame of training
SIMPLER = 0.05  # share of the distance that one change less in the explanation is worth
COLOUR = 20.0  # red less blue in training, out of 255, from which means alone decide

TURNS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "": (lambda t: t, ""),
    "upside down": (lambda t: t[::-1, ::-1], "turn them by 180 degrees: frame[::-1, ::-1]"),
    "mirrored left to right": (lambda t: t[:, ::-1], "mirror them back: frame[:, ::-1]"),
    "mirrored top to bottom": (lambda t: t[::-1], "mirror them back: frame[::-1]"),
    "turned to the left": (np.rot90, "turn them by 90 degrees: np.rot90(frame, -1)"),
    "turned to the right": (lambda t: np.rot90(t, -1), "turn them by 90 degrees: np.rot90(frame)"),
}
BGR = "red and blue exchanged (BGR)"
BGR_ADVICE = "give RGB: frame[..., ::-1], or cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)"
_EXCHANGED = np.array([1.0, -1.0, 1.0], np.float32)  # signs of exchanged opponent colours


@dataclass(frozen=True, slots=True)
class Place:
    """How a camera looked in training, opponent colours [8, 8, 3]."""

    mean: np.ndarray
    spread: np.ndarray
    farthest: float

    @classmethod
    def of(cls, seen: SeenCamera) -> Place | None:
        """Return the place that a record describes; None where it has no thumbnail."""
        if not seen.thumbnail:
            return None
        return cls(opponent(unpacked(seen.thumbnail)), unpacked(seen.spread), seen.farthest)

    def changed(self, turn: str, exchanged: bool) -> Place:
        """Return how it would look turned, or with red and blue exchanged."""
        turned = TURNS[turn][0]
        mean = turned(self.mean) * _EXCHANGED if exchanged else turned(self.mean)
        return Place(mean, turned(self.spread), self.farthest)

    def unlike(self, shown: np.ndarray) -> tuple[float, float]:
        """Return how far frames are from all of the training data, and from where on they are unlike them."""
        return distance(shown, self.mean, self.spread), UNLIKE * max(self.farthest, 1.0)


@dataclass(frozen=True, slots=True)
class Explanation:
    """camera: whose place it is. left: share of the distance from the camera's own mean that remains. others: turns
    that explain it as well."""

    camera: str
    turn: str
    exchanged: bool
    left: float = 0.0
    others: tuple[str, ...] = ()

    def changes(self, own: str) -> int:
        """Return in how many ways it differs from "the camera's own place"."""
        return (self.camera != own) + bool(self.turn) + self.exchanged


class CameraFit:
    """What a bundle knows of its cameras."""

    def __init__(self, seen: Seen):
        self.places = {n: place for n, c in seen.cameras.items() if (place := Place.of(c)) is not None}
        self._records = seen.cameras

    def findings(self, shown: Mapping[str, np.ndarray]) -> list[Finding]:
        """Return the suspicious findings. shown: Camera -> mean thumbnail of its frames, RGB [8, 8, 3]."""
        found, best = [], {}
        for name, thumb in shown.items():
            if name in self.places:
                best[name] = self.explain(name, opponent(thumb))
            elif name in self._records:
                found += _colours(name, thumb.mean((0, 1)), self._records[name])
        swapped = {n: e.camera for n, e in best.items() if e is not None and e.camera != n}
        for name, explanation in best.items():
            place, turned = self.places[name], opponent(shown[name])
            if explanation is not None:
                found.append(_told(name, explanation, swapped))
                continue
            apart, allowed = place.unlike(turned)
            if apart > allowed:
                found.append(
                    Finding(
                        f"camera {name}",
                        LOOKS_WRONG,
                        "unlike",
                        f"frames unlike all of the training data: distance {apart:.3g} from their mean, where the"
                        f" farthest of training has {place.farthest:.3g}",
                        f"at most {allowed:.3g}",
                        "look at a frame: another camera, another place or zoom of it, another light or room?",
                    )
                )
        return found

    def explain(self, own: str, shown: np.ndarray) -> Explanation | None:
        """Return the explanation of a camera's frames that is better than its own place; None if its own is best.
        shown: opponent.
        """
        place, found = self.places[own], []
        for camera, turn, exchanged in itertools.product(self.places, TURNS, (False, True)):
            tried = Explanation(camera, turn, exchanged)
            if not tried.changes(own):
                continue
            other = self.places[camera].changed(turn, exchanged)
            part, doubt, before, after = _between(place, other, shown)
            if part >= TOWARDS and doubt <= CERTAIN and after <= BETTER * before:
                apart, allowed = other.unlike(shown)
                if apart <= allowed:
                    found.append(replace(tried, left=after / before))
        if not found:
            return None
        least = min(each.left for each in found)
        close = [each for each in found if each.left <= least + SIMPLER]
        best = min(close, key=lambda each: (each.changes(own), each.left))
        same = (best.camera, best.exchanged, best.changes(own))
        turns = {each.turn for each in close if (each.camera, each.exchanged, each.changes(own)) == same}
        return replace(best, others=tuple(turn for turn in TURNS if turn in turns and turn != best.turn))

    def undecided(self, names: list[str]) -> list[Finding]:
        """Return the findings that cannot be decided, because the training data look the same either way."""
        found = []
        for name in names:
            if name not in self.places:
                has = "the mean and spread of its pixels alone" if name in self._records else "nothing"
                found.append(
                    Finding(
                        f"camera {name}",
                        CANNOT_TELL,
                        "no statistics",
                        f"the bundle knows {has} of its frames, so nothing tells whether it is the right camera, and"
                        " which way up",
                        advice="gather statistics of the right robot with `sinew doctor POLICY --learn RECORDS`",
                    )
                )
                continue
            alike = [
                other for other in names if other != name and self._alike(name, Explanation(other, "", False))
            ]
            ways = [turn for turn in list(TURNS)[1:] if self._alike(name, Explanation(name, turn, False))]
            ways += [BGR] if self._alike(name, Explanation(name, "", True)) else []
            ways += [f"exchanged with {other}" for other in alike]
            if ways:
                found.append(
                    Finding(
                        f"camera {name}",
                        CANNOT_TELL,
                        "alike",
                        f"whether it is {' or '.join(ways)}: the training data look nearly the same either way",
                    )
                )
        return found

    def _alike(self, own: str, tried: Explanation) -> bool:
        if tried.camera not in self.places:
            return False
        other = self.places[tried.camera].changed(tried.turn, tried.exchanged)
        return _between(self.places[own], other, other.mean)[1] > CERTAIN


def _between(own: Place, other: Place, shown: np.ndarray) -> tuple[float, float, float, float]:
    """Return the position of frames between two places (0: own, 1: other), the share of it that the spread may
    explain, and the distances from either place, less what the spread alone gives.

    The mean lightness does not count, because a room may be brighter. Weights are the inverse of the variation in
    either place.
    """
    weights = 1.0 / (own.spread**2 + other.spread**2 + FLOOR**2)
    way = level(other.mean - own.mean)
    gone = level(shown - own.mean)
    length = float((weights * way * way).sum())
    if length < 1e-9:
        return 0.0, np.inf, 0.0, 0.0
    part = float((weights * gone * way).sum()) / length
    doubt = float((weights * own.spread * np.abs(way)).sum()) / length
    usual = float((weights * own.spread**2).sum()), float((weights * other.spread**2).sum())
    before = max(float((weights * gone**2).sum()) - usual[0], 1e-9)
    after = max(float((weights * (gone - way) ** 2).sum()) - usual[1], 0.0)
    return part, doubt, before, after


def _told(name: str, found: Explanation, swapped: Mapping[str, str]) -> Finding:
    """Return an explanation in words."""
    kinds, seen, advice = [], [], []
    if found.camera != name:
        kinds.append("swapped" if swapped.get(found.camera) == name else "wrong camera")
        seen.append(f"look like those of camera {found.camera}")
        advice.append(
            f"exchange the two: --rename {found.camera}={name} --rename {name}={found.camera}, or their plugs"
            if swapped.get(found.camera) == name
            else f"{name} and {found.camera} should be different cameras: look at both"
        )
    if found.turn:
        kinds.append(found.turn)
        seen.append(" or ".join((found.turn, *found.others)))
        advice.append(TURNS[found.turn][1])
    if found.exchanged:
        kinds.append("BGR")
        seen.append(BGR)
        advice.append(BGR_ADVICE)
    return Finding(
        f"camera {name}",
        LOOKS_WRONG,
        ", ".join(kinds),
        f"frames {', '.join(seen)}: that leaves {100 * found.left:.0f} % of the distance from the training data",
        f"frames like those of {name} in the training data",
        "; ".join(advice),
    )


def _colours(name: str, mean: np.ndarray, seen: SeenCamera) -> list[Finding]:
    """Return the findings from means alone: the order of a camera's colours, if they were far from grey."""
    wanted, got = seen.mean[0] - seen.mean[2], float(mean[0] - mean[2])
    if abs(wanted) < COLOUR or -got / wanted < TOWARDS:
        return []
    return [
        Finding(
            f"camera {name}",
            LOOKS_WRONG,
            "BGR",
            f"{BGR}: red less blue is {got:.3g} of 255 on average",
            f"{wanted:.3g}, as in the training data",
            BGR_ADVICE,
        )
    ]
