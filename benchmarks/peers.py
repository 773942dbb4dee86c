"""Compare SmolVLA, ACT and Diffusion Policy in LeRobot, in vla.cpp and in Sinew, on the same machine.

    python -m benchmarks.peers OUT --peer PYTHON [--rounds 5] [--requests 2] [--threads 2] [--tiny]
    python -m benchmarks.peers OUT --peer PYTHON --inside diffusion [--lerobot FOLDER] [--rounds 12] [--threads 1]
    python -m benchmarks.peers OUT --peer PYTHON --inside smolvla [--vlacpp vla.cpp/build/vla-server] [--rounds 6]

PYTHON is the interpreter of an environment with lerobot[smolvla] (0.4.4 here). ``python -m benchmarks.peers --how``
prints the commands that create this environment. The checkpoint has random weights at full size in float32. The
policy is not trained, so its actions have no meaning, but each product is computed as in a trained policy.

Without ``--inside``, the benchmark compares the servers of LeRobot and Sinew with SmolVLA. Both servers run at the
same time, each in its own process and with the same number of threads. One client uses LeRobot's gRPC messages and
sends the same frames to one server after the other, in random order. The client also sends requests to Sinew on
Sinew's native protocol. The benchmark measures the latency and the processor time of the servers, because other
programs disturb processor time less than latency.

Then the benchmark compares the actions of the servers for the same noise. It compares them a second time with the
position rows of transformers 5.5 in LeRobot. Version 4.57 uses the position row of the previous patch for all patches
but the first.

With ``--inside``, the benchmark uses no server of LeRobot or Sinew. LeRobot (0.6.1 in FOLDER, where `make clients`
puts it) and Sinew load the same policy with random weights at its published size. These programs get the same raw
frames, one after the other and in random order, each in its own process: LeRobot's policy with LeRobot's processing,
each engine of Sinew, and the server of vla.cpp with each of its precisions. The benchmark prints for each program:

* the processor seconds of a chunk, of all threads
* the ratio to the processor seconds of the reference in the same round (median and 95 % interval)
* the peak memory (VmHWM)
* the difference to the actions of the reference for the same noise: the largest, and the relative L2 distance

``--reference`` names the reference, which is LeRobot by default. ``--at-once`` limits the number of processes at the
same time. The programs are then divided into groups, and the reference runs in each group. ``--engines`` selects the
programs. ``lerobot compiled`` is torch.compile in mode "default". It takes minutes and runs only if you name it.
``--again`` uses the files that an earlier run with the same family wrote to OUT. The bound is the number of
operations of a float32 chunk, as ``sinew bench`` counts them, divided by the rate of a large product in one thread.

The load time ends at the first chunk, and the files are in the page cache. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
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
HOW = """make clients    # .venv-clients: lerobot 0.4.4 and 0.6.1, with the torch of the environment
for e in .venv-clients .venv; do $e/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done \\
    > peers.pth
# 0.4.4, for the servers
python3.11 -m venv .venv-peers
.venv-peers/bin/pip install --no-deps transformers==4.57.6 huggingface-hub==0.36.2 tokenizers==0.22.2 \\
    datasets==4.1.1 diffusers==0.35.2 num2words==0.5.14 docopt regex
cp peers.pth .venv-peers/lib/python3.11/site-packages/
# 0.6.1, for --inside
python3.11 -m venv .venv-inside
.venv-inside/bin/pip install --no-deps transformers==5.5.4 huggingface-hub==1.33.0 tokenizers==0.22.2 \\
    num2words==0.5.14 docopt regex httpx httpcore h11 anyio sniffio idna certifi typer click shellingham
