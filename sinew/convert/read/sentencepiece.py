"""Convert a SentencePiece BPE model (``paligemma_tokenizer.model``) to a ``tokenizer.json``.

openpi's users have Gemma's tokenizer in this form. To split a text into tokens, SentencePiece repeatedly merges the two
neighbouring pieces whose union has the best score. The library ``tokenizers`` merges the pair that comes first in a
list. So the list contains every split of every piece into two pieces, sorted by the score of the whole piece.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from sinew.convert.read.files import read_bytes
from sinew.core import ConvertError
from sinew.core.extras import install

# The values of SentencePiece.Type in sentencepiece_model.proto.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
BPE = 2  # the value of TrainerSpec.ModelType for byte pair encoding
SPACE = "\u2581"


def tokenizer_json(path: Path) -> str:
    """Return the text of a ``tokenizer.json`` that gives the same ids, with a leading ``<bos>``."""
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError:
        raise ConvertError(
            f"{path} is a SentencePiece model; reading it needs sentencepiece"
            f" ({install('sentencepiece')}), or pass the tokenizer.json of the same repository"
        ) from None
    model = ModelProto()
    try:
        model.ParseFromString(read_bytes(path))
    except Exception as error:  # noqa: BLE001 - protobuf's error class differs between its implementations
        raise ConvertError(f"{path}: not a SentencePiece model ({error}); download the file again") from None
    if not model.pieces or model.trainer_spec.model_type != BPE:
        raise ConvertError(
            f"{path}: only SentencePiece models of type BPE are supported, such as Gemma's; pass a tokenizer.json"
        )
    if model.normalizer_spec.remove_extra_whitespaces or model.normalizer_spec.precompiled_charsmap:
        raise ConvertError(
            f"{path}: the model normalises its text, and only models without normalisation (Gemma) are supported; pass"
            " a tokenizer.json"
        )

    vocab = {piece.piece: index for index, piece in enumerate(model.pieces)}
    unknown = next((p.piece for p in model.pieces if p.type == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab, _merges(model.pieces, vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    if model.normalizer_spec.add_dummy_prefix:
        spaces.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(p.piece, normalized=False) for p in model.pieces if p.type in (CONTROL, UNKNOWN)]
    )
    tokenizer.add_tokens(
        [AddedToken(p.piece, normalized=False) for p in model.pieces if p.type == USER_DEFINED]
    )
    bos = model.pieces[model.trainer_spec.bos_id].piece if model.trainer_spec.bos_id >= 0 else None
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, model.trainer_spec.bos_id)]
        )
    return tokenizer.to_str()


def _merges(pieces, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, piece in enumerate(pieces):
        text = piece.piece
        if piece.type != NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                merges.append((-piece.score, index, vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]
