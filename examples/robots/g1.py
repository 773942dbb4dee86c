"""Drive the arms of a Unitree G1 (29 joints) with LeRobot's bridge on its computer. Needs numpy, Pillow and pyzmq.

    cd examples/robots
    sinew run POLICY --config g1.toml --robot-options '{"host": "192.168.123.164", "camera": true}'

The bridge (``lerobot/robots/unitree_g1/run_g1_server.py``) publishes the state of the robot as JSON on port 6001. It
receives commands on port 6000 and publishes camera frames on port 5555. LeRobot's own class for these sockets needs
unitree_sdk2py, which is not on PyPI. This class needs no package of Unitree.

**Legs and balance.** The bridge stops the robot's own controller and writes to its motors. So nothing balances the
robot any more, and it must hang or be held. A motor without a command is limp, so this class commands all 29 motors.
The arms follow the policy. Legs and waist keep their joint positions from the start. If commands stop or the program
ends, the motors keep their last targets. L2 + B on the remote control makes the motors limp.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from typing import Any

import numpy as np
import zmq
from PIL import Image
from sinew_client.control import NoObservation
from sinew_client.errors import ClientError

LEG = ("HipPitch", "HipRoll", "HipYaw", "Knee", "AnklePitch", "AnkleRoll")
ARM = ("ShoulderPitch", "ShoulderRoll", "ShoulderYaw", "Elbow", "WristRoll", "WristPitch", "WristYaw")
WAIST = ("WaistYaw", "WaistRoll", "WaistPitch")
# Motors in Unitree's order, with LeRobot's names.
JOINTS = [
    *(f"k{side}{name}.q" for side in ("Left", "Right") for name in LEG),
    *(f"k{name}.q" for name in WAIST),
    *(f"k{side}{name}.q" for side in ("Left", "Right") for name in ARM),
]
ARMS = slice(15, 29)
SLOTS = 35  # number of motors in a command and in a state; the last six do not exist
# stiffness in Nm/rad and damping in Nm s/rad of each motor, from LeRobot
STIFFNESS = [150, 150, 150, 300, 40, 40] * 2 + [250] * 3 + [50, 50, 80, 80, 40, 40, 40] * 2
DAMPING = [2, 2, 2, 4, 2, 2] * 2 + [5] * 3 + [3, 3, 3, 3, 1.5, 1.5, 1.5] * 2
TOPIC = "rt/lowcmd"


class G1:
    """Both arms as a robot for ``sinew run``: 14 joints in radians, left arm first.

    Args:
        host: Address of the robot's computer.
        camera: True if the bridge has a camera (``--camera``). Its frame has the name ``head_camera``.
        ports: Ports of commands, state and camera.
        timeout: Seconds to wait for the first state.

    Raises:
        ClientError: No state arrived in time.
    """

    joint_unit = "rad"
    joints = JOINTS[ARMS]
    motion = {"kind": "absolute"}  # noqa: RUF012 - the same for all robots; the motors take target positions

    def __init__(
        self,
        host: str,
        camera: bool = False,
        ports: tuple[int, int, int] = (6000, 6001, 5555),
        timeout: float = 10.0,
    ):
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PUSH, host, ports[0])
        self._newest: dict[str, tuple[float, Any]] = {}
        self._failed: dict[str, str] = {}
        self._open, self._lock = True, threading.Lock()
        reads = {"state": (ports[1], _state)} | ({"head_camera": (ports[2], _frame)} if camera else {})
        self._threads = [
            threading.Thread(target=self._listen, args=(name, host, *way), daemon=True)
            for name, way in reads.items()
        ]
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + timeout
        while not set(reads) <= set(self._newest):
            if time.monotonic() > deadline:
                silent = [name for name in reads if name not in self._newest]
                why = "".join(f" ({self._failed[name]})" for name in silent if name in self._failed)
                self.close()
                raise ClientError(
                    f"{host}: expected {' and '.join(silent)} of LeRobot's bridge within {timeout:g} s, got none{why}; "
                    "check that the bridge runs"
                )
            time.sleep(0.01)
        self._target, self._mode = self._newest["state"][1]
        self._target = self._target.copy()

    def _socket(self, kind: int, host: str, port: int) -> Any:
        found = self._context.socket(kind)
        found.setsockopt(zmq.LINGER, 0)
        found.setsockopt(zmq.CONFLATE, 1)  # keep only the newest message, in both directions
        if kind == zmq.SUB:
            found.setsockopt(zmq.SUBSCRIBE, b"")
            found.setsockopt(zmq.RCVTIMEO, 200)
        found.connect(f"tcp://{host}:{port}")
        return found

    def _listen(self, name: str, host: str, port: int, read: Any) -> None:
        socket = self._socket(zmq.SUB, host, port)
        while self._open:
            try:
                message = socket.recv()
            except zmq.Again:
                continue
            taken = time.monotonic()
            try:
                value = read(message)
            except (ValueError, KeyError, TypeError, OSError) as error:
                self._failed[name] = f"{name}: {type(error).__name__}: {error}"
                continue
            if value is not None:
                self._newest[name] = (taken, value)
                self._failed.pop(name, None)
        socket.close()

    def observe(self) -> dict[str, Any]:
        """Return the newest state and frame with their times.

        Raises:
            NoObservation: A message is not valid.
        """
        for reason in list(self._failed.values()):
            raise NoObservation(reason)
        newest = dict(self._newest)
        times = {name: taken for name, (taken, _) in newest.items()}
        joints, _ = newest.pop("state")[1]
        images = {name: frame for name, (_, frame) in newest.items()}
        return {"images": images, "state": joints[ARMS].astype(np.float32), "times": times}

    def act(self, row: np.ndarray) -> None:
        """Move the arms to ``row``, radians [14]. All other joints keep their positions from the start."""
        self._target[ARMS] = row
        self._send()

    def hold(self) -> None:
        self._send()

    def _send(self) -> None:
        idle = {"mode": 0, "q": 0.0, "dq": 0.0, "kp": 0.0, "kd": 0.0, "tau": 0.0}
        motors = [
            {"mode": 1, "q": float(q), "dq": 0.0, "kp": kp, "kd": kd, "tau": 0.0}
            for q, kp, kd in zip(self._target, STIFFNESS, DAMPING, strict=True)
        ]
        data = {
            "mode_pr": 0,
            "mode_machine": self._mode,
            "motor_cmd": motors + [idle] * (SLOTS - len(motors)),
        }
        with self._lock:  # the watchdog calls hold from its own thread
            self._commands.send(json.dumps({"topic": TOPIC, "data": data}).encode())

    def close(self) -> None:
        """Close the sockets. The motors keep their last targets."""
        self._open = False
        for thread in self._threads:
            thread.join(2.0)
        self._commands.close()
        self._context.term()


def _state(message: bytes) -> tuple[np.ndarray, int]:
    """Return the joint positions, radians float64 [29], and the kind of robot."""
    data = json.loads(message)["data"]
    joints = np.array([motor["q"] for motor in data["motor_state"][: len(JOINTS)]], np.float64)
    if joints.shape != (len(JOINTS),) or not np.all(np.isfinite(joints)):
        raise ValueError(f"expected {len(JOINTS)} finite joint positions, got shape {list(joints.shape)}")
    return joints, int(data["mode_machine"])


def _frame(message: bytes) -> np.ndarray | None:
    """Return the frame, uint8 [H, W, 3]. None if there was no new frame."""
    jpeg = json.loads(message)["images"].get("head_camera")
    if jpeg is None:
        return None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(jpeg))).convert("RGB"))
