"""A renderer for scenes of coloured boxes, in pure numpy: no OpenGL, no display, no meshes and no files.

The faces of a box are convex. A pixel is inside a face if its viewing ray is on the inner side of the four planes
through the camera and the face's edges (homogeneous rasterisation, Olano and Greer 1997). Each plane, and the inverse
depth of the face, is linear in the pixel's coordinates. Therefore a frame needs only a few broadcast additions and no
clipping, and a face may even extend behind the camera.

After the camera transform, all arithmetic is single additions and comparisons of float32 numbers. Therefore the same
poses give the same bytes on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=np.float64)
# Corner indices of each face, counter-clockwise as seen from outside. The order of the faces is -x, +x, -y, +y, -z, +z.
_FACES = np.array(
    [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]], dtype=np.intp
)
# The direction of the light: from above, and a little from the viewer's left. The two numbers below it are the shares
# of ambient and diffuse light.
_LIGHT = np.array([-0.25, -0.40, 0.88])
_AMBIENT, _DIFFUSE = 0.55, 0.45
_BATCH = 32  # number of faces that are drawn at once, so that the work arrays fit into the CPU's cache


@dataclass(frozen=True)
class Boxes:
    """n boxes.

    Attributes:
        center: Centres in metres, [n, 3].
        half: Half sizes in metres, [n, 3].
        rotation: Rotation matrices, [n, 3, 3]. The columns are the box's axes in the world.
        color: Colours in full light, [n, 3], from 0 to 255.
    """

    center: F64
    half: F64
    rotation: F64
    color: F64

    def joined(self, other: Boxes) -> Boxes:
        return Boxes(
            np.concatenate([self.center, other.center]),
            np.concatenate([self.half, other.half]),
            np.concatenate([self.rotation, other.rotation]),
            np.concatenate([self.color, other.color]),
        )


@dataclass(frozen=True)
class RenderCamera:
    """A pinhole camera with square pixels and a square image.

    Attributes:
        position: Position in the world, [3] in metres.
        rotation: [3, 3]. The rows are the directions right, down and forward in the world.
        tan_half: Tangent of half the field of view, equal in both directions.
    """

    position: F64
    rotation: F64
    tan_half: float

    @classmethod
    def looking(cls, position: tuple[float, ...], target: tuple[float, ...], tan_half: float) -> RenderCamera:
        """Build a camera that looks at a target, with a level horizon.

        Only square roots are used, which every machine rounds equally.

        Args:
            position: Position of the camera, [3] in metres.
            target: Point in the middle of the image, [3] in metres.
            tan_half: Tangent of half the field of view.
        """
        p, t = np.asarray(position, dtype=np.float64), np.asarray(target, dtype=np.float64)
        forward = _unit(t - p)
        up = np.array([0.0, 0.0, 1.0]) if abs(forward[2]) < 0.99 else np.array([0.0, 1.0, 0.0])
        right = _unit(np.cross(forward, up))
        return cls(p, np.stack([right, np.cross(forward, right), forward]), tan_half)

    def moved(self, offset: F64) -> RenderCamera:
        return RenderCamera(self.position + offset, self.rotation, self.tan_half)


@dataclass
class RenderedFrame:
    """A picture that is being drawn.

    Attributes:
        color: Colour of each pixel, uint8 [size, size, 3].
        inverse_depth: 1 / depth of each pixel's nearest surface so far, float32 [size, size].
    """

    color: NDArray[np.uint8]
    inverse_depth: F32

    @classmethod
    def empty(cls, size: int, background: tuple[int, int, int]) -> RenderedFrame:
        color = np.empty((size, size, 3), dtype=np.uint8)
        color[:] = background
        return cls(color, np.zeros((size, size), dtype=np.float32))

    def copy(self) -> RenderedFrame:
        return RenderedFrame(self.color.copy(), self.inverse_depth.copy())


def draw(frame: RenderedFrame, camera: RenderCamera, boxes: Boxes) -> RenderedFrame:
    """Draw boxes into a frame in place. Nearer surfaces hide others.

    Args:
        frame: The frame.
        camera: The camera.
        boxes: The boxes.

    Returns:
        ``frame``.
    """
    planes, colors = _visible_faces(camera, boxes)
    size = frame.color.shape[0]
    # Coordinates of the pixel centres in the image plane at depth 1: u points to the right, v points down.
    axis = ((np.arange(size) + 0.5) * (2.0 / size) - 1.0) * camera.tan_half
    along_u = (planes[..., 0:1] * axis).astype(np.float32)  # [faces, 5, size]
    along_v = (planes[..., 1:2] * axis + planes[..., 2:3]).astype(np.float32)  # [faces, 5, size]
    for first in range(0, len(planes), _BATCH):
        part = slice(first, first + _BATCH)
        _paint(frame, along_u[part], along_v[part], colors[part])
    return frame


def _paint(frame: RenderedFrame, along_u: F32, along_v: F32, colors: NDArray[np.uint8]) -> None:
    """Draw faces into a frame.

    Args:
        frame: The frame.
        along_u: Four edge planes and the inverse depth per column, float32 [faces, 5, size].
        along_v: Four edge planes and the inverse depth per row, float32 [faces, 5, size].
        colors: Colours of the faces, [faces, 3].
    """
    values = along_v[:, :, :, None] + along_u[:, :, None, :]  # [faces, 5, rows, cols]
    inside = np.minimum(np.minimum(values[:, 0], values[:, 1]), np.minimum(values[:, 2], values[:, 3]))
    depth = np.where(inside >= 0, values[:, 4], np.float32(-1.0))  # [faces, rows, cols]
    nearest = depth[0].copy()
    winner = np.zeros(nearest.shape, dtype=np.intp)
    for index in range(1, len(depth)):
        closer = depth[index] > nearest
        winner[closer] = index
        np.maximum(nearest, depth[index], out=nearest)
    seen = nearest > frame.inverse_depth
    frame.color[seen] = colors[winner[seen]]
    frame.inverse_depth[seen] = nearest[seen]


def _visible_faces(camera: RenderCamera, boxes: Boxes) -> tuple[F64, NDArray[np.uint8]]:
    """Find the faces that the camera can see.

    Args:
        camera: The camera.
        boxes: The boxes.

    Returns:
        Planes [faces, 5, 3]: for each face, the planes through its four edges, which tell whether a pixel is inside the
        face, and the plane of its inverse depth. Also colours [faces, 3].
    """
    corners = boxes.center[:, None] + (_SIGNS * boxes.half[:, None]) @ boxes.rotation.transpose(0, 2, 1)
    seen_from = (corners - camera.position) @ camera.rotation.T  # [n, 8, 3] right, down, forward
    quads = seen_from[:, _FACES].reshape(-1, 4, 3)  # [6 n, corner, 3]
    normal = _cross(quads[:, 1] - quads[:, 0], quads[:, 2] - quads[:, 0])  # outward
    offset = (normal * quads[:, 0]).sum(-1)
    # A face is outside of the image if all its corners are beyond one side of the viewing pyramid, or behind
    # the camera.
    x, y, z = np.moveaxis(quads, -1, 0)  # each [6 n, 4]
    limit = camera.tan_half * z
    beyond = (x > limit).all(-1) | (x < -limit).all(-1) | (y > limit).all(-1) | (y < -limit).all(-1)
    keep = (offset < 0) & ~beyond & (z > 0).any(-1)

    quads, normal, offset = quads[keep], normal[keep], offset[keep]
    edges = _cross(np.roll(quads, -1, axis=1), quads)  # [faces, 4, 3], positive inside
    inverse_depth = normal / offset[:, None]
    planes = np.concatenate([edges, inverse_depth[:, None]], axis=1)

    outward = np.concatenate([-boxes.rotation, boxes.rotation], axis=2)  # [n, 3, -x -y -z x y z]
    outward = outward.transpose(0, 2, 1)[:, [0, 3, 1, 4, 2, 5]].reshape(-1, 3)[keep]
    light = _AMBIENT + _DIFFUSE * np.maximum(outward @ _LIGHT, 0.0)
    colors = np.repeat(boxes.color, 6, axis=0)[keep] * light[:, None]
    return planes, np.minimum(colors + 0.5, 255.0).astype(np.uint8)


def rotation_from_quaternion(quaternion: F64) -> F64:
    """Convert unit quaternions (w, x, y, z) [n, 4] to rotation matrices [n, 3, 3]."""
    w, x, y, z = np.moveaxis(np.asarray(quaternion, dtype=np.float64), -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), -1, 0)


def _cross(a: F64, b: F64) -> F64:
    """Return the cross product over the last axis. numpy's own function spends most of its time on checks of shapes."""
    ax, ay, az = a[..., 0], a[..., 1], a[..., 2]
    bx, by, bz = b[..., 0], b[..., 1], b[..., 2]
    return np.stack([ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx], axis=-1)


def _unit(v: F64) -> F64:
    return v / np.sqrt((v * v).sum())
