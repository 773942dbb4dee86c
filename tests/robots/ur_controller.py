"""A simulated controller of Universal Robots: RTDE, a port for programs, and joints that move.

It is written from the published description of the interface, and shares nothing with examples/robots/ur.py. It
supports one kind of program: a program that follows joint positions in registers (servoj).
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

SIZES = {"DOUBLE": "d", "VECTOR6D": "6d", "INT32": "i", "UINT32": "I", "UINT8": "B"}
KINDS = {"timestamp": "DOUBLE", "actual_q": "VECTOR6D", "safety_mode": "INT32", "runtime_state": "UINT32",
         "standard_analog_input0": "DOUBLE", "input_int_register_24": "INT32", "standard_digital_output_mask": "UINT8",
         "standard_digital_output": "UINT8",
         **{f"input_double_register_{i}": "DOUBLE" for i in range(24, 48)}}  # fmt: skip
PERIOD = 0.008
FASTEST = np.pi  # largest speed of each joint in rad/s


class Controller:
    """A controller that moves its joints from ``start`` to the joint positions of the program, 125 times a second.

    Args:
        moved: Function that is called after each of these steps with the joints and with the value of digital output
            0. It returns the voltage of analog input 0.
        views: Name -> a frame, which is served as NAME.png.
        patience: Factor by which its watchdog waits longer, because this machine also runs other programs.
    """

    def __init__(
        self,
        start: np.ndarray,
        moved: Callable[[np.ndarray, bool], float] = lambda joints, high: 0.0,
        views: dict[str, Callable[[], np.ndarray]] | None = None,
        patience: float = 100.0,
    ):
        self.joints = np.array(start, np.float64)
        self.safety, self.stopped, self.programs = 1, "", 0
        self.fastest = 0.0
        self.garbled = False  # True to leave out the end of each message
        self._moved, self._views = moved, dict(views or {})
        self._patience = patience
        self._inputs: dict[str, float] = {}
        self._heard = 0.0  # time at which the inputs were last written
        self._follows, self._waits, self._at_least = False, False, 0.0
        self._volts = 0.0
        self._lock = threading.Lock()
        self._open = True
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.ports = tuple(listener.getsockname()[1] for listener in self._listeners)
        self._web = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.cameras = {name: f"http://127.0.0.1:{self._web.server_port}/{name}.png" for name in self._views}
        for work in (self._rtde, self._program, self._web.serve_forever):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self._open = False
        for listener in self._listeners:
            listener.close()
        self._web.shutdown()

    # ------------------------------------------------------------------------- the arm

    def _step(self) -> None:
        with self._lock:
            if (
                self._follows
                and self._at_least
                and time.monotonic() - self._heard > self._patience / self._at_least
            ):
                self._follows, self.stopped = False, "watchdog"
            said = self._inputs.get("input_int_register_24") == 1
            self._waits = self._waits and not said
            if self._follows and not (said or self._waits):
                self._follows, self.stopped = False, "program"
            if self._follows and said and self.safety == 1:
                target = np.array([self._inputs[f"input_double_register_{24 + i}"] for i in range(6)])
                step = np.clip(target - self.joints, -FASTEST * PERIOD, FASTEST * PERIOD)
                self.fastest = max(self.fastest, float(np.abs(step).max() / PERIOD))
                self.joints = self.joints + step
            high = bool(int(self._inputs.get("standard_digital_output", 0)) & 1)
            self._volts = self._moved(self.joints, high)

    def _values(self) -> dict[str, Any]:
        return {"timestamp": time.monotonic(), "actual_q": self.joints, "safety_mode": self.safety,
                "runtime_state": 2 if self._follows else 1, "standard_analog_input0": self._volts}  # fmt: skip

    # ------------------------------------------------------------------------- its ports

    def _program(self) -> None:
        while self._open:
            try:
                channel, _ = self._listeners[1].accept()
            except OSError:
                return
            with channel:
                text = b""
                while more := channel.recv(4096):
                    text += more
            program = text.decode()
            watchdog = re.search(r'rtde_set_watchdog\("(\w+)", ([\d.]+), "stop"\)', program)
            if program.startswith("def ") and program.endswith("end\n") and "servoj(" in program:
                with self._lock:
                    self.programs += 1
                    self._follows, self.stopped, self._heard = True, "", time.monotonic()
                    self._waits = "while read_input_integer_register(24) == 0:" in program
                    self._at_least = float(watchdog[2]) if watchdog else 0.0

    def _rtde(self) -> None:
        self._listeners[0].settimeout(PERIOD)
        while self._open:
            try:
                channel, _ = self._listeners[0].accept()
            except TimeoutError:
                self._step()  # the simulation continues without clients
                continue
            except OSError:
                return
            channel.settimeout(PERIOD)
            with channel, contextlib.suppress(OSError):  # a client may disconnect during a message
                self._serve(channel)

    def _serve(self, channel: socket.socket) -> None:
        data, wanted, given, sends = b"", [], [], False
        due, here = time.monotonic(), True
        while self._open and here:
            try:
                more = channel.recv(4096)
                data, here = data + more, bool(more)
            except TimeoutError:
                pass
            while len(data) >= 3 and len(data) >= struct.unpack(">H", data[:2])[0]:
                size = struct.unpack(">H", data[:2])[0]
                kind, payload, data = data[2:3], data[3:size], data[size:]
                if kind == b"U":
                    self._written(given, payload)
                    continue
                if kind == b"O":
                    wanted, answer = payload[8:].decode().split(","), b"\x01"
                    answer += ",".join(KINDS.get(name, "NOT_FOUND") for name in wanted).encode()
                elif kind == b"I":
                    given, answer = payload.decode().split(","), b"\x02"
                    answer += ",".join(KINDS.get(name, "NOT_FOUND") for name in given).encode()
                else:
                    sends = sends or kind == b"S"
                    answer = b"\x01"
                channel.sendall(struct.pack(">H", 3 + len(answer)) + kind + answer)
            while time.monotonic() >= due or not here:
                self._step()
                due = max(due + PERIOD, time.monotonic() - 4 * PERIOD)
                if not here:
                    break
                if sends:
                    self._tell(channel, wanted)

    def _tell(self, channel: socket.socket, names: list[str]) -> None:
        values = [np.ravel(self._values()[name]) for name in names]
        forms = "".join(SIZES[KINDS[name]] for name in names)
        body = struct.pack(f">B{forms}", 1, *(v.item() for each in values for v in each))
        body = body[:-1] if self.garbled else body
        channel.sendall(struct.pack(">H", 3 + len(body)) + b"U" + body)

    def _written(self, names: list[str], payload: bytes) -> None:
        values = struct.unpack(">B" + "".join(SIZES[KINDS[name]] for name in names), payload)
        if values[0] != 2:
            raise AssertionError(f"recipe {values[0]} is unknown; set it up first")
        with self._lock:
            said = dict(zip(names, values[1:], strict=True))
            if not said.pop("standard_digital_output_mask", 0) & 1:
                said.pop("standard_digital_output", None)
            self._inputs.update(said)
            self._heard = time.monotonic()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        views = self._views

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                frame = io.BytesIO()
                Image.fromarray(views[self.path[1:-4]]()).save(frame, "PNG")
                self.send_response(200)
                self.send_header("Content-Length", str(frame.tell()))
                self.end_headers()
                self.wfile.write(frame.getvalue())

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