cp peers.pth .venv-inside/lib/python3.11/site-packages/
# vla.cpp, for --vlacpp: its README's packages, then
git clone https://github.com/VinRobotics/vla.cpp && cd vla.cpp && git checkout b18873d
cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target vla-server"""
SERVERS = ("lerobot", "sinew, LeRobot's wire", "sinew, its own wire")
NAMES, CAMERAS = [f"joint{number}.pos" for number in range(6)], ("camera1", "camera2")
PROMPT = "pick up the red cube"
START_S = 600.0
# For each family: options of LeRobot's policy that differ from its defaults, with the sizes of published.json, and
# the quantisation recipes of Sinew's low-bit bundles.
INSIDE: dict[str, dict[str, Any]] = {
    "smolvla": {
        "cameras": CAMERAS, "frame": (512, 512), "state": 6, "action": 6, "noise": (50, 32), "prompt": PROMPT,
        "recipes": {
            "int8": "vision=int8,language=int8,head=int8", "4 bits": "vision=q4_0,language=q4_0,head=int8",
        },
    },
    "act": {"cameras": ("top", "wrist"), "frame": (480, 640), "state": 14, "action": 14},
    "diffusion": {
        "cameras": ("top",), "frame": (96, 96), "state": 4, "action": 2, "noise": (16, 2), "moments": 2,
        "config": {
            "horizon": 16, "n_action_steps": 8, "crop_shape": (84, 84), "use_group_norm": True,
            "use_separate_rgb_encoder_per_camera": False, "noise_scheduler_type": "DDIM", "num_inference_steps": 10,
        },
    },
}  # fmt: skip
LOW = {"int8": "head=int8"}  # the linear layers of the head, for ACT and Diffusion Policy
FLOAT = "policy"
# name -> bundle, engine, type of the products
ENGINES = {
    "eager": (FLOAT, "eager", "fp32"), "plan": (FLOAT, "plan", "fp32"), "plan bf16": (FLOAT, "plan", "bf16"),
    "onnx": (FLOAT, "onnx", "fp32"), "onnx int8": ("int8", "onnx", "fp32"), "cpu int8": ("int8", "cpu", "fp32"),
    "cpu 4 bits": ("4 bits", "cpu", "fp32"), "cpu bf16": (FLOAT, "cpu", "bf16"),
}  # fmt: skip
COMPILED = "lerobot compiled"
# name -> options of vla.cpp's server, whose default is bfloat16 and which is fastest with flash attention
VLACPP = {
    "vla.cpp float32": ("--weight-dtype", "f32"), "vla.cpp bf16": ("--weight-dtype", "bf16"),
    "vla.cpp bf16 flash": ("--weight-dtype", "bf16", "--flash-attn"),
}  # fmt: skip


# ----------------------------------------------------------------------------- functions in LeRobot's environment


def imported() -> None:
    """Import LeRobot.

    The torchvision on PyPI is compiled for torch with CUDA. With a CPU build of torch, the import of torchvision
    needs two operators, which this benchmark never calls. So this function defines them.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_library"] = library  # deleting the library would delete the names
    import lerobot  # noqa: F401


def serve_lerobot(port: int, threads: int, hooks: Path) -> None:
    """Run LeRobot's policy server with two changes, which depend on files in the folder ``hooks``.

    If ``noise.npy`` exists, the policy uses this noise. If ``rows`` exists, the policy uses the position rows of
    transformers 5.5, which were also used to train SmolVLA, instead of the rows of version 4.57.
    """
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
    """Write the files that transformers' SmolVLM processor requires. The policy uses only two token ids of this
    processor."""
    imported()
    from transformers import SmolVLMImageProcessor, SmolVLMVideoProcessor

    SmolVLMImageProcessor().save_pretrained(vlm)
    SmolVLMVideoProcessor().save_pretrained(vlm)


class LeRobotClient:
    """A client of LeRobot's server, which uses LeRobot's own gRPC stub and messages."""

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
            raise SystemExit("the server sent no actions; see its log in OUT")
        return np.stack([each.get_action().numpy() for each in pickle.loads(answer.data)])


def client(threads: int) -> None:
    """Read requests from standard input as lines of JSON, and send them to a server.

    A line with an address first connects to this server. Each answer is a line of JSON with the milliseconds of each
    request and the last chunk.
    """
    imported()
    import torch
    from sinew_client import Client

    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    servers: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "address" in request:
            own = request["name"] == SERVERS[2]
            address, checkpoint = request["address"], request["checkpoint"]
            servers[request["name"]] = (
                Client(address, timeout=START_S) if own else LeRobotClient(address, checkpoint)
            )
        taken, chunk = [], None
        fixed = np.random.default_rng(request["seed"]) if "seed" in request else rng
        for _ in range(request["requests"]):
            frames = {camera: fixed.integers(0, 256, (480, 640, 3), dtype=np.uint8) for camera in CAMERAS}
            observation = {"images": frames, "state": fixed.uniform(-1, 1, len(NAMES)).astype(np.float32)}
            server = servers[request["name"]]
            begun = time.perf_counter()
            if isinstance(server, LeRobotClient):
                chunk = server(observation)
            else:
                more = {"noise": np.load(request["noise"])} if "noise" in request else {}
                chunk = server.infer({**observation, "prompt": PROMPT, **more}).actions
            taken.append(1e3 * (time.perf_counter() - begun))
        print(
            json.dumps({"ms": taken, "actions": None if chunk is None else np.asarray(chunk).tolist()}),
            flush=True,
        )


