"""The blocks task as a LeRobot robot, for ``lerobot-rollout`` and, before 0.5, ``lerobot-record``, and a leader arm.

LeRobot finds it in a package ``robots`` with ``--robot.discover_packages_path=robots``. Its joints are the numbers of
the gantry. Every command is one control step of the simulation, independent of the clock. At the end of an episode,
the robot interrupts the program, as a user would. It writes the number of commands and the result to the file
``ROBOT_LOG``. The file ``ROBOT_JOURNAL`` gets a line for each command, with the state and the brightness of the
frames, and a line for each action of the leader. An action of the leader has a value that no policy returns, and a
counter.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import sinew_eval.sim  # noqa: F401 - registers the tasks
from lerobot.robots import Robot, RobotConfig
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig

JOINTS = ("x.pos", "y.pos", "z.pos", "gripper.pos")
MOST = 120  # largest number of commands of an episode


def journal(**entry: Any) -> None:
    if path := os.environ.get("ROBOT_JOURNAL"):
        with Path(path).open("a") as file:
            file.write(json.dumps(entry) + "\n")


@RobotConfig.register_subclass("blocks")
@dataclass
class BlocksConfig(RobotConfig):
    color: str = "red"
    side: str = "left"
    seed: int = 5000
    most: int = MOST
    ends: bool = True  # interrupt the program at the end of an episode
    look_s: float = 0.0  # seconds that an observation takes, as with a real camera


class Blocks(Robot):
    config_class = BlocksConfig
    name = "blocks"

    def __init__(self, config: BlocksConfig):
        super().__init__(config)
        self.cameras: dict[str, Any] = {}
        self.most, self.ends, self.look_s = config.most, config.ends, config.look_s
        self.env = gymnasium.make("sinew/Blocks-v0", max_episode_steps=10 * self.most)
        options = {"color": config.color, "side": config.side, "phrasing": 0}
        self.seen, _ = self.env.reset(seed=config.seed, options=options)
        self.commands, self.success = 0, False

    @property
    def observation_features(self) -> dict:
        frames = {camera: box.shape for camera, box in self.env.observation_space["images"].items()}
        return {**dict.fromkeys(JOINTS, float), **frames}

    @property
    def action_features(self) -> dict:
        return dict.fromkeys(JOINTS, float)

    def get_observation(self) -> dict[str, Any]:
        time.sleep(self.look_s)
        return {**dict(zip(JOINTS, map(float, self.seen["state"]), strict=True)), **self.seen["images"]}

    def send_action(self, action: dict[str, float]) -> dict[str, float]:
        if (self.success and self.ends) or self.commands >= self.most:
            return action
        command = np.array([action[name] for name in JOINTS], np.float32)
        bright = {camera: float(frame.mean()) / 255 for camera, frame in self.seen["images"].items()}
        journal(kind="command", row=command.tolist(), state=self.seen["state"].tolist(), bright=bright)
        self.seen, _, self.success, _, _ = self.env.step(command)
        self.commands += 1
        if (self.success and self.ends) or self.commands == self.most:
            log = {"commands": self.commands, "success": bool(self.success)}
            if path := os.environ.get("ROBOT_LOG"):
                Path(path).write_text(json.dumps(log))
            os.kill(os.getpid(), signal.SIGINT)
        return action

    def disconnect(self) -> None:
        self.env.close()

    is_connected = True
    is_calibrated = True

    def connect(self, calibrate: bool = True) -> None: ...
    def calibrate(self) -> None: ...
    def configure(self) -> None: ...


@TeleoperatorConfig.register_subclass("blocks_leader")
@dataclass
class BlocksLeaderConfig(TeleoperatorConfig):
    pass


class BlocksLeader(Teleoperator):
    config_class = BlocksLeaderConfig
    name = "blocks_leader"
    given = 0

    @property
    def action_features(self) -> dict:
        return dict.fromkeys(JOINTS, float)

    @property
    def feedback_features(self) -> dict:
        return {}

    def get_action(self) -> dict[str, float]:
        self.given += 1
        row = np.float32([0.5, -0.5, self.given / 1024, 1.0])
        journal(kind="leader", row=row.tolist())
        return dict(zip(JOINTS, map(float, row), strict=True))

    def send_feedback(self, feedback: dict[str, float]) -> None: ...
    def disconnect(self) -> None: ...

    is_connected = True
    is_calibrated = True

    def connect(self, calibrate: bool = True) -> None: ...
    def calibrate(self) -> None: ...
    def configure(self) -> None: ...
