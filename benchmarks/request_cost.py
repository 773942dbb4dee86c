"""Python calls and objects of one request on the native wire, counted: what the code does, however busy the machine is.

    python benchmarks/request_cost.py [--against CHECKOUT] [--requests 40]

``sinew serve`` runs in a process of its own under a profile function, which counts calls into Sinew's files without
models and layers, and of those the ``__init__`` of a Sinew class. Two frames of 224 x 224 go to the smallest embedded
policy, one solver step. --against: the root of another checkout, to be counted the same way. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "sinew" / "assets" / "pen.gguf"
MODEL = ("layers", "models")  # what computes, whatever carries the request

SERVER = """
import json, os, signal, sys, threading
from collections import Counter
calls, objects, out = Counter(), Counter(), sys.argv.pop(1)
def profile(frame, event, argument):
    if event == "call" and (name := frame.f_globals.get("__name__", "")).startswith("sinew."):
        room = name.split(".")[1]
        calls[room] += 1
        objects[room] += frame.f_code.co_name == "__init__"
def dump(number, frame):
    text = json.dumps([dict(calls), dict(objects)])
    with open(out + ".partial", "w") as file:
        file.write(text)
    os.replace(out + ".partial", out)
threading.setprofile(profile)
signal.signal(signal.SIGUSR1, dump)
from sinew.cli import main
sys.exit(main(sys.argv[1:]))
"""

CLIENT = """
import sys
import numpy as np
from sinew_client import Client
rng = np.random.default_rng(0)
with Client(sys.argv[1], timeout=120.0) as client:
    about = client.metadata()["policy"]
    frames = {each["name"]: rng.integers(0, 256, (224, 224, 3), dtype=np.uint8) for each in about["cameras"]}
    state = np.zeros(about["state"]["dim"], np.float32)
    for line in sys.stdin:
        for seed in range(int(line)):
            client.infer({"images": frames, "state": state, "prompt": "swing it up", "seed": seed, "solver_steps": 1})
        print("done", flush=True)
"""


def counted(checkout: Path, requests: int) -> dict[str, dict[str, float]]:
    """Return ``calls`` and ``objects`` per request by room of the server in ``checkout``."""
    paths = (checkout, checkout / "packages" / "sinew-client" / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder) / "counts.json"
        serve = [
            "serve",
            str(BUNDLE),
            "--wire",
            "native:0",
            "--threads",
            "1",
            "--engine",
            "eager",
            "--device",
            "cpu",
        ]
        command = [sys.executable, "-c", SERVER, str(snapshot), *serve]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, text=True) as server:
            assert server.stdout is not None
            line = next((each for each in server.stdout if each.startswith("ready on ")), "")
            if not line:
                raise SystemExit(f"the server of {checkout} did not start")
            program = [sys.executable, "-c", CLIENT, line.removeprefix("ready on ").strip()]
            with subprocess.Popen(program, env=environment, stdin=pipe, stdout=pipe, text=True) as client:
                assert client.stdin is not None
                assert client.stdout is not None
                found = []
                for count in (5, requests):  # the first ones fill caches
                    client.stdin.write(f"{count}\n")
                    client.stdin.flush()
                    client.stdout.readline()
                    found.append(_snapshot(server.pid, snapshot))
                client.stdin.close()
            server.terminate()
    (calls_before, objects_before), (calls, objects) = found
    return {
        "calls": _per_request(calls, calls_before, requests),
        "objects": _per_request(objects, objects_before, requests),
    }


def _snapshot(pid: int, path: Path) -> list[Counter[str]]:
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    while not path.exists():
        time.sleep(0.01)
    return [Counter(each) for each in json.loads(path.read_text())]


def _per_request(after: Counter[str], before: Counter[str], requests: int) -> dict[str, float]:
    rooms = {room: (after[room] - before[room]) / requests for room in after if room not in MODEL}
    rooms = {room: round(value, 1) for room, value in sorted(rooms.items()) if value >= 0.05}
    return {**rooms, "total": round(sum(rooms.values()), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    arguments = parser.parse_args()
    checkouts = {"this": ROOT, **({"against": arguments.against.resolve()} if arguments.against else {})}
    found = {name: counted(path, arguments.requests) for name, path in checkouts.items()}
    for name, rows in found.items():
        for what, rooms in rows.items():
            print(name, what, ", ".join(f"{room} {value:g}" for room, value in rooms.items()))
    print(json.dumps({"schema": "sinew.benchmark.request_cost/1", "requests": arguments.requests, **found}))


if __name__ == "__main__":
    main()
