"""One SmolVLA checkpoint behind LeRobot's own policy server and behind `sinew serve`: chunk latency, load, memory.

    python -m benchmarks.peers OUT --peer PYTHON [--rounds 5] [--requests 2] [--threads 2] [--tiny]

PYTHON belongs to an environment with lerobot[smolvla] (0.4.4 here; ``python -m benchmarks.peers --how`` says how one is
made). The checkpoint is random, at full size, in float32 (no policy was trained, so the actions mean nothing; every
product is computed all the same). Both servers are processes of their own with the same number of threads, they stand
at once and work in turn. One client, LeRobot's gRPC stub with LeRobot's messages, sends the same frames to both; Sinew
is asked a second time over its own wire. Rounds are paired: one server after the other, in random order; beside the
latencies stands the server's processor time, which other work disturbs less. After them, for the agreement of actions,
LeRobot's server is given the noise that Sinew is sent, and a second time the position rows of transformers 5.5 as well:
4.57 puts every patch but the first into the row before its own.

Load is from the start of the process to the first chunk, with files in the page cache; peak is VmHWM of the server.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
HOW = """make clients    # .venv-clients: lerobot 0.4.4, beside the environment's torch
python3.11 -m venv .venv-peers
.venv-peers/bin/pip install --no-deps transformers==4.57.6 huggingface-hub==0.36.2 tokenizers==0.22.2 \\
    datasets==4.1.1 diffusers==0.35.2 num2words==0.5.14 docopt regex
for e in .venv-clients .venv; do $e/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done \\
    > .venv-peers/lib/python3.11/site-packages/peers.pth"""
SERVERS = ("lerobot", "sinew, LeRobot's wire", "sinew, its own wire")
NAMES, CAMERAS = [f"joint{number}.pos" for number in range(6)], ("camera1", "camera2")
PROMPT = "pick up the red cube"
START_S = 600.0


# ----------------------------------------------------------------------------- in the peer's environment


def imported() -> None:
    """Import LeRobot. PyPI's torchvision is compiled against CUDA's torch: beside a CPU build its import wants two
    names of operators, which nothing here calls."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # its names go with it
    import lerobot  # noqa: F401


def serve_lerobot(port: int, threads: int, hooks: Path) -> None:
    """Run LeRobot's policy server as it is, but for what ``hooks`` has: ``noise.npy``, and ``rows``, which stands for
    the position rows of transformers 5.5 (and of the model's training) in place of those of 4.57."""
    imported()
    import torch
    from lerobot.async_inference.policy_server import serve
    from lerobot.policies.smolvla.modeling_smolvla import VLAFlowMatching

    torch.set_num_threads(threads)
    drawn, bucketize = VLAFlowMatching.sample_noise, torch.bucketize

    def sample(self: Any, shape: Any, device: Any) -> Any:
        if not (hooks / "noise.npy").exists():
            return drawn(self, shape, device)
        return torch.from_numpy(np.load(hooks / "noise.npy")).reshape(shape)

    def rows(coordinates: Any, boundaries: Any, **more: Any) -> Any:
        if (hooks / "rows").exists():
            coordinates = torch.arange(0, 1 - 1e-6, 1 / len(coordinates))
        return bucketize(coordinates, boundaries, **more)

    VLAFlowMatching.sample_noise, torch.bucketize = sample, rows
    sys.argv = ["policy_server", "--host=127.0.0.1", f"--port={port}", "--fps=30", "--inference_latency=0"]
    serve()


def add_processor(vlm: Path) -> None:
    """Write the files that transformers' SmolVLM processor wants; the policy asks it for two token ids and no more."""
    imported()
    from transformers import SmolVLMImageProcessor, SmolVLMVideoProcessor

    SmolVLMImageProcessor().save_pretrained(vlm)
    SmolVLMVideoProcessor().save_pretrained(vlm)


