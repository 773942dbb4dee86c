"""Check from which camera frames come, which way up they are, and whether red and blue are exchanged.

Frames are compared with the thumbnails (tiny mean pictures) of the training data. An explanation of the frames is the
camera's own place, or another place: another camera, a turned frame, or exchanged colours. Only the difference
between both places is measured, so that another light or another table has no influence. An explanation is reported
only if the spread of the training data cannot cause the same difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sinew.bundle.schema import Seen, SeenCamera
from sinew.checks.wiring.finding import CANNOT_TELL, LOOKS_WRONG, Finding
from sinew.checks.wiring.thumbnails import FLOOR, distance, level, opponent, unpacked

# An explanation, such as "two cameras are exchanged", is accepted only if the frames have moved by this share of the
# distance from the camera's own mean frame to the other mean frame.
TOWARDS = 0.7
# The spread of the training data may explain at most this share of the way, even if all cells vary together.
CERTAIN = 0.4
BETTER = 0.5  # an explanation may leave at most this share of the distance from the camera's own mean
UNLIKE = 4.0  # frames farther away than this multiple of the farthest training frame do not match the training data
# A simpler explanation is preferred if the distance that it leaves is larger by at most this share.
SIMPLER = 0.05
# If the mean of red minus blue in the training frames is at least this number, out of 255, the mean colour alone can
# show that red and blue are exchanged.
COLOUR = 20.0

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
_EXCHANGED = np.array([1.0, -1.0, 1.0], np.float32)  # factors that exchange red and blue in opponent colours


@dataclass(frozen=True, slots=True)
class Place:
    """The appearance of a camera's frames in the training data, as a thumbnail in opponent colours, [8, 8, 3].

    Attributes:
        mean: Mean of each cell.
        spread: Standard deviation of each cell.
        farthest: Largest distance of a training frame from the mean.
    """

    mean: np.ndarray
    spread: np.ndarray
    farthest: float

    @classmethod
    def of(cls, seen: SeenCamera) -> Place | None:
        """Create a place from a bundle's record of a camera. Return None if the record has no thumbnail."""
        if not seen.thumbnail:
            return None
        return cls(opponent(unpacked(seen.thumbnail)), unpacked(seen.spread), seen.farthest)

    def changed(self, turn: str, exchanged: bool) -> Place:
        """Return the place (appearance in training) as a turned camera, or a camera with exchanged red and blue,
        would show it.
        """
        turned = TURNS[turn][0]
        mean = turned(self.mean) * _EXCHANGED if exchanged else turned(self.mean)
        return Place(mean, turned(self.spread), self.farthest)

    def unlike(self, shown: np.ndarray) -> tuple[float, float]:
        """Return two distances: the distance of frames from the training data, and the limit above which frames do not
        match the training data.

        Args:
            shown: Mean thumbnail of the frames in opponent colours, [8, 8, 3].
        """
        return distance(shown, self.mean, self.spread), UNLIKE * max(self.farthest, 1.0)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A possible reason why a camera's frames look as they do, for example that two cameras are exchanged.

    Attributes:
        camera: The camera whose place the frames show.
        turn: The turn of the frames, a key of ``TURNS``.
        exchanged: True if red and blue are exchanged.
        left: Share of the distance from the camera's own mean that the explanation leaves.
        others: Other turns that explain the frames equally well.
    """

    camera: str
    turn: str
    exchanged: bool
    left: float = 0.0
    others: tuple[str, ...] = ()

    def changes(self, own: str) -> int:
        """Return the number of changes that this explanation assumes (another camera, a turn, exchanged colours); 0 if
        the frames of ``own`` show its own place.
        """
        return (self.camera != own) + bool(self.turn) + self.exchanged


class CameraFit:
    """Compares camera frames with the record of the training frames in a bundle."""

    def __init__(self, seen: Seen):
        self.places = {n: place for n, c in seen.cameras.items() if (place := Place.of(c)) is not None}
        self._records = seen.cameras

    def findings(self, shown: Mapping[str, np.ndarray]) -> list[Finding]:
        """Return a finding for each camera whose frames look wrong.

        Args:
            shown: Camera -> mean thumbnail of its frames, RGB [8, 8, 3].
        """
        results, best = [], {}
        for name, thumb in shown.items():
            if name in self.places:
                best[name] = self.explain(name, opponent(thumb))
            elif name in self._records:
                results += _colours(name, thumb.mean((0, 1)), self._records[name])
        swapped = {n: e.camera for n, e in best.items() if e is not None and e.camera != n}
        for name, explanation in best.items():
            place, turned = self.places[name], opponent(shown[name])
            if explanation is not None:
                results.append(_told(name, explanation, swapped))
                continue
            apart, allowed = place.unlike(turned)
            if apart > allowed:
                results.append(
                    Finding(
                        f"camera {name}",
                        LOOKS_WRONG,
                        "unlike",
                        f"the frames are unlike all of the training data: distance {apart:.3g} from its mean, and the"
                        f" farthest training frame has distance {place.farthest:.3g}",
                        f"at most {allowed:.3g}",
                        "look at a frame, and check the camera, its position and zoom, and the light",
                    )
                )
        return results

    def explain(self, own: str, shown: np.ndarray) -> Explanation | None:
        """Return the explanation that fits a camera's frames better than its own place; None if its own place is best.

        Args:
            own: The camera.
            shown: Mean thumbnail of its frames in opponent colours.
        """
        place, candidates = self.places[own], []
        for camera, turn, exchanged in itertools.product(self.places, TURNS, (False, True)):
            tried = Explanation(camera, turn, exchanged)
            if not tried.changes(own):
                continue
            other = self.places[camera].changed(turn, exchanged)
            part, doubt, before, after = _between(place, other, shown)
            if part >= TOWARDS and doubt <= CERTAIN and after <= BETTER * before:
                apart, allowed = other.unlike(shown)
                if apart <= allowed:
                    candidates.append(replace(tried, left=after / before))
        if not candidates:
            return None
        least = min(each.left for each in candidates)
        close = [each for each in candidates if each.left <= least + SIMPLER]
        best = min(close, key=lambda each: (each.changes(own), each.left))
        same = (best.camera, best.exchanged, best.changes(own))
        turns = {each.turn for each in close if (each.camera, each.exchanged, each.changes(own)) == same}
        return replace(best, others=tuple(turn for turn in TURNS if turn in turns and turn != best.turn))

    def undecided(self, names: list[str]) -> list[Finding]:
        """Return findings about mistakes that cannot be detected, because the training data look the same with and
        without them.

        Args:
            names: The cameras.
        """
        results = []
        for name in names:
            if name not in self.places:
                has = "only the mean and spread of its pixels" if name in self._records else "no record"
                results.append(
                    Finding(
                        f"camera {name}",
                        CANNOT_TELL,
                        "no statistics",
                        f"the bundle has {has} for this camera, so it cannot be checked whether this is the right"
                        " camera, and which way up it is",
                        advice="record the right robot, and run `sinew doctor POLICY --learn RECORDS`",
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
                results.append(
                    Finding(
                        f"camera {name}",
                        CANNOT_TELL,
                        "alike",
                        f"cannot decide whether it is {' or '.join(ways)}: the training data look nearly the same in"
                        " both cases",
                    )
                )
        return results

    def _alike(self, own: str, tried: Explanation) -> bool:
        if tried.camera not in self.places:
            return False
        other = self.places[tried.camera].changed(tried.turn, tried.exchanged)
        return _between(self.places[own], other, other.mean)[1] > CERTAIN


def _between(own: Place, other: Place, shown: np.ndarray) -> tuple[float, float, float, float]:
    """Compare frames with two places, in the direction in which the places differ.

    The mean lightness does not count, because a room may be brighter. Each cell is weighted with the inverse of its
    variance in both places.

    Args:
        own: The camera's own place.
        other: The other place.
        shown: Mean thumbnail of the frames in opponent colours.

    Returns:
        The position of the frames between the places (0: own, 1: other), the share of it that the spread may explain,
        and the distances of the frames from both places, less the distance that the spread alone explains.
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


