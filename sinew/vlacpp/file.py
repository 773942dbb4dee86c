"""A GGUF file of vla.cpp: its weights as sources, its metadata with types.

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
PACKED = {"bitvla": (GGMLQuantizationType.I8,)}  # bytes of its ternary matrices


class VlacppFile:
    """One file. Look-ups of ``ARCHITECTURE.*`` metadata raise :class:`ConvertError` that names the key."""

    def __init__(self, path: Path):
        if path.suffix in (".safetensors", ".pt", ".bin", ".json"):
            raise ConvertError(f"{path}: expected the directory that it lies in, or a GGUF file of vla.cpp")
        try:
            self._file = GGUFFile(path)
        except BundleError as error:
            raise ConvertError(str(error)) from None
        self.path, self.metadata = path, self._file.metadata
        if KEY_VERSION in self.metadata:
            raise ConvertError(f"{path} is a Sinew bundle already")
        self.architecture = str(self.metadata.get(KEY_ARCHITECTURE))

    @cached_property
    def tensors(self) -> dict[str, TensorSource]:
        """The weights under vla.cpp's names. Raises :class:`ConvertError` for a quantised one."""
        found = {}
        for info in self._file.tensors.values():
            if info.type not in (*STORED, *PACKED.get(self.architecture, ())):
                raise ConvertError(
                    f"{self.path}: tensor {info.name!r} is quantised ({info.type.name}); give the F32/BF16 file"
                )
            data = FileSlice(self.path, info.offset, info.nbytes)
            found[info.name] = TensorSource(info.name, info.shape, info.type, info.nbytes, data)
        return found

    def integer(self, name: str) -> int:
        value = self.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
            raise ConvertError(f"{self.path}: {self.architecture}.{name} is {value!r}, expected a size")
        return value

    def number(self, name: str) -> float:
        value = self.metadata.get(f"{self.architecture}.{name}")
        if not isinstance(value, float):
            raise ConvertError(f"{self.path}: {self.architecture}.{name} is {value!r}, expected a number")
        # Stored as float32; the shortest decimal that rounds to it is the one that was meant (1e-08, 1e-06).
        return float(f"{value:.7g}")

    def record(self, name: str) -> dict[str, Any]:
        """Return a JSON object that is stored as text."""
        value = self.metadata.get(f"{self.architecture}.{name}")
        try:
            found = parse_json(value) if isinstance(value, str) else None
        except UntrustedError:
            found = None
        if not isinstance(found, dict):
            raise ConvertError(
                f"{self.path}: {self.architecture}.{name}: expected a JSON object, got {str(value)[:40]!r}"
            )
        return found


def decoder_rules(to: str, prefix: str = "vlm") -> list[Rule]:
    """Return the rules of a language model: what its names begin with, and upstream's names after ``to``."""
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
