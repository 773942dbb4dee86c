"""Names of transformers' building blocks -> ours. Families add the prefixes under which they keep them."""

BLOCKS = (
    (".embeddings.patch_embedding.", ".patch_embedding."),
    (".embeddings.position_embedding.", ".position_embedding."),
    (".encoder.layers.", ".layers."),
    (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."),
    (".self_attn.", ".attn."),
    (".out_proj.", ".o_proj."),
    (".post_layernorm.", ".norm."),
    (".input_layernorm.", ".input_norm."),
    (".post_attention_layernorm.", ".post_norm."),
)


def rename(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    """Replace the first prefix that matches, then the names of blocks."""
    for old, new in prefixes:
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    for old, new in BLOCKS:
        name = name.replace(old, new)
    return name
