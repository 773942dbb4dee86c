"""A simulation of LeRobot's bridge on a Unitree G1: JSON over ZeroMQ, and motors that follow their targets.

It is written from the messages of the bridge (lerobot/robots/unitree_g1/run_g1_server.py), and shares nothing with
examples/robots/g1.py. A motor in mode 1 moves to its target at a limited speed if its stiffness is above 0. Any other
motor is limp.
"""

from __future__ import annotations

import base64
import io
import json
import math
import threading
import time
from typing import Any

import numpy as np
import zmq
from PIL import Image

MOTORS, SLOTS = 29, 35
PERIOD = 0.004
FASTEST = 10.0  # largest speed of each motor in rad/s
FRAME = np.full((48, 64, 3), 90, np.uint8)
SILENT = {"gyroscope": [0.0] * 3, "accelerometer": [0.0, 0.0, 9.81], "rpy": [0.0] * 3, "temperature": 30.0}


class Bridge:
    """The bridge. Every joint starts at ``start``, in radians. ports: those of commands, state and camera."""

    def __init__(self, start: float = 0.1):
        self.joints, self.targets = np.full(MOTORS, start), []
        self.limp: set[int] = set()  # motors that have had no command since the first command
        self.garbled = False
        self.heard: dict[str, Any] = {}  # the newest command, and the state that was sent last
        self.said = b""
        self._open = True
        self._context = zmq.Context()
        kinds = (zmq.PULL, zmq.PUB, zmq.PUB)
        self._sockets = [self._context.socket(kind) for kind in kinds]
        self.ports = tuple(socket.bind_to_random_port("tcp://127.0.0.1") for socket in self._sockets)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        for socket in self._sockets:
            socket.close(0)
        self._context.term()

    def _run(self) -> None:
        commands, states, camera = self._sockets
        motors: list[dict[str, float]] = []
        jpeg = io.BytesIO()
        Image.fromarray(FRAME).save(jpeg, "JPEG")
        picture = base64.b64encode(jpeg.getvalue()).decode()
        ticks = 0
        while self._open:
            while commands.poll(0):
                message = json.loads(commands.recv())
                if message["topic"] != "rt/lowcmd":
                    continue  # the real bridge ignores such a message, too
                data: dict[str, Any] = message["data"]
                assert data["mode_machine"] == 5, "the client must send back the kind of robot"
                motors, self.heard = data["motor_cmd"], message
                assert len(motors) == SLOTS
                assert all(
                    math.isfinite(motor[key]) for motor in motors for key in ("q", "dq", "kp", "kd", "tau")
                )
                self.targets.append([motor["q"] for motor in motors[:MOTORS]])
            for at, motor in enumerate(motors[:MOTORS]):
                if motor["mode"] == 1 and motor["kp"] > 0:
                    most = FASTEST * PERIOD
                    self.joints[at] += np.clip(motor["q"] - self.joints[at], -most, most)
                else:
                    self.limp.add(at)
            state = [{"q": float(q), "dq": 0.0, "tau_est": 0.0, "temperature": 30.0} for q in self.joints]
            state += [dict.fromkeys(("q", "dq", "tau_est", "temperature"), 0.0)] * (SLOTS - MOTORS)
            data = {"motor_state": state, "imu_state": {"quaternion": [1.0, 0.0, 0.0, 0.0], **SILENT}}
            data |= {"wireless_remote": base64.b64encode(bytes(40)).decode(), "mode_machine": 5}
            self.said = said = json.dumps({"topic": "rt/lowstate", "data": data}).encode()
            states.send(said[:-9] if self.garbled else said)
            if ticks % 8 == 0:
                # the camera does not send a frame in every tick
                images = {"head_camera": picture} if ticks % 16 else {}
                camera.send(json.dumps({"timestamps": {}, "images": images}).encode())
            ticks += 1
            time.sleep(PERIOD)