def write_policy(family: str, out: Path) -> None:
    """Write LeRobot's policy of a family at its published size, with the weights at the start of a training."""
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


def answers_of_lerobot(family: str, out: Path, compiled: bool) -> Any:
    """Return LeRobot's policy with its processing, as a function of an observation history and noise."""
    imported()
    import torch
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from lerobot.policies.utils import prepare_observation_for_inference

    folder, task = str(out / "lerobot"), INSIDE[family].get("prompt", "")
    config = PreTrainedConfig.from_pretrained(folder)
    if compiled:
        config.compile_model, config.compile_mode = True, "default"
    policy = get_policy_class(family).from_pretrained(folder, config=config).eval()
    before, after = make_pre_post_processors(config, pretrained_path=folder)

    def infer(moments: list[dict[str, Any]], noise: np.ndarray | None) -> np.ndarray:
        seen = []
        with torch.inference_mode():
            for moment in moments:
                raw = {f"observation.images.{camera}": frame for camera, frame in moment["images"].items()}
                raw["observation.state"] = moment["state"]
                seen.append(before(prepare_observation_for_inference(raw, torch.device("cpu"), task, "")))
            batch, more = seen[0], {}
            if len(seen) > 1:
                batch = {
                    key: torch.stack([each[key] for each in seen], 1)
                    for key in batch
                    if key.startswith("observation.")
                }
            if noise is not None:
                more["noise"] = torch.from_numpy(noise)[None]
            chunk = np.asarray(after(policy.predict_action_chunk(batch, **more))[0])
        if compiled:  # import this module only here, because it needs memory, which is measured
            from torch._dynamo.utils import counters

            if not counters["stats"]["unique_graphs"]:
                raise SystemExit(f"{COMPILED}: torch.compile made no graph")
        return chunk

    return infer


class VlaCpp:
    """A client of vla.cpp's server, whose protocol has the same messages and sockets as Sinew's native protocol."""

    def __init__(self, address: str, bundle: Path, process: subprocess.Popen[bytes] | None = None):
        from sinew_client.addresses import ServerAddress
        from sinew_client.link import Link

        from sinew.bundle import Bundle
        from sinew.processing.processor import Processor

        manifest = Bundle(bundle).manifest
        self._processor, self._joints = Processor(manifest), manifest.spec.action.dim
        self._padded = manifest.processing.padded_state_dim
        begun = time.monotonic()
        while True:
            try:
                self._link = Link(ServerAddress.parse(address), begun + START_S)
                return
            except OSError:
                if time.monotonic() > begun + START_S or (process is not None and process.poll() is not None):
                    raise
                time.sleep(0.2)

    def __call__(self, observation: dict[str, Any]) -> np.ndarray:
        """Return a chunk float32 [H, D] in robot units, for frames, a state, a prompt and noise."""
        from sinew_client import protocol, schema

        from sinew.core import Observation

        inputs = self._processor.inputs(Observation.from_mapping(observation), pixels=False)
        state = np.zeros(self._padded, np.float32)
        state[: len(observation["state"])] = observation["state"]
        request = schema.PredictRequest(
            request_id=1, lang_tokens=inputs.tokens[inputs.token_mask].tolist(), state=state.tolist(),
            noise=np.ravel(observation["noise"]).tolist(),
        )  # fmt: skip
        parts = protocol.with_frames(request, observation["images"].items())
        answer = self._link.ask(parts, time.monotonic() + START_S)
        if answer is None:
            raise SystemExit(f"vla.cpp: no answer in {START_S:.0f} s")
        reply = protocol.decode_reply(answer, 1)
        return np.reshape(reply.action_chunk, (reply.chunk_size, -1))[:, : self._joints]


