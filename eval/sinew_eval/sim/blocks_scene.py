"""Geometry of the blocks task: the MuJoCo model as text, and the same boxes for the renderer.

World axes in metres: x points to the right and y away from the front camera, z points up. The origin is the middle of
the table's surface.
"""

from __future__ import annotations

import numpy as np

from sinew_eval.sim.prompts import COLORS
from sinew_eval.sim.render import Boxes, RenderCamera

BLOCK_HALF = 0.018
BIN_CENTERS = np.array([[-0.195, 0.0], [0.195, 0.0]])  # left bin, right bin
BIN_INNER = 0.055  # half the inner width of a bin, in metres
BIN_WALL = 0.003  # half the thickness of a wall, in metres
BIN_HEIGHT = 0.040

# In metres: the limits for the point between the fingertips, and its start position.
REACH_LOW = np.array([-0.25, -0.16, 0.016])
REACH_HIGH = np.array([0.25, 0.16, 0.170])
HOME = np.array([0.0, 0.0, 0.125])
OPENING_MAX = 0.064  # distance between the fully open fingers, in metres

# Blocks start at random points of a rectangle (half its size, in metres) with this minimum distance. A gripper
# around one block then touches neither other blocks nor the bins.
FIELD = np.array([0.08, 0.12])
SPACING = 0.075

FINGER_HALF = np.array([0.005, 0.010, 0.032])
FINGER_RISE = 0.022  # height of the finger's centre above the point between the fingertips
PALM_HALF = np.array([0.045, 0.014, 0.010])
PALM_RISE = 0.064
STEM_HALF = np.array([0.010, 0.010, 0.050])
STEM_RISE = 0.124

TIMESTEP = 0.005
CONTROL_HZ = 20
SUBSTEPS = round(1 / (CONTROL_HZ * TIMESTEP))

_RGB = {"red": (225, 60, 50), "green": (60, 190, 80), "blue": (65, 95, 230)}
_BIN_RGB = ((120, 200, 205), (225, 190, 95))
_TABLE_RGB = (196, 188, 178)
_METAL_RGB = (105, 105, 115)
_FINGER_RGB = (50, 50, 58)
BACKGROUND = (92, 98, 108)

FRONT = RenderCamera.looking((0.0, -0.40, 0.56), (0.0, 0.0, 0.02), tan_half=0.38)
# This view is for people and shows the whole scene.
OVERVIEW = RenderCamera.looking((0.16, -0.58, 0.46), (0.0, -0.01, 0.03), tan_half=0.42)
# The wrist camera is in the palm between the fingers and looks straight down. The hand can grasp a block in the
# middle of its image.
WRIST = RenderCamera.looking((0.0, 0.0, 0.052), (0.0, 0.0, 0.0), tan_half=1.1)


