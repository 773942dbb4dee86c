"""``sinew serve``: one bundle on one address, until a signal."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from sinew import __version__, machine
from sinew.core import BundleError, PolicySpec, VectorSpec
from sinew.serve.scheduler import Scheduler
from sinew.serve.server import Server, ServerConfig
from sinew.serve.wires.native import NativeWire

if TYPE_CHECKING:
    from sinew.policy import Policy

logger = logging.getLogger(__name__)


def serve(
    bundle: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 5555,
    device: str = "cpu",
    dtype: str | None = None,
    queue: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 8,
    threads: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
    verbose: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Serve a bundle over ZeroMQ with Protobuf messages, until SIGINT or SIGTERM.

    Clients are `sinew_client.Client`, `sinew client`, and vla.cpp's own. The port is taken before the model
    is loaded; requests that come early are answered once it is warm. The first signal stops the server
    between two stages of the running inference, the second one at once.

    Args:
        bundle: the bundle file.
        host: address to listen on; anything but loopback is open to every machine that can reach it.
        port: 0 picks a free one.
        device: cpu, or cuda:N.
        dtype: compute type; the device's default if absent.
        queue: requests that may wait for the running one; more are refused as busy.
        threads: for compute; chosen from the cores of this process if absent.
        verbose: log more.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    config = ServerConfig(host=host, port=port, queue_size=queue)
    server = Server(config)
    finished = True
    try:
        if not bundle.is_file():
            raise BundleError(f"{bundle}: no such file")
        if not config.is_loopback:
            logger.warning("%s is reachable from other machines, and requests are not authenticated", host)
        with server.signals():
            finished = _load_and_run(server, bundle, device, dtype, threads)
    finally:
        server.close()
    if not finished:
        # A stage of a big model may take seconds and nothing can interrupt it. There is nothing to save,
        # and a thread inside torch while the interpreter is taken down would crash it.
        logger.info("leaving while a stage is still running")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


def _load_and_run(server: Server, bundle: Path, device: str, dtype: str | None, threads: int | None) -> bool:
    """Returns False when a thread is still inside the model."""
    scheduler = None
    try:
        import torch

        import sinew

        reason = "asked for"
        if threads is None:
            threads, reason = machine.recommended_threads()
        torch.set_num_threads(threads)
        logger.info(
            "listening on %s; loading %s with %d threads (%s)", server.address, bundle, threads, reason
        )
        policy = sinew.load(bundle, device=device, dtype=dtype)
        scheduler = Scheduler(policy, queue_size=server.config.queue_size)
        scheduler.start()
        wire = NativeWire(policy.spec, policy.padded_state_dim, policy.padded_action_dim)
        print(ready_text(policy, server), flush=True)
        return server.run(scheduler, wire, describe(policy, threads))
    except KeyboardInterrupt:
        logger.info("stopped before the server was ready")
        if scheduler is None:
            return True
        scheduler.stop()
        return scheduler.join(server.config.grace_s)


def describe(policy: Policy, threads: int) -> dict[str, Any]:
    """The answer to METADATA requests."""
    return {
        "server": {
            "name": "sinew",
            "version": __version__,
            "device": str(policy.device),
            "dtype": policy.dtype,
            "threads": threads,
            "hardware": machine.cpu_model(),
        },
        "policy": policy.spec.to_dict(),
        "padded_state_dim": policy.padded_state_dim,
        "padded_action_dim": policy.padded_action_dim,
    }


def ready_text(policy: Policy, server: Server) -> str:
    """The address, what the bundle expects, and a program that asks for one chunk."""
    spec = policy.spec
    sizes = "other sizes are resized" if spec.resizes_frames else "exactly this size"
    cameras = [
        f"{camera.name}: uint8 [{camera.height}, {camera.width}, 3] RGB, {sizes}" for camera in spec.cameras
    ]
    lines = [
        f"ready on {server.address}",
        f"  policy   {spec.name} ({spec.architecture}), {policy.dtype} on {policy.device}",
        *(f"  {'cameras' if index == 0 else '':7}  {camera}" for index, camera in enumerate(cameras)),
        f"  state    {_vector(spec.state)}",
        f"  action   {_vector(spec.action)}; chunks of {spec.chunk_size}",
        "  ask it with",
        "",
    ]
    return "\n".join(lines + [f"    {line}" for line in client_program(spec, _client_address(server))]) + "\n"


def client_program(spec: PolicySpec, address: str) -> list[str]:
    """Lines of Python that run as they are where ``sinew-client`` is installed."""
    images = [
        f'        "{camera.name}": np.zeros(({camera.height}, {camera.width}, 3), np.uint8),'
        for camera in spec.cameras
    ]
    return [
        "import numpy as np",
        "from sinew_client import Client",
        "",
        "observation = {",
        '    "images": {',
        *images,
        "    },",
        f'    "state": np.zeros({spec.state.dim}, np.float32),',
        '    "prompt": "pick up the red cube",',
        "}",
        f'with Client("{address}") as policy:',
        f"    print(policy.infer(observation).actions)  # float32 [{spec.chunk_size}, {spec.action.dim}]",
    ]


def _vector(spec: VectorSpec) -> str:
    names = [
        f"{name} [{unit}]" if unit else name
        for name, unit in zip(spec.names, spec.units or ("",) * len(spec.names), strict=True)
    ]
    return f"{spec.dim} numbers" + (f": {', '.join(names)}" if names else "")


def _client_address(server: Server) -> str:
    """Where clients connect: this machine's name in place of an address that means every interface."""
    for wildcard in ("0.0.0.0", "[::]"):  # noqa: S104 - looked for, not bound
        if f"//{wildcard}:" in server.address:
            return server.address.replace(wildcard, socket.gethostname())
    return server.address
