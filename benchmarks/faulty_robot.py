"""The robot of ``python -m benchmarks.faults``: a control loop at 20 Hz in its own process, with faults of its own.

    python -m benchmarks.faulty_robot tcp://127.0.0.1:PORT

Each line of standard input is a JSON list: the name of a method of ``Faults``, and its arguments. The robot answers
each line with one line ``{"rows": executed, "gap_ms": ..., "wrong": ..., "why": ...}``. The answer describes what
happened after the last answer.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from sinew_client import Client
from sinew_client.control import Run, RunPlan, Servers, Settings
from sinew_client.control.robots import Dry

from tests.control.test_loop_faults import PROMPT, Witness

HZ = 20.0
MAX_AGE_S = 1.5


class Arm(Dry):
    """A simulated arm that records the time of each command with a clock that no fault changes.

    Attributes:
        late: method name -> seconds for which the next call of this method blocks.
    """

    def __init__(self, policy: dict[str, Any]):
        super().__init__(policy)
        self.late: dict[str, float] = {}
        self.strange: float | None = None  # the state contains this value instead of the joint positions
        self.frozen: float | None = None  # the time since which the cameras repeat one frame
        self.sent: list[float] = []

    def observe(self) -> dict[str, Any]:
        time.sleep(self.late.pop("observe", 0.0))
        found = super().observe()
        if self.frozen is not None:
            found["time"] = self.frozen
        if self.strange is not None:
            found["state"] = np.full_like(found["state"], self.strange)
        return found

    def act(self, row: np.ndarray) -> None:
        self.sent.append(time.perf_counter())
        super().act(row)
        time.sleep(self.late.pop("act", 0.0))

    def hold(self) -> None:
        self.sent.append(time.perf_counter())
        super().hold()
        time.sleep(self.late.pop("hold", 0.0))


WAIT_S = 60.0  # seconds to wait until the robot has returned to its first pose
STAYS = ("twice", "strange", "frozen")  # with these faults at the end of a run, the robot does not move


class Faults:
    """The faults that a line of standard input can request. Each method returns when its fault is over."""

    def __init__(self, driving: Run, arm: Arm, begin: Callable[[], threading.Thread]):
        self.driving, self.loop, self.arm, self._begin = driving, driving.loop, arm, begin
        self.thread = begin()

    def look(self) -> None: ...

    def end(self, fault: str, *given: Any) -> None:
        """End the run with a fault that lasts during the return to the first pose. Then begin a new run.

        Raises:
            RuntimeError: The robot moved although its state is unknown, or it did not return although its state is
                known.
        """
        moves, known = fault not in STAYS, dict(vars(self.arm))
        start = self.arm.state.copy()
        if fault == "twice":
            self.driving.stop()
        elif fault:
            setattr(self.arm, *given)
        sent = self.arm.commands
        self.driving.stop()
        self.thread.join(WAIT_S)
        if fault:
            vars(self.arm).update({name: known[name] for name in ("late", "strange", "frozen")})
        outcome = self.driving.rest.outcome
        if self.thread.is_alive() or outcome["returned"] != moves:
            raise RuntimeError(f"the end of the run: {outcome.get('text', 'it goes on')}")
        # The control step in which the run ended may still send one command.
        if not moves and self.arm.commands > sent + 1:
            raise RuntimeError(f"{self.arm.commands - sent} commands from {start}, {outcome['text']}")
        self.loop.stopped = self.loop.at_once = False
        self.thread = self._begin()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def block(self, where: str, seconds: float) -> None:
        self.arm.late[where] = seconds
        time.sleep(seconds + 0.5)

    def hold_the_interpreter(self, seconds: float) -> None:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(1e6 * seconds)))

    def collect(self, objects: int) -> None:
        kept = [[number] for number in range(objects)]
        for one, other in pairwise(kept):
            one.append(other)
        gc.collect()
        del kept

    def state(self, value: float, seconds: float) -> None:
        self.arm.strange = value
        time.sleep(seconds)
        self.arm.strange = None

    def freeze_cameras(self, seconds: float) -> None:
        self.arm.frozen = time.monotonic()
        time.sleep(seconds)
        self.arm.frozen = None

    def clock(self, names: list[str], jump: float, seconds: float) -> None:
        real = {name: getattr(time, name) for name in names}
        for name, now in real.items():
            setattr(time, name, lambda now=now: now() + jump)
        try:
            threading.Event().wait(seconds)
        finally:
            for name, now in real.items():
                setattr(time, name, now)

    def say(self, prompts: list[str]) -> None:
        for prompt in prompts:
            self.loop.say(prompt)
            time.sleep(0.1)
        self.loop.say(PROMPT)

    def pauses(self, count: int) -> None:
        for _ in range(count):
            self.loop.pause()
            time.sleep(0.2)
            self.loop.resume()
            time.sleep(0.2)

    def fork(self, asks: str = "") -> None:
        child = os.fork()
        if not child:
            code = 0
            if asks:
                try:
                    with Client(asks) as client:
                        client.metadata()
                except BaseException:  # noqa: BLE001 - the forked child must end here
                    code = 1
            os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError("the forked child got no answer with its own client")

    def limit(self, which: str, value: int, seconds: float) -> None:
        kind = getattr(resource, which)
        before = resource.getrlimit(kind)
        if which == "RLIMIT_AS":
            with open("/proc/self/statm") as pages:
                value += int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(kind, (value, before[1]))
        try:
            threading.Event().wait(seconds)
        finally:
            resource.setrlimit(kind, before)


def main() -> None:
    address = sys.argv[1]
    with Client(address, timeout=60.0) as client:
        policy = client.metadata()["policy"]
    arm = Arm(policy)
    settings = Settings(HZ, "aligned", "6", deadline=2.0, max_age=MAX_AGE_S)
    servers = Servers(address, without=("time",))
    chosen = {name: getattr(settings, name) for name in ("hz", "handover", "replan", "deadline", "max_age")}
    chosen |= {"motion": {"kind": "absolute"}, "limits": {}, "rest": "first"}
    driving = Run(RunPlan.of(policy, arm, chosen, prompt=PROMPT), servers, server=servers)
    loop = driving.loop
    witness = Witness(int(MAX_AGE_S * HZ))
    loop.controller.listeners.append(witness.hear)
    failures: list[str] = []

    def run() -> None:
        try:
            driving.run()
            if not driving.rest.outcome:
                failures.append("the control loop ended early")
        except BaseException as error:  # noqa: BLE001 - the next answer reports the error
            failures.append(f"{type(error).__name__}: {error}")

    def begin() -> threading.Thread:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    faults = Faults(driving, arm, begin)
    begun = first = 0
    for line in sys.stdin:
        name, *given = json.loads(line)
        try:
            getattr(faults, name)(*given)
        except Exception as error:  # noqa: BLE001
            failures.append(f"{type(error).__name__}: {error}")
        sent = np.array(arm.sent[begun:])
        reasons = {each.reason.split(";")[0][:60] for each in witness.commands[first:] if each.row is None}
        begun, first = max(0, begun + len(sent) - 1), len(witness.commands)
        report = {
            "rows": len(witness.executed),
            "gap_ms": 1e3 * float(np.diff(sent).max()) if len(sent) > 1 else 0.0,
            "wrong": failures,
            "why": sorted(reasons),
        }
        print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
