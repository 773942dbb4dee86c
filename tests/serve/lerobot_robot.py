"""A robot without hardware for LeRobot's own client, and the command line of this client.

``python tests/serve/lerobot_robot.py FLAGS`` is ``python -m lerobot.async_inference.robot_client FLAGS`` with one more
robot type, ``without_hardware``, in an environment made from packages/clients.txt. LeRobot is unchanged, except for
nine lines of syntax under Python 3.11 (lerobot_syntax.py). The robot writes its observations and commands to the file
ROBOT_LOG, and ends after ROBOT_STEPS actions.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lerobot
import numpy as np
import torchvision_operators  # noqa: F401 - beside this file, and before LeRobot
from lerobot.cameras import CameraConfig
from lerobot.robots import Robot, RobotConfig

JOINTS = [f"joint{index}.pos" for index in range(int(os.environ.get("ROBOT_JOINTS", "6")))]


@RobotConfig.register_subclass("without_hardware")
@dataclass
class WithoutHardwareConfig(RobotConfig):
    port: str = ""
    cameras: dict[str, CameraConfig] = field(default_factory=dict)


class WithoutHardware(Robot):
    config_class = WithoutHardwareConfig
    name = "without_hardware"

    def __init__(self, config: WithoutHardwareConfig):
        super().__init__(config)
        self.config = config
        self.rng = np.random.default_rng(0)
        self.executed: list[list[float]] = []
        self.seen: list[dict[str, Any]] = []

    @property
    def observation_features(self) -> dict:
        frames = {name: (camera.height, camera.width, 3) for name, camera in self.config.cameras.items()}
        return {**dict.fromkeys(JOINTS, float), **frames}

    @property
    def action_features(self) -> dict:
        return dict.fromkeys(JOINTS, float)

    def get_observation(self) -> dict[str, Any]:
        frames = {
            name: self.rng.integers(0, 256, (camera.height, camera.width, 3), dtype=np.uint8)
            for name, camera in self.config.cameras.items()
        }
        joints = self.rng.uniform(-1, 1, len(JOINTS)).tolist()
        self.seen.append({"joints": joints, "executed": len(self.executed)})
        return {**dict(zip(JOINTS, joints, strict=True)), **frames}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        self.executed.append([action[name] for name in JOINTS])
        if len(self.executed) >= int(os.environ["ROBOT_STEPS"]):
            raise KeyboardInterrupt  # an interrupt as by a user; the client then ends normally
        return action

    def disconnect(self) -> None:
        log = {"executed": self.executed, "seen": self.seen, "lerobot": lerobot.__version__}
        Path(os.environ["ROBOT_LOG"]).write_text(json.dumps(log))

    is_connected = True
    is_calibrated = True

    def connect(self, calibrate: bool = True) -> None: ...
    def calibrate(self) -> None: ...
    def configure(self) -> None: ...


if __name__ == "__main__":
    # LeRobot looks for the robot in the module of its configuration, which must not be __main__.
    sys.modules["lerobot_robot"] = sys.modules["__main__"]
    WithoutHardwareConfig.__module__ = "lerobot_robot"

    runpy.run_module("lerobot.async_inference.robot_client", run_name="__main__", alter_sys=True)