class Asked:
    """One server over LeRobot's protocol, by its own stub and messages."""

    def __init__(self, address: str, checkpoint: str):
        import grpc
        from lerobot.async_inference.helpers import RemotePolicyConfig
        from lerobot.transport import services_pb2, services_pb2_grpc

        self._messages = services_pb2
        self._stub = services_pb2_grpc.AsyncInferenceStub(grpc.insecure_channel(address))
        self._stub.Ready(services_pb2.Empty(), timeout=START_S, wait_for_ready=True)
        names = ["height", "width", "channels"]
        features = {
            "observation.state": {"dtype": "float32", "shape": (len(NAMES),), "names": NAMES},
            **{
                f"observation.images.{camera}": {"dtype": "image", "shape": (480, 640, 3), "names": names}
                for camera in CAMERAS
            },
        }
        about = pickle.dumps(RemotePolicyConfig("smolvla", checkpoint, features, 50))
        self._stub.SendPolicyInstructions(services_pb2.PolicySetup(data=about), timeout=START_S)
        self._step = 0

    def __call__(self, observation: dict[str, Any]) -> np.ndarray:
        from lerobot.async_inference.helpers import TimedObservation
        from lerobot.transport.utils import send_bytes_in_chunks

        raw = {
            **dict(zip(NAMES, map(float, observation["state"]), strict=True)),
            **observation["images"],
            "task": PROMPT,
        }
        self._step += 1
        timed = TimedObservation(timestamp=time.time(), timestep=self._step, observation=raw, must_go=True)
        parts = send_bytes_in_chunks(pickle.dumps(timed), self._messages.Observation, silent=True)
        self._stub.SendObservations(parts, timeout=START_S)
        answer = self._stub.GetActions(self._messages.Empty(), timeout=START_S)
        if not answer.data:
            raise SystemExit("the server sent no actions; its log says why")
        return np.stack([each.get_action().numpy() for each in pickle.loads(answer.data)])


def client(threads: int) -> None:
    """Do what lines say: connect to a server, or ask it; answer milliseconds and the last chunk."""
    imported()
    import torch
    from sinew_client import Client

    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    servers: dict[str, Any] = {}
    for line in sys.stdin:
        told = json.loads(line)
        if "address" in told:
            own = told["name"] == SERVERS[2]
            address, checkpoint = told["address"], told["checkpoint"]
            servers[told["name"]] = Client(address, timeout=START_S) if own else Asked(address, checkpoint)
        taken, chunk = [], None
        fixed = np.random.default_rng(told["seed"]) if "seed" in told else rng
        for _ in range(told["requests"]):
            frames = {camera: fixed.integers(0, 256, (480, 640, 3), dtype=np.uint8) for camera in CAMERAS}
            observation = {"images": frames, "state": fixed.uniform(-1, 1, len(NAMES)).astype(np.float32)}
            ask = servers[told["name"]]
            begun = time.perf_counter()
            if isinstance(ask, Asked):
                chunk = ask(observation)
            else:
                more = {"noise": np.load(told["noise"])} if "noise" in told else {}
                chunk = ask.infer({**observation, "prompt": PROMPT, **more}).actions
            taken.append(1e3 * (time.perf_counter() - begun))
        print(
            json.dumps({"ms": taken, "actions": None if chunk is None else np.asarray(chunk).tolist()}),
            flush=True,
        )


# ----------------------------------------------------------------------------- here


