"""One checkpoint in LeRobot and in Sinew: SmolVLA behind both servers, ACT and Diffusion Policy in one process each.

    python -m benchmarks.peers OUT --peer PYTHON [--rounds 5] [--requests 2] [--threads 2] [--tiny]
    python -m benchmarks.peers OUT --peer PYTHON --inside diffusion [--lerobot FOLDER] [--rounds 12] [--threads 1]

PYTHON belongs to an environment with lerobot[smolvla] (0.4.4 here; ``python -m benchmarks.peers --how`` says how one is
made). The checkpoint is random, at full size, in float32 (no policy was trained, so the actions mean nothing; every
product is computed all the same). Both servers are processes of their own with the same number of threads, they stand
at once and work in turn. One client, LeRobot's gRPC stub with LeRobot's messages, sends the same frames to both; Sinew
is asked a second time over its own wire. Rounds are paired: one server after the other, in random order; beside the
latencies stands the server's processor time, which other work disturbs less. After them, for the agreement of actions,
LeRobot's server is given the noise that Sinew is sent, and a second time the position rows of transformers 5.5 as well:
4.57 puts every patch but the first into the row before its own.

``--inside``: no server. LeRobot (0.6.1 in FOLDER, where `make clients` puts it) writes a policy with random weights at
its published size. Its policy between its own pipelines, and Sinew's engines, are a process each and answer the same
raw frames in turn, in random order. Of each: processor seconds of a chunk (time.process_time, which other work disturbs
less than the clock), the same as a part of LeRobot's in the same round (median, 95 % of it), VmHWM, and how far its
actions lie from LeRobot's for the same noise.

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

from benchmarks.paired import median_interval

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
# What LeRobot is told to make, beside its defaults: the sizes of published.json.
INSIDE: dict[str, dict[str, Any]] = {
    "act": {"cameras": ("top", "wrist"), "frame": (480, 640), "state": 14, "action": 14},
    "diffusion": {
        "cameras": ("top",), "frame": (96, 96), "state": 4, "action": 2, "noise": (16, 2), "moments": 2,
        "config": {
            "horizon": 16, "n_action_steps": 8, "crop_shape": (84, 84), "use_group_norm": True,
            "use_separate_rgb_encoder_per_camera": False, "noise_scheduler_type": "DDIM", "num_inference_steps": 10,
        },
    },
}  # fmt: skip
ENGINES = ("eager", "plan", "onnx", "int8")  # int8: linear layers of the head, on engine cpu


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


def write_policy(family: str, out: Path) -> None:
    """Write LeRobot's policy of a family at its published size, with weights as it begins a training."""
    imported()
    import torch
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

    about = INSIDE[family]
    torch.manual_seed(0)
    frame, images = (3, *about["frame"]), [f"observation.images.{camera}" for camera in about["cameras"]]
    config = make_policy_config(
        family, device="cpu", push_to_hub=False, pretrained_backbone_weights=None, **about.get("config", {})
    )
    config.input_features = {key: PolicyFeature(FeatureType.VISUAL, frame) for key in images}
    config.input_features["observation.state"] = PolicyFeature(FeatureType.STATE, (about["state"],))
    config.output_features = {"action": PolicyFeature(FeatureType.ACTION, (about["action"],))}
    statistics: dict[str, tuple[int, ...]] = dict.fromkeys(images, (3, 1, 1))
    statistics |= {"observation.state": (about["state"],), "action": (about["action"],)}
    moments = {"mean": 0.1, "std": 0.5, "min": -1.0, "max": 1.5}
    stats = {
        key: {each: torch.full(shape, value) for each, value in moments.items()}
        for key, shape in statistics.items()
    }
    policy = get_policy_class(family)(config)
    policy.save_pretrained(out)
    for pipeline in make_pre_post_processors(config, dataset_stats=stats):
        pipeline.save_pretrained(out)


