"""What guesses save a head that says tokens: passes, over sentences of a closed loop, and CPU seconds at published
widths.

    python -m benchmarks.drafts [--episodes 4] [--most 0,2,4,8,16] [--actions FILE.npz]

No published speaker's weights are at hand, and random ones say nothing that is worth guessing. Passes depend on the
sentences alone, so the packaged blocks policy plays its task, and each of its answers, with the same noise, is written
as the two families would say it: OpenVLA's 256 bins between the 1st and the 99th percentile, of the first action, asked
for at every step, and FAST's tokens (a transform along time, times 10, rounded; byte pairs trained on these sentences,
as published for a data set's own tokenizer) of a whole chunk, asked for every eighth step. Then ``Drafts`` guesses them
as the engine lets it. ``--actions``: chunks of other episodes, ``action`` [N, H, A] and ``episode`` [N].

A pass of so many tokens is timed on random weights of two layers of the published width and on one, one thread, and
carried on to all layers; the prompt's keys and values are those of one view and three. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tokenizers import Tokenizer, models, trainers
from torch import nn

import sinew
import sinew.sim
from sinew.core import machine
from sinew.engine.drafts import Drafts
from sinew.families.openvla.model import OpenVLA
from sinew.families.pi_fast.model import PI0Fast
from sinew.models.speaker import DecoderSpeaker, ReadPrompt
from sinew.perf.published import published
from sinew.steps.action_tokens.fast import inverse_dct

EVERY = 8  # executed actions of a chunk that FAST says
FAMILIES: dict[str, tuple[type[DecoderSpeaker], int]] = {
    "openvla": (OpenVLA, 287),
    "pi0-fast": (PI0Fast, 969),
}
WIDTHS = (1, 2, 3, 5, 9, 17)


def played(episodes: int) -> tuple[list[list[np.ndarray]], int]:
    """Return the chunks [H, A] of each episode of blocks, one for every step, and how many episodes were won."""
    found, won = [], 0
    with sinew.load("blocks", "cpu", engine="plan", threads=1) as policy:
        for seed in range(episodes):
            env = gymnasium.make("sinew/Blocks-v0")
            observation, info = env.reset(seed=seed)
            chunks, done = [], False
            while not done:
                chunks.append(policy.infer({**observation, "seed": 0}).actions)
                action = np.clip(chunks[-1][0], env.action_space.low, env.action_space.high)
                observation, _, ended, timeout, info = env.step(action)
                done = ended or timeout
            won += bool(info["is_success"])
            found.append(chunks)
    return found, won


def recorded(path: Path) -> list[list[np.ndarray]]:
    """Return the chunks of each episode of a file: ``action`` [N, H, A], ``episode`` [N], in order."""
    with np.load(path) as file:
        chunks, episode = file["action"], file["episode"]
    return [list(chunks[episode == each]) for each in np.unique(episode)]


def as_bins(episodes: list[list[np.ndarray]]) -> list[list[list[int]]]:
    rows = np.concatenate([[chunk[0] for chunk in chunks] for chunks in episodes])
    low, high = np.percentile(rows, (1, 99), axis=0)
    points = np.linspace(-1, 1, 256)

    def say(row: np.ndarray) -> list[int]:
        unit = np.clip(2 * (row - low) / np.maximum(high - low, 1e-8) - 1, -1, 1)
        return (32000 - np.clip(np.digitize(unit, points), 1, 255)).tolist()

    return [[say(chunk[0]) for chunk in chunks] for chunks in episodes]


def as_fast(episodes: list[list[np.ndarray]]) -> list[list[list[int]]]:
    flat = np.concatenate([np.concatenate(chunks) for chunks in episodes])
    low, high = np.percentile(flat, (1, 99), axis=0)

    def coefficients(chunk: np.ndarray) -> np.ndarray:
        unit = 2 * (chunk - low) / np.maximum(high - low, 1e-8) - 1
        return np.rint(10 * (inverse_dct(np.eye(len(chunk))).T @ unit)).astype(int).reshape(-1)

    asked = [[coefficients(chunk) for chunk in chunks[::EVERY]] for chunks in episodes]
    least = min(int(each.min()) for chunks in asked for each in chunks)
    texts = [["".join(chr(0x4E00 + n - least) for n in each) for each in chunks] for chunks in asked]
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=1024, show_progress=False, max_token_length=10000)
    tokenizer.train_from_iterator([text for chunks in texts for text in chunks], trainer)
    end = tokenizer.get_vocab_size()
    return [[[*tokenizer.encode(text).ids, end] for text in chunks] for chunks in texts]


def passes(episodes: list[list[list[int]]], most: int, cost: dict[int, float] | None = None) -> list[int]:
    """Return how many tokens each pass behind a sentence's first token reads, as the engine does it; without ``cost``,
    by which ``Drafts`` decides whether to guess, it always does."""
    widths, drafts, longest = [], Drafts(max(most, 1)), max(len(said) for e in episodes for said in e)
    for sentence in (sentence for sentences in episodes for sentence in sentences):
        at = 1
        while at < len(sentence):
            ask = most and (cost is None or drafts.pays())
            guess = drafts.guess(sentence[:at], longest - at - 1) if ask else []
            pairs = zip(guess, sentence[at:], strict=False)
            right = next((i for i, (guessed, token) in enumerate(pairs) if guessed != token), len(guess))
            widths.append(1 + len(guess))
            at += right + 1
            if cost is not None:
                drafts.note(
                    bool(guess), float(np.interp(widths[-1], list(cost), list(cost.values()))), right + 1
                )
        drafts.keep(sentence)
    return widths


@torch.inference_mode()
def milliseconds(name: str, rounds: int) -> dict[int, float]:
    """Return CPU milliseconds of a pass by the tokens that it reads, of all layers at the published width: the least of
    ``rounds``, in each of which every width has its turn."""
    family, prompt = FAMILIES[name]
    config = published(name).config
    towers = config.vision if isinstance(config.vision, tuple) else (config.vision,)
    small = tuple(replace(each, num_layers=1) for each in towers)
    depth, found = config.language.num_layers, {}
    config = replace(
        config,
        vision=small if isinstance(config.vision, tuple) else small[0],
        language=replace(config.language, num_layers=2),
    )
    with torch.device("meta"):
        model: Any = family(config)
    for each in (model.language, model.lm_head):
        each.to_empty(device="cpu")
        for weight in each.parameters():
            weight.fill_(0.01)
    size = config.language
    kv = torch.randn(1, prompt, size.num_kv_heads, size.head_dim)
    layers: Sequence[nn.Module] = model.language.layers

    def once(width: int, count: int) -> float:
        model.language.layers = nn.ModuleList(layers[:count])
        valid, last = torch.ones(1, prompt, dtype=torch.bool), torch.randn(1, 1, size.hidden_size)
        context = ReadPrompt(((kv, kv),) * count, valid, valid.sum(1), last)
        spoken = model.first(context)
        if spoken.kv[0][0].shape[1] < width:  # the time of a pass that no sentence is short enough to need
            return float("nan")
        draft, begun = torch.zeros(1, width - 1, dtype=torch.int64), time.process_time()
        model.next(spoken, context) if width == 1 else model.check(spoken, context, draft)
        return 1e3 * (time.process_time() - begun)

    taken = [[(once(width, 1), once(width, 2)) for width in WIDTHS] for _ in range(rounds)]
    for width, (one, two) in zip(WIDTHS, np.min(taken, axis=0), strict=True):
        found[width] = float(one + (depth - 1) * (two - one))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--actions", type=Path)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--most", default="0,2,4,8,16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.actions is None:
        episodes, won = played(arguments.episodes)
        print(f"blocks: {won} of {len(episodes)} won", flush=True)
    else:
        episodes = recorded(arguments.actions)
    print(f"{len(episodes)} episodes, {sum(map(len, episodes))} chunks", flush=True)
    rows: dict[str, Any] = {}
    for name, sentences in (("openvla", as_bins(episodes)), ("pi0-fast", as_fast(episodes))):
        cost = {
            width: taken for width, taken in milliseconds(name, arguments.rounds).items() if taken == taken
        }
        print(f"{name}: CPU ms by tokens of a pass { ({w: round(t) for w, t in cost.items()}) }", flush=True)
        count = sum(map(len, sentences))
        tokens = sum(len(said) for chunks in sentences for said in chunks)
        for most in map(int, arguments.most.split(",")):
            rows[f"{name}, {most}"] = row = {"tokens": round(tokens / count, 1)}
            for how, given in (("always", None), ("measured", cost)):
                widths = passes(sentences, most, given)
                seconds = 1e-3 * np.interp(widths, list(cost), list(cost.values())).sum() / count
                row |= {
                    f"{how}_passes": round(len(widths) / count, 2),
                    f"{how}_cpu_s": round(float(seconds), 2),
                }
            print(f"{name:10} at most {most:2} guessed: {row}", flush=True)
    print(json.dumps({"hardware": machine.cpu_model(), "load_average": os.getloadavg()[0], "rows": rows}))


if __name__ == "__main__":
    main()
