"""SentencePiece models become a tokenizer.json with the same ids, held against sentencepiece itself."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sinew.convert.read.sentencepiece import tokenizer_json
from sinew.convert.tokenizer_files import load_tokenizer
from sinew.core import ConvertError

CORPUS = """pick up the red cube and place it in the bin
put the blue block into the left bin, then the green one into the right bin
Task: fold the towel, State: 128 7 255 0 31;
Action: open the drawer and take the cup out of it; close it again
move the gripper to the handle of the kettle and hold it still for ten seconds
"""
OPTIONS = {
    "model_type": "bpe",
    "vocab_size": 480,
    "byte_fallback": True,
    "split_digits": True,
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
    "allow_whitespace_only_pieces": True,
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "pad_piece": "<pad>",
    "eos_piece": "<eos>",
    "bos_piece": "<bos>",
    "user_defined_symbols": ["\n", "\n\n"],
}


def train(path: Path, **changes) -> Path:
    """A model with Gemma's settings, small."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines() * 4),
        model_writer=out,
        minloglevel=2,
        **(OPTIONS | changes),
    )
    path.write_bytes(out.getvalue())
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("spm") / "paligemma_tokenizer.model")


@pytest.fixture(scope="module")
def pair(model) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    return reference, Tokenizer.from_str(tokenizer_json(model))


words = st.lists(st.sampled_from(CORPUS.split()), max_size=12).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(text=words | st.text(max_size=40) | st.text("abc 123\n_,", max_size=40))
def test_ids_are_sentencepieces(pair, text):
    reference, tokenizer = pair
    assert tokenizer.encode(text).ids == reference.encode(text, add_bos=True)


def test_pi05_prompt(pair):
    reference, tokenizer = pair
    text = "Task: put the blue block into the bin, State: 0 17 255 128 -1;\nAction: "
    assert tokenizer.encode(text).ids == reference.encode(text, add_bos=True)


def test_found_like_a_tokenizer_json(model):
    files = load_tokenizer([model], "")
    assert files.token_id("<bos>") == 2


def test_other_models_are_refused(model, tmp_path, monkeypatch):
    unigram = train(tmp_path / "unigram.model", model_type="unigram", vocab_size=300)
    with pytest.raises(ConvertError, match="only SentencePiece models of type BPE"):
        tokenizer_json(unigram)
    normalising = train(tmp_path / "nfkc.model", normalization_rule_name="nmt_nfkc")
    with pytest.raises(ConvertError, match="only models without normalisation"):
        tokenizer_json(normalising)
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)
    with pytest.raises(ConvertError, match=r"\[sentencepiece\]"):
        tokenizer_json(model)
