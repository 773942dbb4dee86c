"""Pictures of the blocks task with MuJoCo's own renderer: lights, shadows, any size. They are for people, and
policies do not receive them.

The renderer needs OpenGL without a display, through EGL or OSMesa. The choice is fixed when mujoco is imported.
Therefore the renderer runs in its own process, and this process stays free of graphics libraries. ``python -m
sinew_eval.sim.film WIDTH HEIGHT POSES.npy`` writes raw frames to standard output.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
from sinew.core import SinewError
from sinew_client.untrusted import read_npy

from sinew_eval.sim import blocks_scene as scene
from sinew_eval.sim.prompts import COLORS

BACKENDS = ("egl", "osmesa")
WIDTH, HEIGHT = 960, 720
_EYE, _AT, _FOVY = np.array([0.13, -0.62, 0.44]), np.array([0.0, -0.01, 0.02]), 38.0
_RGBA = {"red": "0.85 0.18 0.15 1", "green": "0.2 0.68 0.28 1", "blue": "0.2 0.34 0.88 1"}
_WALLS = ("0.40 0.72 0.74 1", "0.88 0.72 0.34 1")  # left bin, right bin
_METAL, _FINGERS = "0.55 0.56 0.60 1", "0.16 0.16 0.19 1"


@lru_cache(maxsize=1)
def backend() -> str:
    """Find the OpenGL backend that works on this machine: "egl" or "osmesa".

    Raises:
        SinewError: Neither works. The message states the reason for each.
    """
    reasons = []
    for name in BACKENDS:
        try:
            next(_draw(name, np.zeros((0, 1)), 32, 32), None)
            return name
        except SinewError as error:
            reasons.append(f"{name}: {error}")
    raise SinewError(
        f"a film needs OpenGL without a display; install libegl1 or libosmesa6 ({'; '.join(reasons)})"
    )


def frames(poses: np.ndarray, width: int = WIDTH, height: int = HEIGHT) -> Iterator[np.ndarray]:
    """Draw a frame for each pose.

    Args:
        poses: Poses of ``BlocksEnv.pose``, float64 [n, nq].
        width: Width in pixels.
        height: Height in pixels.

    Yields:
        uint8 [height, width, 3].
    """
    yield from _draw(backend(), poses, width, height)


def _draw(name: str, poses: np.ndarray, width: int, height: int) -> Iterator[np.ndarray]:
    with tempfile.TemporaryDirectory(prefix="sinew-film-") as folder:
        poses_file, log = Path(folder) / "poses.npy", Path(folder) / "said"
        np.save(poses_file, np.asarray(poses, np.float64))
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "sinew_eval.sim.film", str(width), str(height), str(poses_file)],
                env={**os.environ, "MUJOCO_GL": name, "PYOPENGL_PLATFORM": name},
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert process.stdout is not None
        size = width * height * 3
        try:
            while len(data := process.stdout.read(size)) == size:
                yield np.frombuffer(data, np.uint8).reshape(height, width, 3)
        finally:
            process.stdout.close()
            code = process.wait()
        if code:
            lines = log.read_text().strip().splitlines()  # own file: written by this process
            raise SinewError(lines[-1] if lines else f"the renderer ended with exit code {code}")


def model_xml() -> str:
    """Return the task's MuJoCo model with colours, lights, a table and a sky. It is only posed and drawn, never
    simulated.
    """
    root = ElementTree.fromstring(scene.model_xml())  # noqa: S314 - the XML is our own
    visual = ElementTree.SubElement(root, "visual")
    ElementTree.SubElement(visual, "global", offwidth="1920", offheight="1440")
    ElementTree.SubElement(visual, "quality", shadowsize="4096", offsamples="8")
    ElementTree.SubElement(
        visual, "headlight", ambient="0.32 0.32 0.34", diffuse="0.25 0.25 0.25", specular="0 0 0"
    )
    asset = ElementTree.SubElement(root, "asset")
    ElementTree.SubElement(
        asset, "texture", type="skybox", builtin="gradient", rgb1="0.80 0.86 0.92", rgb2="0.42 0.47 0.54",
        width="256", height="1536",
    )  # fmt: skip
    ElementTree.SubElement(
        asset, "texture", name="wood", type="2d", builtin="flat", rgb1="0.80 0.74 0.66", rgb2="0.80 0.74 0.66",
        mark="random", markrgb="0.74 0.67 0.58", random="0.02", width="512", height="512",
    )  # fmt: skip
    ElementTree.SubElement(
        asset, "material", name="table", texture="wood", texrepeat="2 2", specular="0.2", shininess="0.3"
    )
    world = root.find("worldbody")
    assert world is not None
    right, up = _axes(_EYE, _AT)
    ElementTree.SubElement(
        world, "camera", name="film", pos=_text(_EYE), xyaxes=f"{_text(right)} {_text(up)}", fovy=str(_FOVY)
    )
    ElementTree.SubElement(
        world, "light", pos="-0.35 -0.45 0.9", dir="0.35 0.42 -0.9", diffuse="0.75 0.73 0.68", castshadow="true",
        specular="0.25 0.25 0.25",
    )  # fmt: skip
    boxes = iter([geom for geom in world.findall("geom") if geom.get("type") == "box"])
    for color in _WALLS:
        for _ in range(4):
            next(boxes).set("rgba", color)
    plane = world.find("geom[@type='plane']")
    assert plane is not None
    plane.set("material", "table")
    for index, center in enumerate(scene.BIN_CENTERS):
        ElementTree.SubElement(
            world, "geom", type="box", pos=f"{center[0]} {center[1]} 0.0005", rgba=_WALLS[index],
            size=f"{scene.BIN_INNER} {scene.BIN_INNER} 0.0008",
        )  # fmt: skip
    for color in COLORS:
        block = world.find(f"body[@name='{color}']/geom")
        assert block is not None
        block.set("rgba", _RGBA[color])
    hand = world.find("body[@name='hand']")
    assert hand is not None
    for geom in hand.findall("geom"):
        geom.set("rgba", _METAL)
    ElementTree.SubElement(
        hand, "geom", type="box", pos=f"0 0 {scene.STEM_RISE + 0.15}", rgba=_METAL,
        size=f"{scene.STEM_HALF[0]} {scene.STEM_HALF[1]} {scene.STEM_HALF[2] + 0.15}",
    )  # fmt: skip
    for finger in hand.findall("body/geom"):
        finger.set("rgba", _FINGERS)
    return ElementTree.tostring(root, encoding="unicode")


def _axes(eye: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the right and up directions of a camera at ``eye`` that looks at ``at``, as unit vectors."""
    forward = (at - eye) / np.linalg.norm(at - eye)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    return right, np.cross(right, forward)


def _text(values: np.ndarray) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def main(width: int, height: int, poses: Path) -> None:
    """Draw every pose of a file, and write the frames to standard output."""
    import mujoco

    model = mujoco.MjModel.from_xml_string(model_xml())
    data = mujoco.MjData(model)
    with mujoco.Renderer(model, height, width) as renderer:
        for pose in read_npy(poses):
            data.qpos[:] = pose
            mujoco.mj_forward(model, data)
            renderer.update_scene(data, camera="film")
            sys.stdout.buffer.write(np.ascontiguousarray(renderer.render()).tobytes())
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
