"""A client of GR00T's policy server, written from the public protocol: pyzmq, msgpack and numpy, without Sinew.

    python groot_client.py ADDRESS DIALECT < requests > replies

It reads ``.npz`` requests from a folder (see ``main``) and writes the replies next to them. DIALECT is n1.5, n1.6,
n1.6-flat or n1.7: the messages of the three releases of ``PolicyClient``, and the flat observations of the simulation
wrapper.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import msgpack
import numpy as np
import zmq


class ModalityConfig:
    """Has the two fields that every release has. As with a dataclass, a third field raises TypeError."""

    def __init__(self, delta_indices, modality_keys):
        assert isinstance(delta_indices, list)
        assert isinstance(modality_keys, list)
        assert modality_keys
        self.delta_indices, self.modality_keys = delta_indices, modality_keys


def encode_npy(value):
    if isinstance(value, np.ndarray):
        buffer = io.BytesIO()
        np.save(buffer, value, allow_pickle=False)
        return {"__ndarray_class__": True, "as_npy": buffer.getvalue()}
    return value


def decode_npy(obj):
    if "__ModalityConfig_class__" in obj:
        return ModalityConfig(**obj["as_json"])
    if "__ndarray_class__" in obj:
        return np.load(io.BytesIO(obj["as_npy"]), allow_pickle=False)
    return obj


def decode_n15(obj):
    if "__ModalityConfig_class__" in obj:
        return ModalityConfig(**json.loads(obj["as_json"]))
    return decode_npy(obj)


def encode_raw(value):
    """Encode an array as msgpack-numpy does, with keys of bytes."""
    if isinstance(value, np.ndarray):
        return {
            b"nd": True,
            b"type": value.dtype.str,
            b"kind": b"",
            b"shape": value.shape,
            b"data": value.tobytes(),
        }
    return value


def decode_raw(obj):
    if "__ModalityConfig__" in obj:
        payload = obj["as_json"]
        return ModalityConfig(**(json.loads(payload) if isinstance(payload, str) else payload))
    if b"nd" in obj:
        assert obj[b"kind"] == b""
        assert obj[b"nd"] is True
        return np.ndarray(buffer=obj[b"data"], dtype=np.dtype(obj[b"type"]), shape=obj[b"shape"])
    return obj


HOOKS = {
    "n1.5": (encode_npy, decode_n15),
    "n1.6": (encode_npy, decode_npy),
    "n1.6-flat": (encode_npy, decode_npy),
    "n1.7": (encode_raw, decode_raw),
}


class PolicyClient:
    """Sends the same messages as ``gr00t.policy.server_client.PolicyClient``."""

    def __init__(self, host="localhost", port=5555, api_token=None, dialect="n1.6", timeout_ms=60_000):
        self.dialect = dialect
        self.api_token = api_token
        self.encode, self.decode = HOOKS[dialect]
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        self.socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://{host}:{port}")

    def call_endpoint(self, endpoint, data=None, requires_input=True):
        request = {"endpoint": endpoint}
        if requires_input:
            request["data"] = data
        if self.api_token:
            request["api_token"] = self.api_token
        self.socket.send(msgpack.packb(request, default=self.encode))
        reply = msgpack.unpackb(self.socket.recv(), object_hook=self.decode)
        if isinstance(reply, dict) and "error" in reply:
            raise RuntimeError(f"Server error: {reply['error']}")
        return reply

    def ping(self):
        return self.call_endpoint("ping", requires_input=False)

    def get_modality_config(self):
        return self.call_endpoint("get_modality_config", requires_input=False)

    def reset(self, options=None):
        return self.call_endpoint("reset", {"options": options})

    def get_action(self, observation, options=None):
        if self.dialect == "n1.5":
            return self.call_endpoint("get_action", observation)
        return tuple(self.call_endpoint("get_action", {"observation": observation, "options": options}))

    def close(self):
        self.socket.close()
        self.context.term()


def main():
    """Send the requests in a folder and write the replies.

    A request is ``request-N.npz``: arrays by key ("video.front", ...), "language" texts [B], "seed". The reply is
    ``reply-N.npz``. The last line of standard output has the answers of the other endpoints.
    """
    host, port, dialect, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    assert not any(name.split(".")[0] in ("sinew", "sinew_client", "tests") for name in sys.modules)
    client = PolicyClient(host, port, dialect=dialect)
    said = {"ping": client.ping()}
    if dialect != "n1.5":
        config = client.get_modality_config()
        said["modalities"] = {k: [v.delta_indices, v.modality_keys] for k, v in config.items()}
        said["reset"] = client.reset()
        prompt = config["language"].modality_keys[0]
    try:
        client.call_endpoint("kill", requires_input=False)
    except RuntimeError as error:
        said["kill"] = str(error)
    for path in sorted(folder.glob("request-*.npz")):
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        texts = arrays.pop("language").tolist()
        seed = int(arrays.pop("seed"))
        if dialect == "n1.5":
            reply = client.get_action({**arrays, "annotation.human.task_description": texts})
            info = {}
        else:
            if dialect == "n1.6-flat":
                observation = {**arrays, prompt: texts}
            else:
                observation = {"video": {}, "state": {}, "language": {prompt: [[each] for each in texts]}}
                for name, array in arrays.items():
                    modality, key = name.split(".", 1)
                    observation[modality][key] = array
            reply, info = client.get_action(observation, {"seed": seed})
        np.savez(path.with_name(path.name.replace("request", "reply")), info=json.dumps(info), **reply)
    client.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
