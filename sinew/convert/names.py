"""Convert tensor names of the library transformers to Sinew's names. Families add the prefixes of their checkpoints."""

from __future__ import annotations

from sinew.convert.tensors import Rule, renames

Renames = tuple[tuple[str, str], ...]

ATTENTION: Renames = ((".self_attn.", ".attn."),)
VISION: Renames = (
    (".embeddings.patch_embedding.", ".patch_embedding."),
    (".embeddings.position_embedding.", ".position_embedding."),
    (".encoder.layers.", ".layers."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    (".out_proj.", ".o_proj."),
    (".post_layernorm.", ".norm."),
)
DECODER: Renames = ((".input_layernorm.", ".input_norm."), (".post_attention_layernorm.", ".post_norm."))


def rename(name: str, prefixes: Renames) -> str:
    """Convert one tensor name: replace the first of ``prefixes`` that matches, then the names of the layers."""
    name = replace_prefix(name, prefixes)
    for old, new in ATTENTION + VISION + DECODER:
        name = name.replace(old, new)
    return name


def replace_prefix(name: str, prefixes: Renames) -> str:
    """Return ``name`` with a new prefix. ``prefixes`` contains pairs (old, new), and the first pair whose old prefix
    matches is used."""
    old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
    return new + name[len(old) :]


def upstream_name(name: str, prefixes: Renames) -> str:
    """Return the name of a tensor in transformers, the inverse of :func:`rename`, to write a checkpoint."""
    for old, new in ATTENTION + (VISION if name.startswith("vision.") else DECODER):
        name = name.replace(new, old)
    return replace_prefix(name, tuple((new, old) for old, new in prefixes))


def language_rules(upstream: str, layers: int = 0, norm: str = "norm") -> tuple[Rule, ...]:
    """Return the rules that rename the tensors of a language model.

    Args:
        upstream: Pattern of the prefix of their names.
        layers: Number of layers that are read. Later layers are dropped. 0 reads all layers.
        norm: Name of the final norm; "" if it is not read.
    """
    dropped = "|".join(str(i) for i in range(layers, 4 * layers + 64))
    layer = "self_attn=attn input_layernorm=input_norm post_attention_layernorm=post_norm mlp"
    return (
        *([Rule(upstream + rf"layers\.({dropped})\..*")] if layers else []),
        *renames(upstream + r"layers\.(\d+)\.", r"language.layers.\1.", layer),
        *renames(upstream, "language.", f"embed_tokens {norm}"),
    )
