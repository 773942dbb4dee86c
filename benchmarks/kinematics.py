"""Compare forward and inverse kinematics of two arms with MuJoCo, over random poses.

``python -m benchmarks.kinematics --poses 100000``

The poses result from random joint positions within the range of each joint, and within one turn. MuJoCo reads the same
URDF. It computes the pose of the tip for the random joint positions and for the result of the inverse kinematics. The
inverse kinematics starts at most ``--near`` rad from the right joint positions, as in a control loop. It also starts
from the middle of the ranges, which no control loop does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from sinew_client.arm.end_effector import KinematicsOptions
from sinew_client.arm.kinematics import Chain, read_chain

ROBOTS = Path(__file__).parents[1] / "examples" / "robots"
ARMS = ("ur5e", "panda")
EXACT = 1e-6  # largest error of an exact result, in metres and radians


def compiled(path: Path) -> Any:
    """Return the MuJoCo model of a URDF without masses."""
    options = '<mujoco><compiler fusestatic="false" boundmass="1" boundinertia="1"/></mujoco>'
    return mujoco.MjModel.from_xml_string(path.read_text().replace("</robot>", f"{options}</robot>"))


def places(model: Any, tip: str, joints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions float64 [N, 3] and rotations float64 [N, 3, 3] of the tip in MuJoCo, for joints [N, J]."""
    data, body = mujoco.MjData(model), model.body(tip).id
    found, turns = np.empty((len(joints), 3)), np.empty((len(joints), 3, 3))
    for i, each in enumerate(joints):
        data.qpos[:] = each
        mujoco.mj_kinematics(model, data)
        found[i], turns[i] = data.xpos[body], data.xmat[body].reshape(3, 3)
    return found, turns


def drawn(chain: Chain, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return random joint positions within their ranges, float64 [count, J]."""
    return rng.uniform(
        np.maximum(chain.low, -np.pi), np.minimum(chain.high, np.pi), (count, len(chain.joints))
    )


def measured(arm: str, count: int, near: float, seed: int = 0) -> dict[str, Any]:
    """Return the differences between an arm's kinematics and MuJoCo, and how often the inverse kinematics succeeded."""
    path, rng = ROBOTS / f"{arm}.urdf", np.random.default_rng(seed)
    chain = read_chain(path)
    model = compiled(path)
    joints = drawn(chain, count, rng)
    place, turn = places(model, chain.tip, joints)
    tip = chain.forward(joints)
    found: dict[str, Any] = {
        "arm": arm,
        "poses": count,
        "forward_m": float(np.abs(place - tip.place).max()),
        "forward_turn": float(np.abs(turn - tip.turn).max()),
    }
    starts = {"near": joints + rng.uniform(-near, near, joints.shape), "middle": np.zeros_like(joints) + 0.3}
    for name, start in starts.items():
        begun = time.process_time()
        answers = chain.inverse(place, turn, start)
        ms = 1e3 * (time.process_time() - begun) / count
        assert np.all((answers >= chain.low) & (answers <= chain.high))
        away = np.abs(place - places(model, chain.tip, answers)[0]).max(-1)
        apart = chain.apart(place, turn, answers)[1]
        there = (away < EXACT) & (apart < EXACT)
        found[name] = {"there": int(there.sum()), "batched_ms": ms}
        if there.any():
            found[name] |= {"m": float(away[there].max()), "rad": float(apart[there].max())}
    few = joints[: min(count, 2000)]
    least = np.array([chain.singularity(each).least for each in few])
    found["singular"] = float((least < KinematicsOptions().singular).mean())
    begun = time.process_time()
    for i in range(min(count, 200)):
        chain.inverse(place[i], turn[i], np.clip(joints[i] + 0.02, chain.low, chain.high))
    found["one_ms"] = 1e3 * (time.process_time() - begun) / min(count, 200)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--poses", type=int, default=100_000)
    parser.add_argument("--near", type=float, default=0.2, help="radians")
    arguments = parser.parse_args()
    for arm in ARMS:
        print(json.dumps(measured(arm, arguments.poses, arguments.near)))


if __name__ == "__main__":
    main()
