"""Measure the peak of the resident memory of a server without torch, while a client requests chunks.

python benchmarks/memory.py POLICY [--requests 3]

POLICY is a bundle with its exported graphs next to it, or an exported folder. The server is a process that cannot
import torch. The client runs in this process and uses a real socket. The output is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from sinew_client import Client

from sinew.core import machine

SERVER = "import sys; sys.modules['torch'] = None; from sinew.cli import main; sys.exit(main(sys.argv[1:]))"


def resident(pid: int) -> dict[str, int]:
    """Return the resident memory of a process in MiB: the peak, the current value, and its anonymous and mapped
    parts."""
    names = {"VmHWM": "peak", "VmRSS": "now", "RssAnon": "anonymous", "RssFile": "file"}
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in names:
            found[names[key]] = int(value.split()[0]) // 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", type=Path)
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    command = ["serve", str(arguments.policy), "--engine", "onnx", "--wire", "native:0"]
    command += ["--threads", str(arguments.threads)]
    server = subprocess.Popen([sys.executable, "-c", SERVER, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if line.startswith("ready on ")), None)
        if line is None:
            raise SystemExit(f"the server ended with {server.wait()}")
        ready = resident(server.pid)
        with Client(line.split()[2], timeout=300) as client:
            spec = client.metadata()["policy"]
            rng = np.random.default_rng(0)
            frames = {
                c["name"]: rng.integers(0, 256, (c["height"], c["width"], 3), dtype=np.uint8)
                for c in spec["cameras"]
            }
            state = np.zeros(spec["state"]["dim"], np.float32)
            begin = time.perf_counter()
            for seed in range(arguments.requests):
                client.infer({"images": frames, "state": state, "prompt": "pick up the cube", "seed": seed})
            seconds = (time.perf_counter() - begin) / arguments.requests
        result = {
            "policy": arguments.policy.name,
            "mib_ready": ready,
            "mib_serving": resident(server.pid),
            "seconds_per_request": round(seconds, 3),
            "threads": arguments.threads,
            "hardware": machine.cpu_model(),
            "load_average": os.getloadavg()[0],
        }
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
