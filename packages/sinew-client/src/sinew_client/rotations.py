"""Convert rotations between the forms that policies and robots use, and compose poses.

The forms are:

* 6D: the first two rows of the rotation matrix, as six numbers (Zhou et al. 2019).
* Rotation vector: the axis times the angle in radians.
* Quaternion: [x, y, z, w].
* Roll, pitch and yaw: angles in radians about the fixed axes x, y and z, in this order, as in URDF.

All functions expect float64 [..., n] and compute in float64.
"""

from __future__ import annotations

import numpy as np

TINY = 1e-12
FLAT = 1e-3  # shorter vectors, and angles with a smaller sine, do not determine a direction


def compose(reference: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """Convert poses that are relative to a reference pose to absolute poses: T_reference T_relative.

    A pose is [x, y, z, rotation]. The rotation is in the 6D form, or a rotation vector.

    Args:
        reference: The reference pose, [9] or [6].
        relative: The relative poses, [..., 9] or [..., 6], in the same form.

    Returns:
        The absolute poses, in the shape of ``relative``.

    Example:
        >>> compose(np.array([1.0, 0, 0, 0, 0, 0]), np.array([0.5, 0, 0, 0, 0, 0]))[:3]
        array([1.5, 0. , 0. ])
    """
    to_matrix, from_matrix = (from_6d, to_6d) if relative.shape[-1] == 9 else (from_vector, to_vector)
    turn = to_matrix(reference[3:])  # [3, 3]
    place = relative[..., :3] @ turn.T + reference[:3]
    return np.concatenate([place, from_matrix(turn @ to_matrix(relative[..., 3:]))], axis=-1)


def from_6d(x: np.ndarray) -> np.ndarray:
    """Convert 6D rotations [..., 6] to matrices [..., 3, 3]. The two rows are orthonormalised (Gram-Schmidt)."""
    first = x[..., :3] / _length(x[..., :3])
    second = x[..., 3:] - (first * x[..., 3:]).sum(axis=-1, keepdims=True) * first
    second = second / _length(second)
    return np.stack([first, second, np.cross(first, second)], axis=-2)


def undetermined(x: np.ndarray) -> str:
    """Check that the numbers of a rotation determine a rotation.

    Args:
        x: A quaternion [4] or a 6D rotation [6]. All other forms are always valid.

    Returns:
        The reason why the numbers do not determine a rotation, such as "a quaternion of length 0"; "" if they do.
    """
    if len(x) == 4 and (size := float(np.linalg.norm(x))) < FLAT:
        return f"a quaternion of length {size:.2g}"
    if len(x) == 6:
        first, second = x[:3], x[3:]
        sizes = float(np.linalg.norm(first) * np.linalg.norm(second))
        if min(np.linalg.norm(first), np.linalg.norm(second)) < FLAT:
            return "a row of length 0"
        if np.linalg.norm(np.cross(first, second)) < FLAT * sizes:
            return "two rows that are parallel"
    return ""


def to_6d(matrix: np.ndarray) -> np.ndarray:
    """Convert matrices [..., 3, 3] to 6D rotations [..., 6]."""
    return matrix[..., :2, :].reshape(*matrix.shape[:-2], 6)


def from_vector(x: np.ndarray) -> np.ndarray:
    """Convert rotation vectors [..., 3] to matrices [..., 3, 3] (Rodrigues' formula)."""
    angle = np.linalg.norm(x, axis=-1)[..., None, None]
    cross = np.zeros((*x.shape[:-1], 3, 3))
    cross[..., 0, 1], cross[..., 0, 2], cross[..., 1, 2] = -x[..., 2], x[..., 1], -x[..., 0]
    cross -= np.swapaxes(cross, -1, -2)
    # This equals (1 - cos a) / a^2, but it is finite at a = 0.
    one_minus_cos = 0.5 * np.sinc(angle / (2 * np.pi)) ** 2
    return np.eye(3) + np.sinc(angle / np.pi) * cross + one_minus_cos * (cross @ cross)


def to_vector(matrix: np.ndarray) -> np.ndarray:
    """Convert matrices [..., 3, 3] to rotation vectors [..., 3] with angles from 0 to pi."""
    q = to_quaternion(matrix)
    sine = np.linalg.norm(q[..., :3], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(sine, q[..., 3:])
    return q[..., :3] * np.where(sine < TINY, 2.0, angle / np.maximum(sine, TINY))


def from_quaternion(x: np.ndarray) -> np.ndarray:
    """Convert quaternions [x, y, z, w], [..., 4], of any length except 0, to matrices [..., 3, 3]."""
    q = x / _length(x)
    cross = np.zeros((*x.shape[:-1], 3, 3))
    cross[..., 0, 1], cross[..., 0, 2], cross[..., 1, 2] = -q[..., 2], q[..., 1], -q[..., 0]
    cross -= np.swapaxes(cross, -1, -2)
    return np.eye(3) + 2 * q[..., 3, None, None] * cross + 2 * (cross @ cross)


def from_rpy(x: np.ndarray) -> np.ndarray:
    """Convert roll, pitch and yaw [..., 3] to matrices [..., 3, 3]: R_z(yaw) R_y(pitch) R_x(roll)."""
    axes = np.eye(3)
    roll, pitch, yaw = (from_vector(x[..., i, None] * axes[i]) for i in range(3))
    return yaw @ pitch @ roll


def to_rpy(matrix: np.ndarray) -> np.ndarray:
    """Convert matrices [..., 3, 3] to roll, pitch and yaw [..., 3]. At a pitch of 90 degrees, the roll is 0."""
    m = matrix
    flat = np.hypot(m[..., 0, 0], m[..., 1, 0])
    locked = flat < 1e-9
    roll = np.where(locked, 0.0, np.arctan2(m[..., 2, 1], m[..., 2, 2]))
    yaw = np.where(locked, np.arctan2(-m[..., 0, 1], m[..., 1, 1]), np.arctan2(m[..., 1, 0], m[..., 0, 0]))
    return np.stack([roll, np.arctan2(-m[..., 2, 0], flat), yaw], axis=-1)


def to_quaternion(matrix: np.ndarray) -> np.ndarray:
    """Convert matrices [..., 3, 3] to quaternions [x, y, z, w], [..., 4], with w >= 0."""
    m = matrix
    trace = m[..., 0, 0] + m[..., 1, 1] + m[..., 2, 2]
    diagonal = np.stack([m[..., 0, 0], m[..., 1, 1], m[..., 2, 2]], axis=-1)
    # There are four candidates: 4 q_i q for each component q_i of the quaternion. The candidate with the largest q_i is
    # the most accurate (Shepperd 1978). `squares` has 4 q_i^2.
    squares = np.concatenate([1 + trace[..., None], 1 + 2 * diagonal - trace[..., None]], axis=-1)
    antisymmetric = np.stack(
        [m[..., 2, 1] - m[..., 1, 2], m[..., 0, 2] - m[..., 2, 0], m[..., 1, 0] - m[..., 0, 1]], axis=-1
    )
    candidates = np.zeros((*squares.shape, 4))
    candidates[..., 0, 1:] = candidates[..., 1:, 0] = antisymmetric
    for i in range(3):
        for j in range(3):
            candidates[..., 1 + i, 1 + j] = m[..., i, j] + m[..., j, i]
    for i in range(4):
        candidates[..., i, i] = squares[..., i]
    best = squares.argmax(axis=-1)[..., None, None]
    q = np.take_along_axis(candidates, best, axis=-2)[..., 0, :]
    q = q / _length(q)
    return np.roll(np.where(q[..., :1] < 0, -q, q), -1, axis=-1)


def _length(x: np.ndarray) -> np.ndarray:
    return np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), TINY)
