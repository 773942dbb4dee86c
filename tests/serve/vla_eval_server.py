"""A model server of vla-eval that uses a Sinew client: ``python -m tests.serve.vla_eval_server ADDRESS [CHUNK]``.

The program prints its port, and the result of each episode at its end. It requests the same noise as ``sinew eval``
with noise 0, so that both play the same episodes.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio
import numpy as np
from sinew_client import Client
from vla_eval.model_servers.predict import PredictModelServer
from vla_eval.model_servers.serve import serve_async

SEED = 5000


class Bridge(PredictModelServer):
    """The model server. chunk: number of executed actions of each chunk, or 0 to return whole chunks."""

    def __init__(self, address: str, chunk: int) -> None:
        super().__init__(chunk_size=chunk or None)
        self.client = Client(address, timeout=60.0)
        self.episode, self.asked = -1, 0

    async def on_episode_start(self, config: dict[str, Any], ctx: Any) -> None:
        self.episode, self.asked = self.episode + 1, 0
        await super().on_episode_start(config, ctx)

    def predict(self, obs: dict[str, Any], ctx: Any) -> dict[str, Any]:
        words = np.random.SeedSequence([0, SEED + self.episode, self.asked]).generate_state(2, np.uint32)
        self.asked += 1
        chunk = self.client.infer(
            {
                "images": obs["images"],
                "state": obs["states"],
                "prompt": obs["task_description"],
                "seed": int(words[0]) << 31 | int(words[1]) >> 1,
            }
        )
        return {"actions": chunk.actions}


async def main(address: str, chunk: str = "8") -> None:
    async with anyio.create_task_group() as group:
        port = await group.start(serve_async, Bridge(address, int(chunk)), "127.0.0.1", 0)
        print(port, flush=True)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
