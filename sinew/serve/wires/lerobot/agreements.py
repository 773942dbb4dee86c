"""The agreements with the LeRobot clients of each host. An agreement states which keys of a client's messages belong
to which inputs of the policy. It lasts across connections and restarts of the server.

The stock client names its policy only once, at its start. If its connection breaks, because the network failed or the
server was restarted, gRPC makes a new connection, and the client continues without naming its policy again. After
such a break, the server uses the earlier agreements with the client's host. A small file stores the agreements, so
that they outlive the process. The file has the names of joints and cameras, but no frames, states or actions.
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

PER_HOST = 8  # largest number of agreements that are stored for one host
MAX_FILE = 1 << 20  # largest file, bytes


def state_folder() -> Path:
    """Return the folder for the state of Sinew that outlives a process (XDG base directories)."""
    home = os.environ.get("XDG_STATE_HOME", "")
    return (Path(home) if home else Path.home() / ".local" / "state") / "sinew"


class Agreements:
    """Stores the agreements (which key belongs to which input) with the clients of at most ``hosts`` hosts. Above
    this number, the host with the oldest agreement is removed.
    """

    def __init__(self, hosts: int):
        self._most = hosts
        # Host -> its agreements. The host with the newest agreement is last.
        self._by_host: OrderedDict[str, list[Agreement]] = OrderedDict()
        self._file: Path | None = None
        self._policy = ""

    def open(self, file: Path | None, spec: PolicySpec) -> None:
        """Read the agreements of an earlier process.

        Args:
            file: The file of the agreements. An invalid file is ignored. With None, agreements exist only in
                this process.
            spec: Specification of the served policy. Agreements about another policy are ignored.
        """
        self._file = file
        self._policy = sha256(json.dumps(spec.to_dict(), sort_keys=True).encode()).hexdigest()
        if file is None:
            return
        try:
            content = read_json(file, MAX_FILE)
            if content["policy"] == self._policy:
                for host, entries in list(content["hosts"].items())[: self._most]:
                    self._by_host[str(host)] = [_read(each, spec) for each in entries[:PER_HOST]]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("lerobot: the file of agreements %s is ignored: %s", file, error)

    def add(self, host: str, agreement: Agreement) -> None:
        """Store an agreement (how the keys of a client's observations map to the inputs of the policy) under the host
        of the client. Of each host, the newest ``PER_HOST`` agreements are kept.
        """
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
        """Return the agreements of the clients of this host, newest first."""
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
        except OSError as error:
            # Without the file, clients must start again after a restart of the server.
            logger.warning(
                "lerobot: the agreements could not be stored, so clients must start again after a restart: %s",
                error,
            )
            self._file = None


def fitting(agreements: tuple[Agreement, ...], observation: Mapping[str, Any]) -> Agreement | None:
    """Return the newest agreement whose keys all occur in this observation; None if no agreement fits, or if several
    fit and differ.
    """
    fit = [
        each
        for each in agreements
        if all(key in observation for key in (*each.state, *(key for key, _camera in each.images)))
    ]
    if len({(each.state, each.images, each.prompt, each.channels_first) for each in fit}) != 1:
        return None
    return fit[0]


def _read(found: Mapping[str, Any], spec: PolicySpec) -> Agreement:
    agreement = Agreement(
        state=tuple(map(str, found["state"])),
        images=tuple((str(key), str(camera)) for key, camera in found["images"]),
        prompt=str(found["prompt"]),
        channels_first=None if found["channels_first"] is None else bool(found["channels_first"]),
        actions=min(max(1, int(found["actions"])), spec.chunk_size),
        helpers=str(found["helpers"]),
    )
    if len(agreement.state) != spec.state.dim:
        raise ValueError(f"{len(agreement.state)} joints, but the policy has {spec.state.dim}")
    return agreement