def prepare(out: Path, peer: Path, tiny: bool) -> float:
    """Write the checkpoint, the folder that LeRobot loads, and the bundle; return seconds of the conversion."""
    from sinew.families.smolvla.checkpoint import write_checkpoint
    from sinew.families.smolvla.layout import TINY

    made = write_checkpoint(out / "made", widths=TINY if tiny else None, cameras=2)
    view, vlm = out / "lerobot", out / "vlm"
    for source, folder in ((made.policy, view), (made.vlm, vlm)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    os.link(made.policy / "model.safetensors", view / "model.safetensors")
    _edit(view / "config.json", vlm_model_name=str(vlm))
    config = json.loads(
        (vlm / "config.json").read_text()
    )  # its text part says bfloat16, and the expert follows that
    for part in (config, config["text_config"], config["vision_config"]):
        part["torch_dtype"] = "float32"
    (vlm / "config.json").write_text(json.dumps(config))
    steps = json.loads((view / "policy_preprocessor.json").read_text())
    for step in steps["steps"]:  # LeRobot 0.4.4 knows no tokenizer inside a checkpoint
        if step["registry_name"] == "tokenizer_processor":
            step["config"]["tokenizer_name"] = str(view / "tokenizer")
            step.pop("artifacts", None)
    (view / "policy_preprocessor.json").write_text(json.dumps(steps))
    special = {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"}
    special |= {"global_image_token": "<global-img>", "end_of_utterance_token": "<|im_end|>"}
    for folder in (vlm, view / "tokenizer"):
        _edit(
            folder / "tokenizer_config.json",
            tokenizer_class="PreTrainedTokenizerFast",
            extra_special_tokens=special,
        )
    subprocess.run(
        [peer, "-m", "benchmarks.peers", "--part", "processor", str(vlm)], check=True, env=environment()
    )
    begun = time.perf_counter()
    convert = [
        sys.executable,
        "-m",
        "sinew",
        "convert",
        str(made.policy),
        str(out / "policy.gguf"),
        "--force",
    ]
    subprocess.run(
        [*convert, "--vlm", str(made.vlm)], check=True, stdout=subprocess.DEVNULL, env=environment()
    )
    return time.perf_counter() - begun


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def environment(**more: str) -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "packages/sinew-client/src")])}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