def _told(name: str, explanation: Explanation, swapped: Mapping[str, str]) -> Finding:
    """Convert an explanation of a camera's frames to a finding with a text for the user.

    Args:
        name: Name of the camera.
        explanation: The explanation of its frames.
        swapped: Camera -> camera whose place its frames show.
    """
    kinds, seen, advice = [], [], []
    if explanation.camera != name:
        kinds.append("swapped" if swapped.get(explanation.camera) == name else "wrong camera")
        seen.append(f"look like those of camera {explanation.camera}")
        advice.append(
            f"exchange the two cameras: --rename {explanation.camera}={name} --rename {name}={explanation.camera}, or"
            " exchange their plugs"
            if swapped.get(explanation.camera) == name
            else f"{name} and {explanation.camera} should be different cameras: look at the frames of both"
        )
    if explanation.turn:
        kinds.append(explanation.turn)
        seen.append(" or ".join((explanation.turn, *explanation.others)))
        advice.append(TURNS[explanation.turn][1])
    if explanation.exchanged:
        kinds.append("BGR")
        seen.append(BGR)
        advice.append(BGR_ADVICE)
    return Finding(
        f"camera {name}",
        LOOKS_WRONG,
        ", ".join(kinds),
        f"frames {', '.join(seen)}: that leaves {100 * explanation.left:.0f} % of the distance from the training data",
        f"frames like those of {name} in the training data",
        "; ".join(advice),
    )


def _colours(name: str, mean: np.ndarray, seen: SeenCamera) -> list[Finding]:
    """Return a finding if the mean colours show that red and blue are exchanged. The list is empty if the training
    frames are nearly grey on average.

    Args:
        name: Name of the camera.
        mean: Mean colour of the robot's frames.
        seen: Record of the camera's training frames.
    """
    expected, got = seen.mean[0] - seen.mean[2], float(mean[0] - mean[2])
    if abs(expected) < COLOUR or -got / expected < TOWARDS:
        return []
    return [
        Finding(
            f"camera {name}",
            LOOKS_WRONG,
            "BGR",
            f"{BGR}: red less blue is {got:.3g} of 255 on average",
            f"{expected:.3g}, as in the training data",
            BGR_ADVICE,
        )
    ]