def answers_of_lerobot(family: str, out: Path) -> Any:
    """Return LeRobot's policy between its pipelines as a function of moments and noise."""
    imported()
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from lerobot.policies.utils import prepare_observation_for_inference

    folder = str(out / "lerobot")
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(family).from_pretrained(folder, config=config).eval()
    before, after = make_pre_post_processors(config, pretrained_path=folder)

    def infer(moments: list[dict[str, Any]], noise: np.ndarray | None) -> np.ndarray:
        seen = []
        with torch.inference_mode():
            for moment in moments:
                raw = {f"observation.images.{camera}": frame for camera, frame in moment["images"].items()}
                raw["observation.state"] = moment["state"]
                seen.append(before(prepare_observation_for_inference(raw, torch.device("cpu"), "", "")))
            batch, more = seen[0], {}
            if len(seen) > 1:
                batch = {
                    key: torch.stack([each[key] for each in seen], 1)
                    for key in batch
                    if key.startswith("observation.")
                }
            if noise is not None:
                more["noise"] = torch.from_numpy(noise)[None]
            return np.asarray(after(policy.predict_action_chunk(batch, **more))[0])

    return infer


def inside(name: str, family: str, out: Path, threads: int) -> None:
    """Answer lines: as many chunks as one says, of observations that its seed draws."""
    about = INSIDE[family]
    if name == "lerobot":
        import torch

        torch.set_num_threads(threads)
        infer = answers_of_lerobot(family, out)
    else:
        import sinew

        file, engine = ("int8.gguf", "cpu") if name == "int8" else ("policy.gguf", name)
        policy = sinew.load(out / file, "cpu", "fp32", engine, threads=threads)

        def infer(moments: list[dict[str, Any]], noise: np.ndarray | None) -> np.ndarray:
            *earlier, newest = moments
            before = [sinew.core.Moment(**moment) for moment in earlier]
            return policy.infer({**newest, "earlier": before, "noise": noise}).actions

    for line in sys.stdin:
        told = json.loads(line)
        drawn, spent, taken, chunk = np.random.default_rng(told["seed"]), [], [], None
        for _ in range(told["requests"]):
            moments = [
                {
                    "images": {
                        camera: drawn.integers(0, 256, (*about["frame"], 3), dtype=np.uint8)
                        for camera in about["cameras"]
                    },
                    "state": drawn.uniform(-1, 1, about["state"]).astype(np.float32),
                }
                for _ in range(about.get("moments", 1))
            ]
            noise = drawn.standard_normal(about["noise"], dtype=np.float32) if "noise" in about else None
            begun, cpu = time.perf_counter(), time.process_time()
            chunk = infer(moments, noise)
            spent.append(time.process_time() - cpu)
            taken.append(1e3 * (time.perf_counter() - begun))
        print(json.dumps({"cpu_s": spent, "ms": taken, "actions": np.asarray(chunk).tolist()}), flush=True)


# ----------------------------------------------------------------------------- here


def prepare_inside(family: str, out: Path, peer: Path, lerobot: Path) -> list[str]:
    """Write LeRobot's policy and the bundles of it; return the engines that run them."""
    part = [str(peer), "-m", "benchmarks.peers", "--part", "write", family, str(out / "lerobot")]
    subprocess.run(part, check=True, env=environment(lerobot))
    sinew = [sys.executable, "-m", "sinew"]
    bundle, low = str(out / "policy.gguf"), str(out / "int8.gguf")
    quantize = ["quantize", bundle, "--recipe", "head=int8", "--engine", "cpu", "--observations", "1"]
    for words in (
        ["convert", str(out / "lerobot"), bundle, "--force"],
        ["bench", bundle, "--engine", "onnx", "--runs", "1"],  # exports its graphs
        [*quantize, "--out", low],
    ):
        done = subprocess.run(
            [*sinew, *words], check=False, env=environment(), capture_output=True, text=True
        )
        if done.returncode:
            print(done.stderr or done.stdout, file=sys.stderr)
            if words[0] != "quantize":
                raise SystemExit(" ".join(words))
            return list(ENGINES[:-1])  # which names what has no linear layer
    return list(ENGINES)