class Talker:
    """The client's process."""

    def __init__(self, peer: Path, out: Path):
        self._process = subprocess.Popen(
            [peer, "-m", "benchmarks.peers", "--part", "client", "1"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=out,
        )  # fmt: skip

    def tell(self, name: str, requests: int, **more: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"name": name, "requests": requests, **more}) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # LeRobot prints
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit("the client has died")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def peak_mib(process: subprocess.Popen[Any]) -> int:
    """Return the largest resident memory that a process had (Linux)."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024)
    raise SystemExit("no VmHWM: measured on Linux only")


def cpu_s(process: subprocess.Popen[Any]) -> float:
    """Return the processor seconds that a process has taken (Linux)."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(out: Path, peer: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start both servers, ask them in turn, and return what was seen."""
    rng = np.random.default_rng(1)
    threads, hooks = str(arguments.threads), out / "hooks"
    shutil.rmtree(hooks, ignore_errors=True)
    hooks.mkdir()
    talker, load = Talker(peer, out), {}
    talker.tell("nobody", 0)  # its imports are done
    ports = {name: free_port() for name in SERVERS}
    running: dict[str, subprocess.Popen[Any]] = {}
    limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    try:
        begun = time.perf_counter()
        with (out / "lerobot.log").open("w") as log:
            running["lerobot"] = subprocess.Popen(
                [peer, "-m", "benchmarks.peers", "--part", "server", str(ports[SERVERS[0]]), threads, str(hooks)],
                stdout=log, stderr=log, env=environment(**limits), cwd=out,
            )  # fmt: skip
        address = f"127.0.0.1:{ports[SERVERS[0]]}"
        talker.tell(SERVERS[0], 1, address=address, checkpoint=str(out / "lerobot"))
        load["lerobot"] = time.perf_counter() - begun
        begun = time.perf_counter()
        wires = ["--wire", f"native:{ports[SERVERS[2]]}", "--wire", f"lerobot:{ports[SERVERS[1]]}"]
        with (out / "sinew.log").open("w") as log:
            running["sinew"] = subprocess.Popen(
                [sys.executable, "-m", "sinew", "serve", str(out / "policy.gguf"), *wires, "--threads", threads,
                 "--no-prepare"],
                stdout=log, stderr=log, env=environment(), cwd=out,
            )  # fmt: skip
        address = f"127.0.0.1:{ports[SERVERS[1]]}"
        talker.tell(SERVERS[1], 1, address=address, checkpoint="checkpoint")
        load["sinew"] = time.perf_counter() - begun
        talker.tell(SERVERS[2], 1, address=f"tcp://127.0.0.1:{ports[SERVERS[2]]}", checkpoint="")
        taken: dict[str, list[list[float]]] = {name: [] for name in SERVERS}
        spent: dict[str, float] = dict.fromkeys(SERVERS, 0.0)
        for number in range(arguments.rounds):
            for name in map(str, rng.permutation(SERVERS)):
                server = running[name.partition(",")[0]]
                before = cpu_s(server)
                taken[name].append(talker.tell(name, arguments.requests)["ms"])
                spent[name] += cpu_s(server) - before
                print(number, name, taken[name][-1], file=sys.stderr, flush=True)
        noise = hooks / "noise.npy"
        np.save(noise, rng.standard_normal((50, 32), dtype=np.float32))
        ours = np.array(talker.tell(SERVERS[2], 1, seed=2, noise=str(noise))["actions"])
        difference = {}
        for rows in ("rows of transformers 4.57", "rows of 5.5"):
            theirs = np.array(talker.tell(SERVERS[0], 1, seed=2)["actions"])
            difference[rows] = float(f"{np.abs(ours - theirs).max():.2g}")
            (hooks / "rows").touch()
        peaks = {name: peak_mib(process) for name, process in running.items()}
    finally:
        talker.close()
        for process in running.values():
            process.terminate()
            process.wait(60)
    medians = {name: [float(np.median(each)) for each in rounds] for name, rounds in taken.items()}
    reference = np.array(medians[SERVERS[0]])
    return {
        "p50_ms": {name: round(float(np.median(np.concatenate(rounds)))) for name, rounds in taken.items()},
        "times_as_fast": {
            name: [
                round(float(v), 2) for v in np.percentile(reference / np.array(medians[name]), (50, 0, 100))
            ]
            for name in SERVERS[1:]
        },
        "cpu_s": {name: round(s / arguments.rounds / arguments.requests, 2) for name, s in spent.items()},
        "load_s": {name: round(seconds, 1) for name, seconds in load.items()},
        "peak_mib": peaks,
        "largest_action": round(float(np.abs(ours).max()), 3),
        "largest_difference": difference,
        "engine": next(
            (line for line in (out / "sinew.log").read_text().splitlines() if "engine" in line), ""
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", help="a folder for checkpoint and bundle: 4 GB")
    parser.add_argument("--peer", type=Path, help="the Python that has LeRobot")
    parser.add_argument("--how", action="store_true", help="say how its environment is made")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2, help="of each server in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small widths: does it run?")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        which, *words = arguments.part
        if which == "server":
            serve_lerobot(int(words[0]), int(words[1]), Path(words[2]))
        elif which == "client":
            client(int(words[0]))
        else:
            add_processor(Path(words[0]))
        return
    if arguments.how or arguments.out is None or arguments.peer is None:
        print(HOW)
        return
    out, peer = arguments.out.resolve(), arguments.peer.absolute()
    out.mkdir(parents=True, exist_ok=True)
    begun = os.getloadavg()[0]
    converted = prepare(out, peer, arguments.tiny)
    found = compare(out, peer, arguments) | {
        "convert_s": round(converted, 1),
        "threads": arguments.threads, "rounds": arguments.rounds, "requests": arguments.requests, "dtype": "float32",
        "views": len(CAMERAS), "steps": 10, "machine": platform.processor() or platform.machine(),
        "load": [round(begun, 1), round(os.getloadavg()[0], 1)],
    }  # fmt: skip
    for name in SERVERS:
        print(f"{name:24} p50 {found['p50_ms'][name]} ms", found["times_as_fast"].get(name, ""))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
