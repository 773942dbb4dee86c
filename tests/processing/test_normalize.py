"""Normalisation against the formulas of ``schema.Normalization``, written out number by number."""

from __future__ import annotations

import numpy as np
import pytest

from sinew.bundle.schema import Normalization, VectorPart
from sinew.core import BundleError
from sinew.processing.limits import ranges
from sinew.processing.normalize import Normalizer, PartNormalizer, normalizer

NAMES = {
    "mean_std": ("mean", "std"),
    "min_max": ("min", "max"),
    "quantiles": ("q01", "q99"),
    "quantile10": ("q10", "q90"),
}
FIRST, SECOND = (0.5, -2.0, 3.0), (2.0, 0.25, 3.0)  # of min_max the last dimension never moved
STATE = np.array([1.0, -3.0, 4.0])
EPS = 1e-3  # large enough to be seen
CASES = [(mode, convention) for mode in NAMES for convention in ("lerobot", "openpi", "gr00t")]


def made(mode: str, convention: str, **options) -> Normalizer:
    stats = dict(zip(NAMES[mode], (FIRST, SECOND), strict=True))
    eps = 0.0 if convention == "gr00t" else EPS
    return Normalizer(Normalization(mode, stats, eps, convention, **options), 3, "state")


def span(low: float, high: float, convention: str) -> float:
    if convention == "openpi":
        return high - low + EPS
    return high - low or (EPS if convention == "lerobot" else 0.0)


def expected(x: float, a: float, b: float, mode: str, convention: str) -> float:
    if mode == "mean_std":
        return (x - a) / (b + (0.0 if convention == "gr00t" else EPS))
    if convention == "gr00t" and a == b:
        return 0.0
    return 2 * (x - a) / span(a, b, convention) - 1


def world(y: float, a: float, b: float, mode: str, convention: str) -> float:
    if mode == "mean_std":
        return y * (b + (EPS if convention == "openpi" else 0.0)) + a
    return (y + 1) / 2 * span(a, b, convention) + a


@pytest.mark.parametrize(("mode", "convention"), CASES)
def test_both_ways_are_the_formulas(mode: str, convention: str) -> None:
    found = made(mode, convention)
    assert found.is_affine is True
    assert found.normalize(STATE).dtype == (np.float32 if convention == "lerobot" else np.float64)
    tolerance = 1e-5 if convention == "lerobot" else 1e-12
    wanted = [expected(x, a, b, mode, convention) for x, a, b in zip(STATE, FIRST, SECOND, strict=True)]
    with np.errstate(all="raise"):
        np.testing.assert_allclose(found.normalize(STATE), wanted, rtol=tolerance)
    y = np.array([[0.5, -1.5, 0.25], [0.0, 1.0, -1.0]])
    wanted_rows = [
        [world(v, a, b, mode, convention) for v, a, b in zip(row, FIRST, SECOND, strict=True)] for row in y
    ]
    np.testing.assert_allclose(found.unnormalize(y), wanted_rows, rtol=tolerance)
    scale, offset = found.affine()
    np.testing.assert_allclose(y * scale + offset, wanted_rows, rtol=tolerance)


def test_identity_is_the_vector_itself() -> None:
    found = Normalizer(Normalization("identity"), 3, "state")
    assert found.normalize(STATE).tolist() == found.unnormalize(STATE).tolist() == STATE.tolist()
    assert [each.tolist() for each in found.affine()] == [[1, 1, 1], [0, 0, 0]]
    centre, half = ranges(found)
    assert (centre.tolist(), half.tolist()) == ([0, 0, 0], [np.inf] * 3)


@pytest.mark.parametrize("convention", ["lerobot", "openpi"])
def test_clipped_both_ways(convention: str) -> None:
    found = made("min_max", convention, clip=True)
    assert found.is_affine is False
    assert found.normalize(np.array([9.0, -9.0, 3.0])).tolist()[:2] == [1.0, -1.0]
    inside = made("min_max", convention).unnormalize(np.array([[1.0, -1.0, 0.0]]))
    assert np.array_equal(found.unnormalize(np.array([[5.0, -5.0, 0.0]])), inside)


@pytest.mark.parametrize("clip", [False, True])
def test_a_gripper_snaps_to_one_from_its_threshold_on(clip: bool) -> None:
    found = made("mean_std", "openpi", snap=(1,), snap_at=0.25, clip=clip)
    assert found.is_affine is False
    rows = np.array([[0.5, 0.25, 0.5], [0.5, 0.2499, 0.5], [0.5, -7.0, 0.5], [0.5, 7.0, 0.5]])
    before = rows.copy()
    plain = made("mean_std", "openpi").unnormalize(np.array([[0.5, v, 0.5] for v in (1.0, 0.0, 0.0, 1.0)]))
    assert np.array_equal(found.unnormalize(rows), plain)
    assert np.array_equal(rows, before)  # the caller's rows stay what they were