def _bin_boxes() -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Return (center, half size, index of the bin) of the four walls of each bin, in metres."""
    out, h, w = [], BIN_HEIGHT / 2, BIN_WALL
    for index, (x, y) in enumerate(BIN_CENTERS):
        r = BIN_INNER + w
        for dx, dy, half in (
            (-r, 0, (w, r + w, h)),
            (r, 0, (w, r + w, h)),
            (0, -r, (BIN_INNER, w, h)),
            (0, r, (BIN_INNER, w, h)),
        ):
            out.append((np.array([x + dx, y + dy, h]), np.array(half), index))
    return out


def model_xml() -> str:
    """Return the MuJoCo model. Its bodies are the hand (three slides, two fingers) and one free body per block."""
    walls = "".join(f'<geom type="box" pos="{_text(c)}" size="{_text(s)}"/>' for c, s, _ in _bin_boxes())
    blocks = "".join(
        f'<body name="{color}" pos="0 0 {0.1 + 0.1 * i}"><freejoint name="{color}"/>'
        f'<geom type="box" size="{BLOCK_HALF} {BLOCK_HALF} {BLOCK_HALF}" mass="0.05" friction="1.0 0.01 0.001"'
        ' condim="4"/></body>'
        for i, color in enumerate(COLORS)
    )
    fingers = "".join(
        f'<body name="finger{sign}" pos="{sign * FINGER_HALF[0]} 0 {FINGER_RISE}">'
        f'<joint name="finger{sign}" type="slide" axis="{sign} 0 0" range="0 {OPENING_MAX / 2}" damping="2"/>'
        f'<geom type="box" size="{_text(FINGER_HALF)}" mass="0.04" friction="1.5 0.02 0.001" condim="4"/></body>'
        for sign in (-1, 1)
    )
    slides = "".join(
        f'<joint name="{n}" type="slide" axis="{a}"/>'
        for n, a in (("x", "1 0 0"), ("y", "0 1 0"), ("z", "0 0 1"))
    )
    servos = "".join(f'<position joint="{n}" kp="3600" kv="110"/>' for n in "xyz") + "".join(
        f'<position joint="finger{s}" kp="400" kv="10" forcerange="-7 7"/>' for s in (-1, 1)
    )
    return f"""<mujoco model="sinew blocks">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic" impratio="10"/>
  <worldbody>
    <geom type="plane" size="1 1 0.1" friction="0.8 0.01 0.001"/>
    {walls}
    {blocks}
    <body name="hand" gravcomp="1">
      {slides}
      <geom type="box" pos="0 0 {PALM_RISE}" size="{_text(PALM_HALF)}" mass="0.5"/>
      {fingers.replace("<body ", '<body gravcomp="1" ')}
    </body>
  </worldbody>
  <actuator>{servos}</actuator>
</mujoco>"""


def _text(v: np.ndarray) -> str:
    return " ".join(f"{x:.6g}" for x in v)


def static_boxes() -> Boxes:
    """Return the boxes of the table and the bins. The table is a thin slab, and each bin has a floor in its colour."""
    center = [np.array([0.0, 0.0, -0.01])]
    half = [np.array([0.34, 0.22, 0.01])]
    color: list[tuple[float, ...]] = [_TABLE_RGB]
    for c, s, index in _bin_boxes():
        center.append(c)
        half.append(s)
        color.append(_BIN_RGB[index])
    for (x, y), rgb in zip(BIN_CENTERS, _BIN_RGB, strict=True):
        center.append(np.array([x, y, 0.0005]))
        half.append(np.array([BIN_INNER, BIN_INNER, 0.0005]))
        color.append(tuple(0.6 * v for v in rgb))
    return _boxes(center, half, color)


def hand_boxes(ee: np.ndarray, opening: float) -> Boxes:
    """Return the boxes of the gripper.

    Args:
        ee: Point between the fingertips, [3] in metres.
        opening: Distance between the fingers, in metres.
    """
    x = opening / 2 + FINGER_HALF[0]
    center = [(-x, 0, FINGER_RISE), (x, 0, FINGER_RISE), (0, 0, PALM_RISE), (0, 0, STEM_RISE)]
    half = [FINGER_HALF, FINGER_HALF, PALM_HALF, STEM_HALF]
    color = [_FINGER_RGB, _FINGER_RGB, _METAL_RGB, _METAL_RGB]
    return _boxes([ee + np.array(c) for c in center], half, color)


def block_boxes(position: np.ndarray, rotation: np.ndarray) -> Boxes:
    """Return the boxes of the blocks, in the order of COLORS.

    Args:
        position: Centres, [3, 3] in metres.
        rotation: Rotation matrices, [3, 3, 3].
    """
    half = np.full((len(COLORS), 3), BLOCK_HALF)
    return Boxes(position, half, rotation, np.array([_RGB[c] for c in COLORS], dtype=np.float64))


def _boxes(center: list, half: list, color: list) -> Boxes:
    n = len(center)
    return Boxes(
        np.array(center, dtype=np.float64),
        np.array(half, dtype=np.float64),
        np.broadcast_to(np.eye(3), (n, 3, 3)),
        np.array(color, dtype=np.float64),
    )
