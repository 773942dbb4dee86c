"""A GGUF file of vla.cpp. Weights are read only when they are used, and the types of all metadata entries are checked.

Schema: vla.cpp ``scripts/convert_*_to_gguf.py``, ``gguf_blocks.py`` and ``gguf_common.py`` (commit b18873d).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType
from sinew_client.untrusted import UntrustedError, parse_json

from sinew.bundle.gguf_file import GGUFFile
from sinew.bundle.schema import KEY_ARCHITECTURE, KEY_VERSION
from sinew.bundle.writer import FileSlice, TensorSource
from sinew.convert.tensors import Rule
from sinew.core import BundleError, ConvertError

FORMAT = "vla.cpp-gguf"
STORED = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
# Architecture -> types besides floats, for packed ternary matrices.
PACKED = {"bitvla": (GGMLQuantizationType.I8,)}


class VlacppFile:
    """A GGUF file of vla.cpp. Reading a metadata entry ``ARCHITECTURE.NAME`` raises :class:`ConvertError` with the
    key if the entry is missing or has a wrong type.
    """

    def __init__(self, path: Path):
        if path.suffix in (".safetensors", ".pt", ".bin", ".json"):
            raise ConvertError(
                f"{path}: expected a checkpoint folder or a GGUF file of vla.cpp; pass its folder"
            )
        try:
            self._file = GGUFFile(path)
        except BundleError as error:
            raise ConvertError(str(error)) from None
        self.path, self.metadata = path, self._file.metadata
        if KEY_VERSION in self.metadata:
            raise ConvertError(f"{path} is a Sinew bundle already; it needs no conversion")
        self.architecture = str(self.metadata.get(KEY_ARCHITECTURE))

    @cached_property
    def tensors(self) -> dict[str, TensorSource]:
        """Return a dict: vla.cpp's name of a weight -> the weight.

        Raises:
            ConvertError: A weight is quantised.
        """
        tensors = {}
        for info in self._file.tensors.values():
            if info.type not in (*STORED, *PACKED.get(self.architecture, ())):
                raise ConvertError(
                    f"{self.path}: tensor {info.name!r} is quantised ({info.type.name}); pass the F32 or BF16 file"
                )
            data = FileSlice(self.path, info.offset, info.nbytes)
            tensors[info.name] = TensorSource(info.name, info.shape, info.type, info.nbytes, data)
        return tensors

    def integer(self, name: str) -> int:
        value = self.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
            raise ConvertError(f"{self.path}: {self.architecture}.{name} is {value!r}, expected a size")
        return value

    def number(self, name: str) -> float:
        value = self.metadata.get(f"{self.architecture}.{name}")
        if not isinstance(value, float):
            raise ConvertError(f"{self.path}: {self.architecture}.{name} is {value!r}, expected a number")
        # The file stores float32. The converter wrote the shortest decimal that rounds to this value (1e-08, 1e-06).
        return float(f"{value:.7g}")

    def record(self, name: str) -> dict[str, Any]:
        """Return a metadata entry whose value is the text of a JSON object, as a record."""
        value = self.metadata.get(f"{self.architecture}.{name}")
        try:
            content = parse_json(value) if isinstance(value, str) else None
        except UntrustedError:
            content = None
        if not isinstance(content, dict):
            raise ConvertError(
                f"{self.path}: {self.architecture}.{name}: expected a JSON object, got {str(value)[:40]!r}; write the"
                " file again with vla.cpp"
            )
        return content


def decoder_rules(to: str, prefix: str = "vlm") -> list[Rule]:
    """Return the rules that rename the tensors of a language model.

    Args:
        to: Prefix of the new names, which are transformers' names.
        prefix: Prefix of vla.cpp's names.
    """
    old, layer = rf"{prefix}\.blk\.(\d+)\.", rf"{to}layers.\1."
    return [
        Rule(r"token_embd\.weight", (f"{to}embed_tokens.weight",)),
        Rule(rf"{prefix}\.output_norm\.weight", (f"{to}norm.weight",)),
        Rule(old + r"attn_norm\.weight", (f"{layer}input_layernorm.weight",)),
        Rule(old + r"ffn_norm\.weight", (f"{layer}post_attention_layernorm.weight",)),
        Rule(old + r"attn_([qkvo])\.(weight|bias)", (rf"{layer}self_attn.\2_proj.\3",)),
        Rule(old + r"attn_([qk])_norm\.weight", (rf"{layer}self_attn.\2_norm.weight",)),
        Rule(old + r"ffn_(gate|up|down)\.weight", (rf"{layer}mlp.\2_proj.weight",)),
    ]
