"""What was agreed with the LeRobot clients of each host, across connections and across restarts of the server.

The stock client names its policy once, at its start. When its connection breaks, because the network failed or because
the server was started again, gRPC makes another one below it, and the client goes on as if nothing had happened: what
was agreed with its host before is used. So that this outlives the process, it is written to a small file. It holds the
names of joints and cameras, and nothing of what a robot saw or did.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from sinew_client.untrusted import read_json

from sinew.core import PolicySpec, machine
from sinew.serve.wires.lerobot.features import Agreement

logger = logging.getLogger(__name__)

PER_HOST = 8  # agreements remembered for each
MAX_FILE = 1 << 20  # bytes


def state_folder() -> Path:
    """Where this user's programs keep what is to outlive them (XDG base directories)."""
    found = os.environ.get("XDG_STATE_HOME", "")
    return (Path(found) if found else Path.home() / ".local" / "state") / "sinew"


class Agreements:
    """hosts: how many are remembered; beyond, the one whose client was away for longest is forgotten.

    file: None for what only this process is to remember. spec: agreements are about one policy and no other.
    """

    def __init__(self, hosts: int):
        self._most = hosts
        self._by_host: OrderedDict[str, list[Agreement]] = OrderedDict()  # the newest stand last
        self._file: Path | None = None
        self._policy = ""

    def open(self, file: Path | None, spec: PolicySpec) -> None:
        """Read the agreements of an earlier process about the same policy. An invalid file is ignored."""
        self._file = file
        self._policy = sha256(json.dumps(spec.to_dict(), sort_keys=True).encode()).hexdigest()
        if file is None:
            return
        try:
            content = read_json(file, MAX_FILE)
            if content["policy"] == self._policy:
                for host, found in list(content["hosts"].items())[: self._most]:
                    self._by_host[str(host)] = [_read(each, spec) for each in found[:PER_HOST]]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("lerobot: %s is not used: %s", file, error)

    def add(self, host: str, agreement: Agreement) -> None:
        """A client of this host agreed to that."""
        agreed = self._by_host.setdefault(host, [])
        if agreement in agreed:
            agreed.remove(agreement)
        agreed.append(agreement)
        del agreed[:-PER_HOST]
        self._by_host.move_to_end(host)
        while len(self._by_host) > self._most:
            self._by_host.popitem(last=False)
        self._write()

    def of(self, host: str) -> tuple[Agreement, ...]:
        """What clients of this host agreed to, the newest first."""
        return tuple(reversed(self._by_host.get(host, ())))

    def _write(self) -> None:
        if self._file is None:
            return
        content = {
            "policy": self._policy,
            "hosts": {host: [asdict(each) for each in agreed] for host, agreed in self._by_host.items()},
        }
        try:
            machine.write_whole(self._file, json.dumps(content).encode())
        except OSError as error:  # then a restarted server asks its clients to start again
            logger.warning("lerobot: what was agreed is not remembered: %s", error)
            self._file = None


def fitting(agreements: tuple[Agreement, ...], observation: Mapping[str, Any]) -> Agreement | None:
    """The newest of the agreements that this observation can be read by; None if those disagree about its meaning."""
    fit = [
        each
        for each in agreements
        if all(key in observation for key in (*each.state, *(key for key, _camera in each.images)))
    ]
    if len({(each.state, each.images, each.prompt, each.channels_first) for each in fit}) != 1:
        return None
    return fit[0]


def _read(found: Mapping[str, Any], spec: PolicySpec) -> Agreement:
    made = Agreement(
        state=tuple(map(str, found["state"])),
        images=tuple((str(key), str(camera)) for key, camera in found["images"]),
        prompt=str(found["prompt"]),
        channels_first=None if found["channels_first"] is None else bool(found["channels_first"]),
        actions=min(max(1, int(found["actions"])), spec.chunk_size),
        helpers=str(found["helpers"]),
    )
    if len(made.state) != spec.state.dim:
        raise ValueError(f"{len(made.state)} joints where the policy has {spec.state.dim}")
    return made