def compare_inside(family: str, out: Path, peer: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask LeRobot's policy and Sinew's engines in turn, and return what was seen."""
    lerobot = arguments.lerobot.resolve()
    names = ["lerobot", *prepare_inside(family, out, peer, lerobot)]
    rng, threads = np.random.default_rng(1), str(arguments.threads)
    limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    talkers, last = {}, {}
    spent: dict[str, list[float]] = {name: [] for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    try:
        for name in names:
            python, paths = (peer, (lerobot,)) if name == "lerobot" else (Path(sys.executable), ())
            words = ["inside", name, family, str(out), threads]
            talkers[name] = Talker(python, out, words, environment(*paths, **limits))
            last[name] = talkers[name].tell(name, 1, seed=0)  # warms up, and is compared
        for number in range(arguments.rounds):
            for name in map(str, rng.permutation(names)):
                found = talkers[name].tell(name, arguments.requests, seed=number)
                spent[name].append(float(np.median(found["cpu_s"])))
                taken[name].append(float(np.median(found["ms"])))
            print(
                number,
                {name: round(each[-1], 3) for name, each in spent.items()},
                file=sys.stderr,
                flush=True,
            )
        peaks = {name: peak_mib(talker.process) for name, talker in talkers.items()}
    finally:
        for talker in talkers.values():
            talker.close()
    reference, theirs = np.array(spent["lerobot"]), np.array(last["lerobot"]["actions"])
    return {
        "cpu_s": {name: round(float(np.median(each)), 3) for name, each in spent.items()},
        "of_lerobot": {
            name: [round(each, 2) for each in median_interval(list(np.array(spent[name]) / reference))]
            for name in names[1:]
        },
        "p50_ms": {name: round(float(np.median(each))) for name, each in taken.items()},
        "peak_mib": peaks,
        "largest_action": round(float(np.abs(theirs).max()), 3),
        "largest_difference": {
            name: float(f"{np.abs(np.array(last[name]['actions']) - theirs).max():.2g}") for name in names[1:]
        },
    }


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


def environment(*paths: Path, **more: str) -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "packages/sinew-client/src", *paths)))}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


class Talker:
    """A process that answers lines: the client, or what is compared without a server."""

    def __init__(self, python: Path, out: Path, part: list[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.peers", "--part", *part],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=out,
        )  # fmt: skip

    def tell(self, name: str, requests: int, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"name": name, "requests": requests, **more}) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # LeRobot prints
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{name}: its process has died")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


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
    talker, load = Talker(peer, out, ["client", "1"], environment()), {}
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


def about(arguments: argparse.Namespace, load: float) -> dict[str, Any]:
    """Return what a number depends on beside the programs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    return {
        "threads": arguments.threads, "rounds": arguments.rounds, "requests": arguments.requests, "dtype": "float32",
        "machine": model or platform.machine(), "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }  # fmt: skip


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
    parser.add_argument("--inside", choices=INSIDE, help="compare this family without servers")
    parser.add_argument("--lerobot", type=Path, default=ROOT / ".venv-clients" / "lerobot-0.6.1")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        which, *words = arguments.part
        if which == "server":
            serve_lerobot(int(words[0]), int(words[1]), Path(words[2]))
        elif which == "client":
            client(int(words[0]))
        elif which == "write":
            write_policy(words[0], Path(words[1]))
        elif which == "inside":
            inside(words[0], words[1], Path(words[2]), int(words[3]))
        else:
            add_processor(Path(words[0]))
        return
    if arguments.how or arguments.out is None or arguments.peer is None:
        print(HOW)
        return
    out, peer = arguments.out.resolve(), arguments.peer.absolute()
    out.mkdir(parents=True, exist_ok=True)
    begun = os.getloadavg()[0]
    if arguments.inside:
        found = compare_inside(arguments.inside, out, peer, arguments) | about(arguments, begun)
        print(json.dumps(found))
        return
    converted = prepare(out, peer, arguments.tiny)
    found = compare(out, peer, arguments) | {
        "convert_s": round(converted, 1),
        "views": len(CAMERAS),
        "steps": 10,
        **about(arguments, begun),
    }
    for name in SERVERS:
        print(f"{name:24} p50 {found['p50_ms'][name]} ms", found["times_as_fast"].get(name, ""))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
