"""A byte-level BPE tokenizer for random checkpoints, in place of SmolVLM2's tokenizer.

It has the vocabulary size and the special-token ids of SmolVLM2's tokenizer (49280 entries, ``<image>`` at 49190). It
merges common words of robot instructions, so that a prompt has about as many tokens as words. The other token ids have
no meaning.
"""

from __future__ import annotations

import json

from sinew_client.untrusted import parse_json

MAX_LENGTH = 8192
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2

# This text was written for this file. The trained tokenizer merges the words of demos and benchmarks.
CORPUS = """
pick up the red cube and place it in the bowl
put the coffee cup on the saucer next to the spoon
move the motorcycle helmet to the left side of the table
grasp the blue block and stack it on top of the green block
open the drawer and take out the towel then close the drawer
push the button on the right and pull the lever on the left
fold the towel and hand it to the person in the orange suit
slide the plate under the lamp and turn the knob to the right
reach the target with the tip of the gripper and hold still
"""


def tokenizer_json(vocab_size: int) -> str:
    """Return the text of a ``tokenizer.json``.

    Args:
        vocab_size: Number of tokens, at least 512, so that all special tokens fit.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from tokenizers import decoders as _decoders

    added = 128  # SmolVLM2 adds 128 tokens after the 49152 of SmolLM2's vocabulary
    base = vocab_size - added
    if base < 384:
        raise ValueError(f"vocab_size: expected at least {384 + added}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = _decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(base, 768),
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(CORPUS.strip().splitlines(), trainer)

    document = parse_json(tokenizer.to_str(), finite=False)
    vocab = document["model"]["vocab"]
    for token_id in range(len(vocab), base):
        vocab[f"<filler_{token_id}>"] = token_id
    names = {base: "<global-img>", base + 37: "<fake_token_around_image>", base + 38: "<image>"}
    document["added_tokens"] += [
        _added(token_id, names.get(token_id, f"<extra_{token_id}>")) for token_id in range(base, vocab_size)
    ]
    return json.dumps(document, ensure_ascii=False)


def _added(token_id: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def tokenizer_config(tokenizer_class: str) -> dict[str, object]:
    """Return the content of ``tokenizer_config.json``, the file next to ``tokenizer.json``."""
    return {
        "tokenizer_class": tokenizer_class,
        "model_max_length": MAX_LENGTH,
        "pad_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
