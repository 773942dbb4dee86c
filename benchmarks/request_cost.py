"""Count Python calls, created objects, files and changes of file for one request on the native protocol.

    python benchmarks/request_cost.py [--against CHECKOUT] [--requests 40] [--files] [--load]

These counts do not depend on other programs on the machine. ``sinew serve`` runs in its own process with a profile
function. The function counts:

* the calls into files of Sinew, without models and layers
* the calls of ``__init__`` of a class in Sinew, which are created objects
* the calls whose file differs from the file of the last call in the same thread, which are changes of file

A request has two frames of 224 x 224 and one solver step. The server has the smallest built-in policy. --against is
the root of another checkout, which the benchmark counts in the same way.

--load counts the functions of ``sinew.load`` on the same policy instead. Each function counts once, at its first call.
The output has the files, the stays (functions of one file in a row) and the returns to an earlier file. The last line
of the output is JSON.
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

SERVER = """
import json, os, signal, sys, threading
from collections import Counter
calls, objects, changes, out = Counter(), Counter(), Counter(), sys.argv.pop(1)
last = threading.local()
MODEL = ("layers", "models", "families")
def profile(frame, event, argument):
    if event == "call" and (name := frame.f_globals.get("__name__", "")).startswith("sinew."):
        if name.split(".")[1] in MODEL:
            return
        calls[name] += 1
        objects[name] += frame.f_code.co_name == "__init__"
        changes[name] += getattr(last, "name", name) != name
        last.name = name
def dump(number, frame):
    text = json.dumps([dict(calls), dict(objects), dict(changes)])
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

LOADER = """
import json, sys
import sinew
calls, known = [], set()
def profile(frame, event, argument):
    if event == "call" and (name := frame.f_globals.get("__name__", "")).startswith("sinew."):
        if name.split(".")[1] not in ("layers", "models", "families") and frame.f_code not in known:
            known.add(frame.f_code)
            calls.append((name, frame.f_code.co_qualname))
sinew.load(sys.argv[1], engine="eager", device="cpu", threads=1)  # what is imported, and remembered
sys.setprofile(profile)
sinew.load(sys.argv[1], engine="eager", device="cpu", threads=1)
sys.setprofile(None)
stays = []
for name, function in calls:
    if not stays or stays[-1][0] != name:
        stays.append((name, []))
    stays[-1][1].append(function)
files = len({name for name, _ in calls})
counts = {"functions": len(calls), "files": files, "stays": len(stays), "returns": len(stays) - files}
print(json.dumps([stays, counts]))
"""


def loaded(checkout: Path, files: bool = False) -> dict[str, int]:
    """Return ``functions``, ``files``, ``stays`` and ``returns`` of loading a policy.

    Args:
        checkout: Root of the checkout.
        files: Print each stay.
    """
    command = [sys.executable, "-c", LOADER, str(checkout / "sinew" / "assets" / "pen.gguf")]
    pipe, environment = subprocess.PIPE, _environment(checkout)
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=pipe, text=True)
    stays, found = json.loads(done.stdout.splitlines()[-1])
    for name, functions in stays if files else ():
        print(f"{name:30} {', '.join(functions)}")
    counts: dict[str, int] = found
    return counts


def _environment(checkout: Path) -> dict[str, str]:
    paths = (checkout, checkout / "packages" / "sinew-client" / "src")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def counted(checkout: Path, requests: int, files: bool = False) -> dict[str, dict[str, float]]:
    """Return ``calls``, ``objects``, ``files`` and ``changes`` of file for one request, by subpackage of the server.

    Args:
        checkout: Root of the checkout.
        requests: Number of requests.
        files: Print the counts of each file.
    """
    environment = _environment(checkout)
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder) / "counts.json"
        serve = [
            "serve",
            str(checkout / "sinew" / "assets" / "pen.gguf"),
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
                for count in (5, requests):  # the first requests fill caches
                    client.stdin.write(f"{count}\n")
                    client.stdin.flush()
                    client.stdout.readline()
                    found.append(_snapshot(server.pid, snapshot))
                client.stdin.close()
            server.terminate()
    before, after = found
    made = {
        what: {name: (last[name] - first[name]) / requests for name in last}
        for what, last, first in zip(("calls", "objects", "changes"), after, before, strict=True)
    }
    made["files"] = {name: float(count >= 0.5) for name, count in made["calls"].items()}
    if files:
        for name, count in sorted(made["calls"].items()):
            if count >= 0.05:
                print(f"{name:42} calls {count:5.1f}  changes {made['changes'][name]:5.1f}")
    return {what: _by_room(names) for what, names in made.items()}


def _snapshot(pid: int, path: Path) -> list[Counter[str]]:
    path.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    while not path.exists():
        time.sleep(0.01)
    return [Counter(each) for each in json.loads(path.read_text())]


def _by_room(names: dict[str, float]) -> dict[str, float]:
    rooms: Counter[str] = Counter()
    for name, count in names.items():
        rooms[name.split(".")[1]] += count  # type: ignore[assignment]
    found = {room: round(value, 1) for room, value in sorted(rooms.items()) if value >= 0.05}
    return {**found, "total": round(sum(found.values()), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument(
        "--files", action="store_true", help="print each file's calls and changes, or each stay"
    )
    parser.add_argument("--load", action="store_true")
    arguments = parser.parse_args()
    checkouts = {"this": ROOT, **({"against": arguments.against.resolve()} if arguments.against else {})}
    if arguments.load:
        loads = {name: loaded(path, arguments.files) for name, path in checkouts.items()}
        print(json.dumps({"schema": "sinew.benchmark.request_cost/1", "load": loads}))
        return
    found = {name: counted(path, arguments.requests, arguments.files) for name, path in checkouts.items()}
    for name, rows in found.items():
        for what, rooms in rows.items():
            print(name, what, ", ".join(f"{room} {value:g}" for room, value in rooms.items()))
    print(json.dumps({"schema": "sinew.benchmark.request_cost/1", "requests": arguments.requests, **found}))


if __name__ == "__main__":
    main()