def inside(name: str, family: str, out: Path, threads: int, server: str) -> None:
    """Run one of the compared programs in this process.

    The function reads requests from standard input as lines of JSON. The seed of a request defines its random
    observations.

    Args:
        name: Name of the program.
        family: Key of ``INSIDE``.
        out: Folder of the files.
        threads: Compute threads.
        server: Path of vla.cpp's server.
    """
    about, process = INSIDE[family], None
    if name.startswith("lerobot"):
        import torch

        torch.set_num_threads(threads)
        infer = answers_of_lerobot(family, out, name == COMPILED)
    elif name in VLACPP:
        port = free_port()
        process = subprocess.Popen(
            [server, *VLACPP[name], "--bind", f"tcp://127.0.0.1:{port}", str(out / "vla.gguf")],
            stdout=sys.stderr, env={**os.environ, "VLA_N_THREADS": str(threads)},
        )  # fmt: skip
        vlacpp = VlaCpp(f"tcp://127.0.0.1:{port}", out / f"{FLOAT}.gguf", process)

        def infer(moments: list[dict[str, Any]], noise: np.ndarray | None) -> np.ndarray:
            return vlacpp({**moments[0], "noise": noise, "prompt": about["prompt"]})
    else:
        import sinew

        file, engine, dtype = ENGINES[name]
        policy = sinew.load(out / f"{file}.gguf", "cpu", dtype, engine, threads=threads)

        def infer(moments: list[dict[str, Any]], noise: np.ndarray | None) -> np.ndarray:
            *earlier, newest = moments
            before = [sinew.core.Moment(**moment) for moment in earlier]
            more = {"prompt": about["prompt"]} if "prompt" in about else {}
            return policy.infer({**newest, **more, "earlier": before, "noise": noise}).actions

    def cpu() -> float:
        return time.process_time() if process is None else cpu_s(process.pid)

    for line in sys.stdin:
        request = json.loads(line)
        drawn, spent, taken, chunk = np.random.default_rng(request["seed"]), [], [], None
        for _ in range(request["requests"]):
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
            begun, before = time.perf_counter(), cpu()
            chunk = infer(moments, noise)
            spent.append(cpu() - before)
            taken.append(1e3 * (time.perf_counter() - begun))
        peak = peak_mib(os.getpid() if process is None else process.pid)
        answer = {"cpu_s": spent, "ms": taken, "peak_mib": peak, "actions": np.asarray(chunk).tolist()}
        print(json.dumps(answer), flush=True)
    if process is not None:
        process.terminate()
        process.wait()


# ----------------------------------------------------------------------------- functions in Sinew's environment


def known(family: str) -> list[str]:
    """Return the names of the programs that support a family."""
    whole = family == "smolvla"
    ours = [name for name in ENGINES if whole or name in ("eager", "plan", "onnx", "cpu int8")]
    return ["lerobot", COMPILED, *ours, *VLACPP] if whole else ["lerobot", *ours]


def prepare_inside(
    family: str, out: Path, peer: Path, names: list[str], arguments: argparse.Namespace
) -> tuple[list[str], float]:
    """Write the files for the programs ``names``.

    Returns:
        The names of the programs that can run, and the lower bound of a float32 chunk in processor seconds. The bound
        is 0 without the engine ``onnx``, because its benchmark counts the operations.
    """
    lerobot, bundle = arguments.lerobot.resolve(), out / f"{FLOAT}.gguf"
    words, threads = [str(out / "lerobot")], str(arguments.threads)
    if not arguments.again:
        if family == "smolvla":
            reader = peer if any(name.startswith("lerobot") for name in names) else None
            made = write_smolvla(out, reader, arguments.tiny, INSIDE[family]["frame"], lerobot)
            words = [str(made.policy), "--vlm", str(made.vlm)]
        else:
            part = [str(peer), "-m", "benchmarks.peers", "--part", "write", family, words[0]]
            subprocess.run(part, check=True, env=environment(lerobot))
        sinew("convert", *words, str(bundle), "--force")
    for low, recipe in INSIDE[family].get("recipes", LOW).items():
        path, users = out / f"{low}.gguf", [name for name in ENGINES if ENGINES[name][0] == low]
        if not arguments.again and set(users) & set(names):
            path.unlink(missing_ok=True)
            options = ["--engine", "cpu", "--observations", "1", "--episodes", "0", "--out", str(path)]
            sinew("quantize", str(bundle), "--recipe", recipe, *options)
        if not path.exists():  # `sinew quantize` has reported that the family has no such layers
            names = [name for name in names if name not in users]
    counted: dict[str, Any] = {}
    for name in (
        "onnx int8",
        "onnx",
    ):  # export the graphs here, next to the bundle, so that the export does not count as memory of the engine
        if name in names:
            options = ["--engine", "onnx", "--runs", "1", "--threads", threads, "--json"]
            counted = json.loads(sinew("bench", str(out / f"{ENGINES[name][0]}.gguf"), *options))["roofline"]
    if set(VLACPP) & set(names) and not (arguments.again and (out / "vla.gguf").exists()):
        (out / "vla.gguf").unlink(missing_ok=True)
        sinew("export", str(bundle), "--vlacpp", str(out / "vla.gguf"))
    if "onnx" not in names or "stages_ms" not in counted:
        return names, 0.0
    return names, sum(stage["gflop"] for stage in counted["stages_ms"].values()) / gflop_of_a_second()


