"""Measure the time of each stage of a request on the native protocol, in the client and in the server.

    python -m benchmarks.request_stages [--requests 2000] [--pause MS]

Both processes record times of the same clock when functions begin or end. They do not record the return of a function
that sends, because the receiver may already run by then. The table has the medians of the times between two records. A
request has two frames of 224 x 224 and one solver step, for the smallest built-in policy. With --pause, the client
sleeps before each request, as a robot does, so that processor caches are cold. Put `chrt -r 1` in front of the command
to keep other programs off the cores. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.request_cost import ROOT

STAGES = (  # the record that ends a stage, and a description of the stage
    ("client: infer begins", ""),
    ("client: ask begins", "client: encoding"),
    ("server: whole", "into the socket, the server wakes and receives"),
    ("server: looked over", "checks of fields, key and size"),
    ("server: submitted", "queued"),
    ("server: begun", "the inference thread wakes"),
    ("server: decoded", "decoded: message, frames, safety"),
    ("server: prepared", "prepared (the policy's time)"),
    ("server: computed", "inference (the policy's time)"),
    ("server: encoding", "limits, metrics"),
    ("server: encoded", "encoded"),
    ("server: replying", "framed"),
    ("client: answered", "into the socket, the client wakes and receives"),
    ("client: infer ends", "client: decoding"),
)

STAMPS = """
import atexit, json, sys, time
stamps, out = [], sys.argv.pop(1)
def stamp(owner, name, begin=None, end=None):
    plain = getattr(owner, name)
    def stamped(*given, **named):
        if begin: stamps.append((begin, time.perf_counter()))
        found = plain(*given, **named)
        if end: stamps.append((end, time.perf_counter()))
        return found
    setattr(owner, name, stamped)
def dump():
    with open(out, "w") as file:
        json.dump(stamps, file)
atexit.register(dump)
"""

SERVER = (
    STAMPS
    + """
from sinew.policy import Policy
from sinew.serve.scheduler import Scheduler
from sinew.serve.service import Service
from sinew.serve.transport.zeromq import Peer, ZeroMQWire
from sinew.serve.wires.native import NativeCodec
stamp(ZeroMQWire, "_take", begin="server: whole")
stamp(Service, "submit", begin="server: looked over", end="server: submitted")
stamp(Scheduler, "_run", begin="server: begun")
stamp(Policy, "prepare", begin="server: decoded", end="server: prepared")
stamp(Policy, "run_batch", end="server: computed")
stamp(NativeCodec, "encode", begin="server: encoding", end="server: encoded")
stamp(Peer, "send", begin="server: replying")
from sinew.cli import main
sys.exit(main(sys.argv[1:]))
"""
)

CLIENT = (
    STAMPS
    + """
import numpy as np
from sinew_client import Client
from sinew_client.link import Link
stamp(Client, "infer", begin="client: infer begins", end="client: infer ends")
stamp(Link, "ask", begin="client: ask begins", end="client: answered")
rng = np.random.default_rng(0)
with Client(sys.argv[1], timeout=120.0) as client:
    about = client.metadata()["policy"]
    frames = {each["name"]: rng.integers(0, 256, (224, 224, 3), dtype=np.uint8) for each in about["cameras"]}
    state = np.zeros(about["state"]["dim"], np.float32)
    for seed in range(int(sys.argv[2])):
        time.sleep(float(sys.argv[3]) / 1e3)
        client.infer({"images": frames, "state": state, "prompt": "swing it up", "seed": seed, "solver_steps": 1})
"""
)


def stamped(requests: int, pause_ms: float = 0.0) -> list[dict[str, float]]:
    """Return the times of each request by the name of the record, in their order.

    Args:
        requests: Number of requests.
        pause_ms: Time that the client sleeps before each request.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "packages/sinew-client/src"))),
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("server.json", "client.json")]
        serve = [
            "serve",
            ROOT / "sinew" / "assets" / "pen.gguf",
            "--wire",
            "native:0",
            "--threads",
            "1",
            "--engine",
            "plan",
            "--device",
            "cpu",
        ]
        command = [sys.executable, "-c", SERVER, files[0], *serve]
        with subprocess.Popen(
            list(map(str, command)), env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            line = next((each for each in server.stdout if each.startswith("ready on ")), "")
            if not line:
                raise SystemExit("the server did not start")
            given = [str(files[1]), line.split()[2], str(requests), str(pause_ms)]
            subprocess.run([sys.executable, "-c", CLIENT, *given], env=environment, cwd=folder, check=True)
            server.terminate()
        both = sorted(
            ((name, at) for file in files for name, at in json.loads(file.read_text())),
            key=lambda stamp: stamp[1],
        )
    found: list[dict[str, float]] = []
    for name, at in both:
        if name == STAGES[0][0]:
            found.append({})
        if found:
            found[-1][name] = at
    return [each for each in found if len(each) == len(STAGES)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="milliseconds that the client sleeps before each request"
    )
    arguments = parser.parse_args()
    before = os.getloadavg()
    rows = stamped(arguments.requests, arguments.pause)[30:]
    names = [name for name, _ in STAGES]
    took = {
        what: statistics.median(1e3 * (row[end] - row[start]) for row in rows)
        for start, end, (_, what) in zip(names, names[1:], STAGES[1:], strict=False)
    }
    print("| stage | p50, ms |\n|---|--:|")
    for what, ms in took.items():
        print(f"| {what} | {ms:.3f} |")
    print(
        json.dumps(
            {
                "schema": "sinew.benchmark.request_stages/1",
                "requests": len(rows),
                "pause_ms": arguments.pause,
                "stages_ms": {what: round(ms, 4) for what, ms in took.items()},
                "load_average": {"before": before, "after": os.getloadavg()},
            }
        )
    )


if __name__ == "__main__":
    main()
