"""Creates the text that a server prints when it is ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib import request
from urllib.parse import urlsplit

from sinew_client.addresses import split_scheme

from sinew.core import PolicySpec, VectorSpec
from sinew.core.hints import short_reason
from sinew.serve.transport.listen import reachable

if TYPE_CHECKING:
    from sinew.serve.wire import Listener


def ready_text(
    spec: PolicySpec,
    about: Mapping[str, Any],
    wires: Sequence[Listener],
    more: Mapping[str, str] = MappingProxyType({}),
    keyed: bool = False,
    verbose: bool = False,
) -> str:
    """Return the addresses, the inputs of the policy, and for each protocol a program that requests one chunk.

    Args:
        spec: The policy's specification.
        about: The policy's description of its engine.
        wires: The listeners.
        more: Name -> source of further policies.
        keyed: True if the server requires a key.
        verbose: Print the whole reason for the engine.
    """
    sizes = "other sizes are resized" if spec.resizes_frames else "exactly this size"
    cameras = [
        f"{camera.name}: uint8 [{camera.height}, {camera.width}, 3] RGB, {sizes}" for camera in spec.cameras
    ]
    reason = about["engine_reason"] if verbose else short_reason(about["engine_reason"])
    lines = [
        f"ready on {' '.join(reachable(wire.address) for wire in wires)}",
        f"  policy   {spec.name} ({spec.architecture}), {about['dtype']} on {about['device']}",
        f"  engine   {about['engine']}: {reason}",
        *(f"  {'cameras' if index == 0 else '':7}  {camera}" for index, camera in enumerate(cameras)),
        f"  state    {_vector(spec.state)}",
        f"  action   {_vector(spec.action)}; chunks of {spec.chunk_size}",
        *(f"  also     {name}: {source}; address HOST:PORT/{name}" for name, source in more.items()),
        *(
            f'  adapter  {name}: {each["policy"]}; send "adapter": "{name}"'
            for name, each in about.get("adapters", {}).items()
        ),
    ]
    pages = [page for wire in wires if (page := wire.dashboard)]
    lines += [f"  page     {reachable(page)} shows the requests" for page in pages]
    secure = any(split_scheme(wire.address)[0] in ("wss", "tls") for wire in wires)
    lines += ["  key      required: the programs read it from SINEW_API_KEY in their environment"] * keyed
    lines += ["  TLS      SSL_CERT_FILE=CERT.pem lets the programs trust your own certificate"] * secure
    if request.getproxies().keys() & {"http", "https", "all"}:
        web = [
            urlsplit(reachable(wire.address))
            for wire in wires
            if split_scheme(wire.address)[0] not in ("tcp", "tls")
        ]
        far = {at.hostname for at in web if at.hostname and not request.proxy_bypass(at.hostname)}
        lines += [
            f"  proxy    no_proxy={host} lets programs on this machine connect directly"
            for host in sorted(far)
        ]
    for wire in wires:
        program = [f"    {line}" for line in wire.guide(spec)]
        lines += [f"  {wire.name} at {reachable(wire.address)}; example:", "", *program, ""]
    return "\n".join(lines)


def _vector(spec: VectorSpec) -> str:
    return f"{spec.dim} numbers" + (f": {', '.join(spec.labels)}" if spec.labels else "")