def gflop_of_a_second() -> float:
    """Return the GFLOP per processor second of a float32 product, 2048 x 2048 in one thread, as the best of five
    runs.

    Processor time is used because other programs disturb elapsed time.
    """
    import torch

    torch.set_num_threads(1)
    a, spent = torch.randn(2048, 2048), []
    for _ in range(5):
        begun = time.process_time()
        torch.mm(a, a)
        spent.append(time.process_time() - begun)
    return 2e-9 * 2048**3 / min(spent)


def sinew(*words: str) -> str:
    """Run a command of Sinew. Returns its output, or "" if ``quantize`` fails.

    Raises:
        SystemExit: A command other than ``quantize`` failed.
    """
    command = [sys.executable, "-m", "sinew", *words]
    done = subprocess.run(command, check=False, env=environment(), capture_output=True, text=True)
    if done.returncode:
        print(done.stderr or done.stdout, file=sys.stderr)
        if words[0] != "quantize":
            raise SystemExit(" ".join(words))
        return ""
    return done.stdout or done.stderr or "done"


def compare_inside(family: str, out: Path, peer: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare LeRobot's policy, Sinew's engines and vla.cpp in rounds. Returns the measurements."""
    left_out = {COMPILED} if arguments.vlacpp else {COMPILED, *VLACPP}
    selected = arguments.engines or [name for name in known(family) if name not in left_out]
    reference = arguments.reference
    names, bound = prepare_inside(family, out, peer, list(dict.fromkeys([reference, *selected])), arguments)
    others = [name for name in names if name != reference]
    group_size = (arguments.at_once or len(others) + 1) - 1
    rng, threads = np.random.default_rng(1), str(arguments.threads)
    limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    workers: dict[str, Worker] = {}
    last: dict[str, Any] = {}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in (reference, *others)}
    part: dict[str, list[float]] = {name: [] for name in others}

    def start(name: str) -> None:
        theirs = name.startswith("lerobot")
        python, paths = (peer, (arguments.lerobot.resolve(),)) if theirs else (Path(sys.executable), ())
        words = ["inside", name, family, str(out), threads, str(arguments.vlacpp)]
        workers[name] = Worker(python, out, words, environment(*paths, **limits))
        # the first chunk warms up the program, and is compared with the reference
        last[name] = workers[name].request(name, 1, seed=0)

    try:
        start(reference)
        for group in (others[i : i + group_size] for i in range(0, len(others), group_size)):
            for name in group:
                start(name)
            for number in range(arguments.rounds):
                spent = {}
                for name in map(str, rng.permutation([reference, *group])):
                    found = workers[name].request(name, arguments.requests, seed=number)
                    spent[name] = round(float(np.median(found["cpu_s"])), 4)
                    seen[name].append(found)
                for name in group:
                    part[name].append(spent[name] / spent[reference])
                print(number, spent, file=sys.stderr, flush=True)
            for name in group:
                workers.pop(name).close()
    finally:
        for worker in workers.values():
            worker.close()
    theirs = np.array(last[reference]["actions"])
    apart = {name: np.array(last[name]["actions"]) - theirs for name in others}
    result = {
        "cpu_s": {
            name: round(float(np.median([f["cpu_s"] for f in all_])), 3) for name, all_ in seen.items()
        },
        "reference": reference,
        "part": {name: [round(each, 3) for each in median_interval(found)] for name, found in part.items()},
        "p50_ms": {name: round(float(np.median([f["ms"] for f in all_]))) for name, all_ in seen.items()},
        "peak_mib": {name: all_[-1]["peak_mib"] for name, all_ in seen.items()},
        "largest_action": round(float(np.abs(theirs).max()), 3),
        "largest_difference": {name: float(f"{np.abs(each).max():.2g}") for name, each in apart.items()},
        "relative_error": {
            name: float(f"{np.linalg.norm(each) / np.linalg.norm(theirs):.2g}")
            for name, each in apart.items()
        },
        "bound_cpu_s": round(bound, 2),
    }
    print(
        f"| | CPU s a chunk | of {reference} | peak MiB | largest difference | relative |\n|---|--:|--:|--:|--:|--:|"
    )
    for name, cpu in result["cpu_s"].items():
        ratio = "{} ({} to {})".format(*result["part"][name]) if name in part else "1"
        far, error = (result[key].get(name, 0) for key in ("largest_difference", "relative_error"))
        print(f"| {name} | {cpu} | {ratio} | {result['peak_mib'][name]:,} | {far} | {error} |")
    return result


def write_smolvla(out: Path, peer: Path | None, tiny: bool, frame: tuple[int, int], *paths: Path) -> Any:
    """Write a random checkpoint, and the folder ``out / "lerobot"`` that LeRobot can load.

    Args:
        out: Folder to write to.
        peer: Interpreter of LeRobot's environment. None: do not write the folder for LeRobot.
        tiny: Use small widths.
        frame: Height and width of the camera frames in pixels.
        paths: Folders with LeRobot's modules.

    Returns:
        The paths of the checkpoint.
    """
    from benchmarks.checkpoints.smolvla import write_checkpoint
    from benchmarks.checkpoints.smolvla_layout import TINY

    made = write_checkpoint(out / "made", widths=TINY if tiny else None, cameras=len(CAMERAS))
    policy = json.loads((made.policy / "config.json").read_text())
    for key in policy["input_features"]:
        if "images" in key:
            policy["input_features"][key]["shape"] = [3, *frame]
    (made.policy / "config.json").write_text(json.dumps(policy))
    if peer is None:
        return made
    view, vlm = out / "lerobot", out / "vlm"
    for source, folder in ((made.policy, view), (made.vlm, vlm)):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    os.link(made.policy / "model.safetensors", view / "model.safetensors")
    _edit(view / "config.json", vlm_model_name=str(vlm))
    config = json.loads(
        (vlm / "config.json").read_text()
    )  # The text part of the file has bfloat16, and the expert would use the same type.
    for part in (config, config["text_config"], config["vision_config"]):
        part["torch_dtype"] = "float32"
    (vlm / "config.json").write_text(json.dumps(config))
    steps = json.loads((view / "policy_preprocessor.json").read_text())
    for step in steps["steps"]:  # LeRobot 0.4.4 cannot read a tokenizer inside a checkpoint
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
        [peer, "-m", "benchmarks.peers", "--part", "processor", str(vlm)], check=True, env=environment(*paths)
    )
    return made


def prepare(out: Path, peer: Path, tiny: bool) -> float:
    """Write the checkpoint and its bundle. Returns the seconds of the conversion."""
    made = write_smolvla(out, peer, tiny, (480, 640))
    begun = time.perf_counter()
    sinew("convert", str(made.policy), str(out / "policy.gguf"), "--force", "--vlm", str(made.vlm))
    return time.perf_counter() - begun


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def environment(*paths: Path, **more: str) -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "packages/sinew-client/src", *paths)))}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


class Worker:
    """A process that reads requests and writes answers, as lines of JSON: the client, or one of the compared
    programs."""

    def __init__(self, python: Path, out: Path, part: list[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.peers", "--part", *part],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=out,
        )  # fmt: skip

    def request(self, name: str, requests: int, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"name": name, "requests": requests, **more}) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # other lines are output of LeRobot
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{name}: the process has ended; its error is printed above")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def peak_mib(pid: int) -> int:
    """Return the largest resident memory of a process in MiB (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1024)
    raise SystemExit("/proc has no VmHWM; run this benchmark on Linux")


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(out: Path, peer: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start both servers, and send requests to them in turn. Returns the measurements."""
    rng = np.random.default_rng(1)
    threads, hooks = str(arguments.threads), out / "hooks"
    shutil.rmtree(hooks, ignore_errors=True)
    hooks.mkdir()
    worker, load = Worker(peer, out, ["client", "1"], environment()), {}
    worker.request("nobody", 0)  # this request starts the process and imports its modules
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
        worker.request(SERVERS[0], 1, address=address, checkpoint=str(out / "lerobot"))
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
        worker.request(SERVERS[1], 1, address=address, checkpoint="checkpoint")
        load["sinew"] = time.perf_counter() - begun
        worker.request(SERVERS[2], 1, address=f"tcp://127.0.0.1:{ports[SERVERS[2]]}", checkpoint="")
        taken: dict[str, list[list[float]]] = {name: [] for name in SERVERS}
        spent: dict[str, float] = dict.fromkeys(SERVERS, 0.0)
        for number in range(arguments.rounds):
            for name in map(str, rng.permutation(SERVERS)):
                server = running[name.partition(",")[0]].pid
                before = cpu_s(server)
                taken[name].append(worker.request(name, arguments.requests)["ms"])
                spent[name] += cpu_s(server) - before
                print(number, name, taken[name][-1], file=sys.stderr, flush=True)
        noise = hooks / "noise.npy"
        np.save(noise, rng.standard_normal((50, 32), dtype=np.float32))
        ours = np.array(worker.request(SERVERS[2], 1, seed=2, noise=str(noise))["actions"])
        difference = {}
        for rows in ("rows of transformers 4.57", "rows of 5.5"):
            theirs = np.array(worker.request(SERVERS[0], 1, seed=2)["actions"])
            difference[rows] = float(f"{np.abs(ours - theirs).max():.2g}")
            (hooks / "rows").touch()
        peaks = {name: peak_mib(process.pid) for name, process in running.items()}
    finally:
        worker.close()
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
    """Return the settings and the facts about the machine on which the measurements depend."""
    from sinew.core import machine

    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    kind = ", ".join(f"{name} {fields[name]}" for name in ("cpu family", "model") if name in fields)
    return {
        "threads": arguments.threads, "rounds": arguments.rounds, "requests": arguments.requests, "dtype": "float32",
        "machine": f"{machine.cpu_model()}, {kind}, {machine.instructions()}",
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out", type=Path, nargs="?", help="folder for the checkpoint and the bundle, which need 4 GB"
    )
    parser.add_argument("--peer", type=Path, help="Python interpreter of the environment with LeRobot")
    parser.add_argument("--how", action="store_true", help="print the commands that create this environment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=2, help="number of requests for each server in a round"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--tiny", action="store_true", help="use small widths, to test that the benchmark runs"
    )
    parser.add_argument(
        "--inside", choices=INSIDE, help="compare the programs on this family without servers"
    )
    parser.add_argument("--lerobot", type=Path, default=ROOT / ".venv-clients" / "lerobot-0.6.1")
    parser.add_argument(
        "--vlacpp", type=Path, help="path of vla.cpp's program vla-server; only with --inside smolvla"
    )
    parser.add_argument("--reference", default="lerobot", help="program whose time is the base of the ratios")
    parser.add_argument(
        "--engines", nargs="+", metavar="NAME", help="programs to compare (default: all except torch.compile)"
    )
    parser.add_argument(
        "--at-once", type=int, help="largest number of processes at the same time (default: all)"
    )
    parser.add_argument("--again", action="store_true", help="use the files that an earlier run wrote to OUT")
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
            inside(words[0], words[1], Path(words[2]), int(words[3]), words[4])
        else:
            add_processor(Path(words[0]))
        return
    if arguments.how or arguments.out is None or arguments.peer is None:
        print(HOW)
        return
    out, peer = arguments.out.resolve(), arguments.peer.absolute()
    out.mkdir(parents=True, exist_ok=True)
    begun = os.getloadavg()[0]
    if arguments.vlacpp:
        if arguments.inside != "smolvla" or not arguments.vlacpp.is_file():
            parser.error(f"--vlacpp: expected a file and --inside smolvla, got {arguments.vlacpp}")
        arguments.vlacpp = arguments.vlacpp.resolve()
    names = known(arguments.inside) if arguments.inside else []
    for name in (arguments.reference, *(arguments.engines or ())):
        if arguments.inside and name not in names:
            parser.error(f"--engines, --reference: expected {', '.join(names)}, got {name}")
        if name in VLACPP and not arguments.vlacpp:
            parser.error(f"--vlacpp: pass the path of vla-server to run {name!r}")
    if arguments.at_once is not None and arguments.at_once < 2:
        parser.error(f"--at-once: expected 2 or more, got {arguments.at_once}")
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
