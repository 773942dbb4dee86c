"""Vectors in parts, statistics per step, and poses that are relative to the state."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.rotations import compose, from_6d, from_vector, to_6d, to_vector, undetermined

from sinew.bundle.schema import Normalization, VectorPart
from sinew.core import BundleError, PolicySpec, VectorSpec
from sinew.processing.limits import unit_sizes
from sinew.processing.normalize import Normalizer, PartNormalizer
from sinew.steps.vector.add_state import AddState
from sinew.steps.vector.affine import Affine
from sinew.steps.vector.base import apply_steps, spans
from sinew.steps.vector.compose_pose import ComposePose
from sinew.steps.vector.linear_to_angle import LinearToAngle
from sinew.steps.vector.threshold import Threshold

RANGE = Normalization(
    "min_max", {"min": (0.0, -1.0, 2.0), "max": (4.0, 1.0, 2.0)}, convention="gr00t", clip=True
)
VECTORS = st.lists(st.floats(-3, 3), min_size=3, max_size=3).map(np.array)


def rotations(seed: int, count: int) -> np.ndarray:
    """Random rotation matrices, by QR; independent of the code under test."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((count, 3, 3)))
    q = q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None]
    return q * np.sign(np.linalg.det(q))[:, None, None]


def test_a_constant_dimension_becomes_zero_and_comes_back():
    normalizer = Normalizer(RANGE, 3, "state")
    assert normalizer.normalize(np.array([3.0, 5.0, 7.0])).tolist() == [0.5, 1.0, 0.0]
    assert normalizer.unnormalize(np.array([[0.5, 9.0, 0.3]])).tolist() == [[3.0, 1.0, 2.0]]


def test_how_far_an_action_moves_when_the_output_moves_by_one():
    spec = PolicySpec("a", "b", (), VectorSpec(9), VectorSpec(9), 2, 9, 1, 8)

    def sizes(recipe, dim, *steps):
        return unit_sizes(Normalizer(recipe, dim, "action"), steps, spec)

    ends = Normalization("min_max", {"min": (0.0, -1.0), "max": (4.0, 1.0)})
    assert sizes(ends, 2) == [2.0, 1.0]
    assert sizes(ends, 2, Affine((0,), scale=-3.0, offset=5.0)) == [6.0, 1.0]
    assert sizes(ends, 2, AddState((1,))) == [2.0, 1.0]
    assert sizes(ends, 2, Threshold((1,))) == [2.0, None]
    assert sizes(Normalization("mean_std", {"mean": (5.0,), "std": (0.5,)}), 1) == [0.5]
    still = Normalization("min_max", {"min": (2.0, -1.0), "max": (2.0, 1.0)})
    assert sizes(still, 2) == [None, 1.0]  # one that never moved in training
    assert sizes(Normalization("identity"), 2) == [1.0, 1.0]
    each = {"min": (0.0, 0.0, 10.0, 10.0), "max": (1.0, 2.0, 11.0, 18.0)}
    assert sizes(Normalization("min_max", each, convention="gr00t", rows=2), 2) == [
        0.5,
        4.0,
    ]  # the widest row
    parts = (
        VectorPart("place", 2, ends),
        VectorPart("turn", 3, Normalization("identity"), rotation=True),
        VectorPart("grip", 2, Normalization("identity")),
    )
    assert unit_sizes(PartNormalizer(parts, "action"), (), spec) == [2.0, 1.0, None, None, None, 1.0, 1.0]
    pose = Normalization("min_max", {"min": (-1.0,) * 9, "max": (1.0,) * 9})
    assert sizes(pose, 9, ComposePose(tuple(range(9)))) == [None] * 9


@pytest.mark.parametrize("step", [AddState, Affine, ComposePose, LinearToAngle, Threshold])
def test_a_kind_stands_in_files_and_nowhere_else(step):
    """Nobody gives it in the place of a number, nor reads it beside the class's own name."""
    (kind,) = (each for each in fields(step) if each.name == "kind")
    assert kind.kw_only
    assert not kind.repr


def test_a_step_that_is_given_no_numbers_leaves_all_as_it_is():
    x = np.float32([[0.25, -3.0]])
    assert np.array_equal(apply_steps(x, (Affine((0, 1)),)), x)


def test_neighbours_are_said_as_a_range():
    assert [spans(dims) for dims in ((3,), (3, 4), (3, 4, 5), (3, 5, 4))] == ["3", "3, 4", "3-5", "3, 5, 4"]


def test_a_gripper_by_its_lever_and_by_its_side():
    """By the law of cosines; and a value on the border is below it."""
    lever = LinearToAngle((0,), arm=4.0, horn=5.0)
    angles = lever.forward(np.array([[3.0], [0.0], [100.0]]), None)
    np.testing.assert_allclose(angles, [[np.arcsin(0.6)], [np.pi / 2], [np.pi / 2]], rtol=1e-15)
    sides = Threshold((0,)).forward(np.float32([[-0.5], [0.0], [0.5], [1.0]]), None)
    assert sides.tolist() == [[1.0], [1.0], [-1.0], [-1.0]]


