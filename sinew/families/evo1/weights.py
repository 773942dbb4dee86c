"""Rules that convert the names and shapes of Evo-1's tensors, from LeRobot's layout and from the original layout.

LeRobot's layout has the names of transformers' InternVL.
"""

from __future__ import annotations

from sinew.bundle.writer import TensorSource
from sinew.convert.names import language_rules
from sinew.convert.tensors import Rule, apply, computed, moved, pick, renames, reshape, rows, transpose
from sinew.core import ConvertError

LAYER = r"vision.layers.\1."
BLOCK, TO_BLOCK = r"action_head\.transformer_blocks\.(\d+)\.", r"head.layers.\1."


def rename(
    tensors: dict[str, TensorSource], layers: int, category: int, unshuffle: int
) -> dict[str, TensorSource]:
    """Return the tensors under Sinew's names.

    Args:
        tensors: The tensors by their names in the checkpoint.
        layers: Number of layers of the language model that are used.
        category: Index of the weights to use, if the head has separate weights for each category of robots.
        unshuffle: Patches along a side of one image token.

    Raises:
        ConvertError: A tensor is missing or has another shape.
    """
    remaining = dict(tensors)
    if adapter := next((name for name in remaining if ".lora_" in name), None):
        raise ConvertError(
            f"{adapter}: this is a LoRA adapter. Merge it into its base model and convert the merged checkpoint"
        )
    lerobot = any(name.startswith("embedder.model.vision_tower.") for name in remaining)
    tower = "embedder.model.vision_tower." if lerobot else "embedder.model.vision_model."
    _first_token(remaining, tower, lerobot)
    language = r"embedder\.model\.language_model\." + ("" if lerobot else r"model\.")
    rules = (
        *_tower(lerobot),
        *_connector(lerobot, unshuffle),
        *language_rules(language, layers),
        Rule(r"embedder\.model\.language_model\.lm_head\..*"),
        *_head(category),
    )
    return apply(remaining, rules)


def _first_token(remaining: dict[str, TensorSource], tower: str, lerobot: bool) -> None:
    """Add the position embedding of the class token to the class token, because Sinew's model has no position
    embedding for it."""
    names = ("cls_token", "position_embeddings") if lerobot else ("class_embedding", "position_embedding")
    keys = [f"{tower}embeddings.{name}" for name in names]
    if missing := [key for key in keys if key not in remaining]:
        raise ConvertError(
            f"the tensor {missing[0]} is missing, which the configuration requires. Use a complete checkpoint"
        )
    token, table = (remaining.pop(key) for key in keys)
    if len(table.shape) != 3 or token.shape[-1] != table.shape[-1]:
        raise ConvertError(
            f"{table.name}: expected the shape [1, patches + 1, width], got {list(table.shape)}"
        )
    table = reshape(table, *table.shape[1:])
    first = rows(table, 0, 1)
    remaining["vision.prefix"] = computed(
        lambda a, b: a.reshape(1, -1) + b, token, first, shape=(1, table.shape[1])
    )
    remaining["vision.position_embedding.weight"] = rows(table, 1, table.shape[0])


def _tower(lerobot: bool) -> tuple[Rule, ...]:
    if lerobot:
        tower, layer, scale = r"embedder\.model\.vision_tower\.", r"encoder\.layer\.", "lambda_"
        patches, norms = "patch_embeddings.projection", "layernorm_before=norm1 layernorm_after=norm2"
        attention = "attention.projection_layer=attn.o_proj attention=attn"
    else:
        tower, layer, scale = r"embedder\.model\.vision_model\.", r"encoder\.layers\.", "ls"
        patches, norms = "patch_embedding", "norm1 norm2"
        attention = "attn.qkv=attn.{qkv}_proj attn.proj=attn.o_proj"
    layer = rf"{tower}{layer}(\d+)\."
    return (
        *renames(tower + r"embeddings\.", "vision.", f"{patches}=patch_embedding"),
        Rule(layer + scale + "([12])", (LAYER + r"scale\2.weight",)),
        *renames(layer, LAYER, f"{norms} {attention} mlp"),
    )


def _connector(lerobot: bool, unshuffle: int) -> tuple[Rule, ...]:
    """Return the rules for the connector's tensors, which reorder the columns of its weights.

    An image token has channels of several patches. In Sinew, all patches of the first channel come first, then those of
    the next channel. In Evo-1, all channels of the first patch come first.
    """

    def ordered(source: TensorSource) -> TensorSource:
        *before, width = source.shape
        squares = (*before, unshuffle**2, width // unshuffle**2)
        return moved(lambda x: x.reshape(squares).swapaxes(-1, -2).reshape(source.shape), source)

    upstream = r"embedder\.model\." + ("multi_modal_projector" if lerobot else "mlp1")
    norm, first, second = ("layer_norm", "linear_1", "linear_2") if lerobot else ("0", "1", "3")
    return (
        Rule(rf"{upstream}\.{norm}\.(.*)", (r"connector.norm.\1",), ordered),
        Rule(rf"{upstream}\.{first}\.weight", ("connector.fc1.weight",), ordered),
        Rule(rf"{upstream}\.{first}\.bias", ("connector.fc1.bias",)),
        Rule(rf"{upstream}\.{second}\.(.*)", (r"connector.fc2.\1",)),
    )


def _head(category: int) -> tuple[Rule, ...]:
    def weight(source: TensorSource) -> TensorSource:  # shapes: [categories, in, out] -> [out, in]
        return transpose(pick(source, category)) if len(source.shape) == 3 else source

    def bias(source: TensorSource) -> TensorSource:
        return pick(source, category) if len(source.shape) == 2 else source

    def table(source: TensorSource) -> TensorSource:  # input shape [1, rows, C], output shape [rows, C]
        return reshape(source, *source.shape[-2:])

    block = "attn.in_proj=attn.{qkv}_proj attn.out_proj=attn.o_proj norm1 norm2 ff.0=mlp.fc1 ff.2=mlp.fc2"
    of_category = (
        (r"action_head\.(state_encoder)\.fc(\d)\.", r"head.\1.fc\2."),
        (r"action_head\.mlp_(head)\.fc(\d)\.", r"\1.decoder.fc\2."),
        (r"action_head\.(action_encoder)\.W(\d)\.", r"head.\1.fc\2."),
    )
    return (
        *(
            Rule(old + rf"(?:linear\.)?{part}", (new + part,), make)
            for old, new in of_category
            for part, make in (("weight", weight), ("bias", bias))
        ),
        *renames(BLOCK, TO_BLOCK, block),
        *renames(r"action_head\.", "head.", "norm_out=norm seq_pool_proj=pool"),
        # Read the table of sines from the checkpoint. In a bfloat16 checkpoint these sines are rounded, so newly
        # computed sines would differ.
        Rule(r"action_head\.time_pos_enc\.pe", ("head.time_embedding.weight",), table),
        Rule(
            r"action_head\.action_encoder\.pos_encoding\.pe",
            ("head.action_encoder.position_embedding.weight",),
            table,
        ),
    )
