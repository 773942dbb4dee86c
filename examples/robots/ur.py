"""Drive an arm of Universal Robots (UR3e to UR20, e-Series and CB3) with RTDE, its Real-Time Data Exchange.

    cd examples/robots
    sinew run POLICY --config ur5e.toml --robot-options '{"host": "192.168.1.10"}'

The class needs only numpy. It sends a short program to the controller (port 30002, "Remote Control" on the pendant).
The program follows joint positions in the registers 24 to 29, and stops if register 24 is 0. The controller stops the
program if no values arrive for 0.2 s. The state arrives 125 times a second from port 30004. Joints are in radians.
The gripper is digital output 0, which is high if the policy's number is above 0. Its opening is analog input 0, where
10 V mean ``opening``. A camera is the address of a snapshot, which most network cameras provide.
"""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import threading
import time
import urllib.request
from typing import Any

import numpy as np
from PIL import Image
from sinew_client.control import NoObservation
from sinew_client.errors import ClientError

JOINTS = [
    "shoulder_pan_joint",
    "shoulder_lift_joint",
    "elbow_joint",
    "wrist_1_joint",
    "wrist_2_joint",
    "wrist_3_joint",
]
PROGRAM = """def follow():
  while read_input_integer_register(24) == 0:
    sync()
  end
  rtde_set_watchdog("input_int_register_24", 5, "stop")
  while read_input_integer_register(24) == 1:
    q = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    i = 0
    while i < 6:
      q[i] = read_input_float_register(24 + i)
      i = i + 1
    end
    servoj(q, t=0.008, lookahead_time=0.1, gain=300)
  end
  stopj(4.0)
end
"""
OUTPUTS = {
    "timestamp": "d",
    "actual_q": "6d",
    "safety_mode": "i",
    "runtime_state": "I",
    "standard_analog_input0": "d",
}
GOODBYE_S = 0.5  # seconds to wait until the controller closes the connection
INPUTS = {
    "input_int_register_24": "i",
    **{f"input_double_register_{24 + i}": "d" for i in range(6)},
    "standard_digital_output_mask": "B",
    "standard_digital_output": "B",
}
TYPES = {"d": "DOUBLE", "6d": "VECTOR6D", "i": "INT32", "I": "UINT32", "B": "UINT8"}
VERSION, OUT, IN, START, DATA = b"V", b"O", b"I", b"S", b"U"
SAFE = {1: "normal", 2: "reduced"}
PLAYING = 2  # value of runtime_state while a program runs