def test_statistics_that_are_none_are_refused() -> None:
    few, none = "std has 2 values, expected 3", "std has values that are not finite"
    for values, message in (((1.0, 2.0), few), ((1.0, np.nan, 1.0), none)):
        with pytest.raises(BundleError, match=f"statistics of state: {message}"):
            Normalizer(Normalization("mean_std", {"mean": FIRST, "std": values}), 3, "state")


def test_parts_where_there_are_any() -> None:
    recipe = Normalization("mean_std", {"mean": (1.0,), "std": (2.0,)}, eps=0.0)
    parts = (VectorPart("base", 1, recipe), VectorPart("wrist", 2, Normalization("identity"), sin_cos=True))
    assert isinstance(normalizer(recipe, (), 1, "state"), Normalizer)
    found = normalizer(recipe, parts, 3, "state")
    assert isinstance(found, PartNormalizer)
    assert (found.is_affine, found.dim, found.width, normalizer(recipe, (), 1, "state").width) == (
        False,
        3,
        5,
        1,
    )
    angles = np.array([[3.0, 3.1, -3.1], [0.0, -0.5, 1.5]])
    there = found.normalize(angles)
    base, wrist = angles[:, :1], angles[:, 1:]
    np.testing.assert_allclose(there, np.hstack([(base - 1) / 2, np.sin(wrist), np.cos(wrist)]))
    np.testing.assert_allclose(found.unnormalize(there), angles, atol=1e-12)
    centre, half = ranges(found)
    assert (centre.tolist(), half.tolist()) == ([1.0, 0.0, 0.0], [6.0, np.inf, np.inf])


@pytest.mark.parametrize("convention", ["lerobot", "openpi", "gr00t"])
def test_a_range_is_what_the_statistics_say(convention: str) -> None:
    """Of a joint that never moved a tenth of where it was, or of one unit."""
    centre, half = ranges(made("min_max", convention))
    np.testing.assert_allclose(centre, [1.25, -0.875, 3.0], atol=2 * EPS)
    np.testing.assert_allclose(half, [0.75, 1.125, 0.3], atol=2 * EPS)
    still = Normalization("min_max", {"min": (0.5,), "max": (0.5,)}, 0.0, "gr00t")
    assert ranges(Normalizer(still, 1, "state"))[1].tolist() == [0.1]
    centre, half = ranges(made("mean_std", convention))
    np.testing.assert_allclose(centre, FIRST, atol=1e-12)
    np.testing.assert_allclose(half, 3 * np.array(SECOND), atol=3 * EPS)


def test_a_range_for_each_step_where_a_part_has_one() -> None:
    rows = Normalization(
        "min_max", {"min": (0.0, 10.0), "max": (2.0, 14.0)}, rows=2, convention="gr00t", eps=0.0
    )
    assert ranges(Normalizer(rows, 1, "action"))[0].tolist() == [[1.0], [12.0]]
    parts = (VectorPart("arm", 1, rows), VectorPart("hand", 1, Normalization("identity")))
    centre, half = ranges(PartNormalizer(parts, "action"))
    assert centre.tolist() == [[1.0, 0.0], [12.0, 0.0]]
    assert half.tolist() == [[1.0, np.inf], [2.0, np.inf]]


def test_columns_of_a_matrix_are_a_rotation_vector() -> None:
    """Pairs by LeRobot 0.6.1's ``rotate6d_to_axis_angle``, which computes in float32."""
    columns = [
        [0.1257, -0.1321, 0.6404, 0.1049, -0.5357, 0.3616],
        [1.3040, 0.9471, -0.7037, -1.2654, -0.6233, 0.0413],
        [-2.3250, -0.2188, -1.2459, -0.7323, -0.5443, -0.3163],
        [0.4116, 1.0425, -0.1285, 1.3665, -0.6652, 0.3515],
    ]
    vectors = [
        [-2.27405, 0.15934, -1.88514],
        [-1.21261, 0.00170, 0.78559],
        [0.76013, -0.24067, -2.99108],
        [2.38518, 1.64453, 0.04155],
    ]
    parts = (VectorPart("rotation", 3, Normalization("identity"), rotation=True),)
    part = PartNormalizer(parts, "action")
    assert (part.dim, part.width) == (3, 6)
    np.testing.assert_allclose(part.unnormalize(np.array(columns)), vectors, atol=1e-4)
    np.testing.assert_allclose(part.unnormalize(part.normalize(np.array(vectors))), vectors, atol=1e-12)
