"""Names of transformers' building blocks -> ours. Families add the prefixes under which they keep them."""

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
    """Replace the first prefix that matches, then the names of blocks."""
    name = replace_prefix(name, prefixes)
    for old, new in ATTENTION + VISION + DECODER:
        name = name.replace(old, new)
    return name


def replace_prefix(name: str, prefixes: Renames) -> str:
    """Replace the first prefix that matches."""
    old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
    return new + name[len(old) :]


def upstream_name(name: str, prefixes: Renames) -> str:
    """The inverse of :func:`rename`, for writing checkpoints."""
    for old, new in ATTENTION + (VISION if name.startswith("vision.") else DECODER):
        name = name.replace(new, old)
    return replace_prefix(name, tuple((new, old) for old, new in prefixes))