class Rtde:
    """RTDE, protocol version 2. A package has a size (2 bytes, big-endian), a type (1 byte) and its data."""

    def __init__(self, host: str, port: int, frequency: float):
        try:
            self._socket = socket.create_connection((host, port), timeout=2.0)
        except OSError as error:
            raise ClientError(f"RTDE of {host}:{port}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        if self._asked(VERSION, struct.pack(">H", 2)) != b"\x01":
            raise ClientError("RTDE: the controller does not support protocol version 2; update its software")
        self._out = self._recipe(OUT, struct.pack(">d", frequency), OUTPUTS)
        self._in = self._recipe(IN, b"", INPUTS)
        if self._asked(START, b"") != b"\x01":
            raise ClientError("RTDE: the controller does not start to send data; see the log on the pendant")

    def _recipe(self, kind: bytes, head: bytes, names: dict[str, str]) -> int:
        answer = self._asked(kind, head + ",".join(names).encode())
        given, wanted = answer[1:].decode().split(","), [TYPES[each] for each in names.values()]
        if wrong := [
            f"{name}: {had}" for name, had, own in zip(names, given, wanted, strict=True) if had != own
        ]:
            raise ClientError(f"RTDE: expected {', '.join(wanted)}, got {', '.join(wrong)}")
        return answer[0]

    def _asked(self, kind: bytes, payload: bytes) -> bytes:
        self._socket.sendall(struct.pack(">H", 3 + len(payload)) + kind + payload)
        while True:
            got, answer = self._package()
            if got == kind:
                return answer

    def _package(self) -> tuple[bytes, bytes]:
        size, kind = struct.unpack(">Hc", self._exactly(3))
        return kind, self._exactly(size - 3)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise OSError("the controller has closed the connection")
            data += more
        return data

    def read(self) -> dict[str, Any]:
        """Return the next values of :data:`OUTPUTS`."""
        while True:
            kind, data = self._package()
            if kind == DATA and data[0] == self._out:
                values = list(struct.unpack(">" + "".join(OUTPUTS.values()), data[1:]))
                return {name: [values.pop(0) for _ in range(6)] if form == "6d" else values.pop(0)
                        for name, form in OUTPUTS.items()}  # fmt: skip

    def write(self, running: int, joints: np.ndarray, mask: int, outputs: int) -> None:
        """Set the values of :data:`INPUTS`."""
        data = struct.pack(
            ">B" + "".join(INPUTS.values()), self._in, running, *map(float, joints), mask, outputs
        )
        with self._lock:
            self._socket.sendall(struct.pack(">H", 3 + len(data)) + DATA + data)

    def finish(self) -> None:
        """End the writing side. The controller reads the last values before it closes the connection."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class Ur:
    """An arm and its gripper as a robot for ``sinew run``: six joints in radians, and the opening of the gripper.

    Args:
        host: Address of the controller.
        cameras: Name -> address of a snapshot (JPEG or PNG).
        opening: Opening of the gripper at 10 V of the analog input.
        ports: Ports of RTDE and of the program.
    """

    joint_unit = "rad"
    joints = [*JOINTS, "gripper"]  # noqa: RUF012 - the same for all arms

    def __init__(
        self,
        host: str,
        cameras: dict[str, str] | None = None,
        opening: float = 1.0,
        ports: tuple[int, int] = (30004, 30002),
    ):
        self._cameras, self._opening = dict(cameras or {}), opening
        for address in self._cameras.values():
            if not address.startswith(("http://", "https://")):
                raise ClientError(f"cameras: expected addresses of snapshots, got {address!r}")
        self._rtde = Rtde(host, ports[0], 125.0)
        self._newest: tuple[float, dict[str, Any]] = (time.monotonic(), self._rtde.read())
        self._failed = ""
        self._sent, self._mask, self._outputs = np.array(self._newest[1]["actual_q"]), 0, 0
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._rtde.write(
            1, self._sent, 0, 0
        )  # set the present position before the program reads the registers
        with socket.create_connection((host, ports[1]), timeout=2.0) as channel:
            channel.sendall(PROGRAM.encode())

    def _listen(self) -> None:
        try:
            while True:
                values = self._rtde.read()
                self._newest = (time.monotonic(), values)
        # the controller has closed the connection, or sent an invalid package
        except (OSError, struct.error, IndexError) as error:
            self._failed = f"RTDE: {error}"

    def observe(self) -> dict[str, Any]:
        taken, values = self._newest
        if self._failed:
            raise NoObservation(self._failed)
        if values["safety_mode"] not in SAFE or values["runtime_state"] != PLAYING:
            # a person may move the arm now, and the next command must not move it back
            self._sent = np.array(values["actual_q"])
        if values["safety_mode"] not in SAFE:
            raise NoObservation(
                f"the arm's safety mode is {values['safety_mode']}, "
                "expected normal (1) or reduced (2); clear the safety stop on the pendant"
            )
        if values["runtime_state"] != PLAYING:
            raise NoObservation("the program on the arm does not run; start the robot again")
        times, images = {"state": taken}, {}
        for name, address in self._cameras.items():
            times[name] = time.monotonic()
            try:
                with urllib.request.urlopen(address, timeout=0.5) as answer:  # noqa: S310 - the address is checked above
                    images[name] = np.asarray(Image.open(io.BytesIO(answer.read())).convert("RGB"))
            except OSError as error:
                raise NoObservation(f"{name}: {error}") from error
        opening = self._opening * values["standard_analog_input0"] / 10.0
        return {"images": images, "state": np.float32([*values["actual_q"], opening]), "times": times}

    def act(self, row: np.ndarray) -> None:
        self._sent, self._mask, self._outputs = np.array(row[:6], np.float64), 1, int(row[6] > 0)
        self._write(1)

    def hold(self) -> None:
        self._write(1)  # send the last joints again, which also keeps the program running

    def close(self) -> None:
        """Stop the program. The gripper keeps its state."""
        self._write(0)
        # If the socket were closed with unread packages, the connection would be reset, and the last 0 might be lost.
        with contextlib.suppress(OSError):
            self._rtde.finish()
            self._thread.join(GOODBYE_S)
        self._rtde.close()

    def _write(self, running: int) -> None:
        try:
            self._rtde.write(running, self._sent, self._mask, self._outputs)
        except OSError as error:
            self._failed = f"RTDE: {error}"
