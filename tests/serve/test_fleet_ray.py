"""A gateway before two replicas of a real Ray cluster on this machine, killed, replaced, updated under load."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pickle
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from sinew_client import Client

from sinew.policy import load
from tests.serve.test_server import CASE, GOOD, serving

pytest.importorskip("ray.serve")
grpc = pytest.importorskip("grpc")
KEY = "secret"
WAIT_S = 240.0  # a replica starts in half a minute on a loaded machine


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def replicas(process: int) -> list[int]:
    """Return the replicas of the cluster that this process began."""
    found = []
    for child in psutil.Process(process).children(recursive=True):
        try:
            if any("ServeReplica:sinew-default" in word for word in child.cmdline()):
                found.append(child.pid)
        except psutil.Error:  # it has just ended
            continue
    return found


def reachable(process: int) -> list[int]:
    """Return the ports of a process and its children that other machines can connect to."""
    found = []
    for each in (psutil.Process(process), *psutil.Process(process).children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            for socket in each.net_connections("tcp"):
                address = ipaddress.ip_address(socket.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                if socket.status == psutil.CONN_LISTEN and not address.is_loopback:
                    found.append(socket.laddr.port)
    return found


class Ran:
    """Says that it was unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def refuses_strangers(port: int, ran: Path) -> None:
    """A call without the token, with a pickle where Ray Serve's replicas expect one, is answered and runs nothing."""
    pickled = pickle.dumps(Ran(ran))
    size = len(pickled)
    message = (
        b"\x0a" + bytes([size & 127 | 128, size >> 7]) + pickled
    )  # field 1, bytes, of 128 to 16,383 bytes
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in ("ray.serve.ASGIService/HandleRequest", "ray.rpc.ObjectManagerService/Pull"):
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(f"/{method}")(message, timeout=WAIT_S)
            assert error.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
    assert not ran.exists()


def put(address: str, source: Path) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/v1/policies/default",
        json.dumps({"source": str(source)}).encode(),
        {"X-API-Key": KEY},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_are_killed_and_updated_under_load_and_no_request_is_lost(smolvla_bundle, tmp_path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    for path in (first, second):
        shutil.copy(smolvla_bundle(CASE), path)
    fleet = tmp_path / "fleet.yaml"
    one = {"source": str(first), "replicas": 2, "engine": "eager", "threads": 1, "cpus": 0.5, "ongoing": 2}
    fleet.write_text(yaml.safe_dump({"policies": {"default": one}}))
    (tmp_path / "key").write_text(KEY)
    expected = {
        seed: load(first, engine="eager", threads=1).infer({**GOOD, "seed": seed}).actions
        for seed in range(4)
    }
    flags = ("--wire", "native:0", "--wire", "http:0", "--api-key-file", tmp_path / "key")
    with serving(tmp_path, fleet, *flags, command=("-m", "sinew", "fleet", "up")) as gateway:
        http = gateway.address
        native = gateway.line.split()[2]
        stop = threading.Event()
        failures: list[BaseException] = []
        longest = [0.0] * 4
        counts = [0] * 4

        def robot(seed: int) -> None:
            with Client(native, timeout=WAIT_S, api_key=KEY) as client:
                while not stop.is_set():
                    begun = time.monotonic()
                    try:
                        np.testing.assert_allclose(
                            client.infer({**GOOD, "seed": seed}).actions, expected[seed], atol=1e-5
                        )
                    except Exception as error:  # noqa: BLE001 - reported below
                        failures.append(error)
                    longest[seed] = max(longest[seed], time.monotonic() - begun)
                    counts[seed] += 1

        robots = [threading.Thread(target=robot, args=(seed,)) for seed in range(4)]
        with Client(native, timeout=WAIT_S, api_key=KEY) as client:
            until(lambda: client.health()["policies"]["default"]["replicas"] == 2)
            there = reachable(gateway.process.pid)
            assert len(there) <= 3  # the raylet's object manager, and each replica's gRPC, listen everywhere
            for port in there:
                refuses_strangers(port, tmp_path / "ran")
            for each in robots:
                each.start()
            for _ in range(2):
                until(lambda: min(counts) >= 3)
                victim, *others = until(lambda: len(found := replicas(gateway.process.pid)) == 2 and found)
                os.kill(victim, signal.SIGKILL)
                counts[:] = [0] * 4
                until(lambda: min(counts) >= 3)  # the other one answers
                until(
                    lambda victim=victim: (
                        len(found := replicas(gateway.process.pid)) == 2 and victim not in found
                    )
                )
                until(lambda: client.health()["policies"]["default"]["replicas"] == 2)
            assert not failures
            before = set(replicas(gateway.process.pid))
            counts[:] = [0] * 4
            assert put(http, second)["name"] == "default"
            assert client.metadata()["server"]["fleet"]["source"] == str(second)
            until(lambda: not before & set(replicas(gateway.process.pid)))
            counts[:] = [0] * 4
            until(lambda: min(counts) >= 3)
            stop.set()
            for each in robots:
                each.join(WAIT_S)
            assert not failures
            told = client.health()
            assert told["failed"] == 0
            assert told["status"] == "ok"
            policy = told["policies"]["default"]
            print(
                f"{told['served']} answers, {policy['retried']} sent again, longest hold {max(longest):.2f} s"
            )
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        assert gateway.stop(timeout=WAIT_S) == 0
        _gone, alive = psutil.wait_procs(children, timeout=WAIT_S)
        assert not alive