def test_statistics_of_each_step():
    stats = {"min": (0.0, 0.0, 10.0, 10.0), "max": (1.0, 2.0, 11.0, 12.0)}
    normalizer = Normalizer(Normalization("min_max", stats, convention="gr00t", rows=2), 2, "action")
    assert normalizer.unnormalize(np.zeros((2, 2))).tolist() == [[0.5, 1.0], [10.5, 11.0]]
    assert normalizer.unnormalize(np.zeros((1, 2))).tolist() == [[0.5, 1.0]]
    assert not normalizer.is_affine
    with pytest.raises(BundleError, match="min has 3 values, expected 4"):
        Normalizer(Normalization("min_max", {"min": (0.0,) * 3, "max": (1.0,) * 4}, rows=2), 2, "action")


def test_parts_are_normalised_each_in_its_own_way():
    parts = (
        VectorPart("arm", 3, RANGE),
        VectorPart("wrist", 2, Normalization("identity"), sin_cos=True),
        VectorPart("base", 1, Normalization("mean_std", {"mean": (1.0,), "std": (2.0,)}, eps=0.0)),
    )
    normalizer = PartNormalizer(parts, "state")
    x = np.array([3.0, 0.5, 2.0, 0.1, -0.2, 9.0])
    found = normalizer.normalize(x)
    np.testing.assert_allclose(
        found, [0.5, 0.5, 0, *np.sin([0.1, -0.2]), *np.cos([0.1, -0.2]), 4.0], atol=1e-15
    )
    assert normalizer.width == len(found) == 8
    np.testing.assert_allclose(normalizer.unnormalize(found[None])[0], x, atol=1e-12)


@settings(deadline=None)
@given(VECTORS, VECTORS)
def test_rotation_vectors_compose_as_their_matrices(a, b):
    a, b = (x * min(1.0, 3.1 / max(np.linalg.norm(x), 1e-9)) for x in (a, b))
    np.testing.assert_allclose(to_vector(from_vector(a)), a, atol=1e-7)
    found = compose(np.r_[0, 0, 0, a], np.r_[0, 0, 0, b])
    np.testing.assert_allclose(from_vector(found[3:]), from_vector(a) @ from_vector(b), atol=1e-9)


def test_rotations_in_every_form():
    matrices = rotations(0, 200)
    np.testing.assert_allclose(from_6d(to_6d(matrices)), matrices, atol=1e-12)
    np.testing.assert_allclose(from_vector(to_vector(matrices)), matrices, atol=1e-12)
    halves = np.diag([1.0, -1.0, -1.0])  # a half turn, where the trace says nothing of the axis
    np.testing.assert_allclose(np.abs(to_vector(halves)), [np.pi, 0, 0], atol=1e-12)
    assert not to_vector(np.eye(3)).any()


def test_a_scaled_and_skewed_rotation_is_made_orthonormal():
    skewed = np.array([2.0, 0, 0, 1.0, 3.0, 0])
    np.testing.assert_allclose(from_6d(skewed), np.eye(3), atol=1e-15)


def test_what_stands_for_no_one_rotation_is_said():
    """A direction below a thousandth is noise, of rows by themselves and between them."""
    for x, why in (
        ([1e-3, 0, 0, 0], ""),
        ([9.9e-4, 0, 0, 0], "a quaternion of length 0.00099"),
        ([1e-3, 0, 0, 0, 1e-3, 0], ""),
        ([0, 0, 1, 0, 1, 0], ""),
        ([1, 0, 0, 0, 9e-4, 0], "a row of length 0"),
        ([9e-4, 0, 0, 0, 1, 0], "a row of length 0"),
        ([2, 0, 0, 2, 0.0019, 0], "two rows that are parallel"),
        ([2, 0, 0, 2, 0.0021, 0], ""),
        ([0, 0, 0], ""),  # a rotation vector is any
    ):
        assert undetermined(np.array(x)) == why


def test_poses_relative_to_the_state():
    turn, relative = rotations(1, 2)
    state = np.r_[7.0, 1, 2, 3, to_6d(turn)]  # a gripper, then the pose
    action = np.r_[0.1, 0.2, 0.3, to_6d(relative), 5.0][None]
    pose = ComposePose(tuple(range(9)), state_dims=tuple(range(1, 10)))
    add = AddState((9,), state_dims=(0,))
    found = apply_steps(action, (pose, add), state)[0]
    np.testing.assert_allclose(found[:3], turn @ [0.1, 0.2, 0.3] + [1, 2, 3], atol=1e-12)
    np.testing.assert_allclose(from_6d(found[3:9]), turn @ relative, atol=1e-12)
    assert found[9] == 12.0
