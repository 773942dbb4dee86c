"""Rules that convert the names and shapes of GR00T's tensors.

The checkpoint stores some weights once for each robot (embodiment). The rules select the weights of one robot.
"""

from __future__ import annotations

from sinew.bundle.writer import TensorSource
from sinew.convert.tensors import Rule, moved, pick, renames, reshape, transpose

Rules = tuple[Rule, ...]
HEAD = r"action_head\."
BLOCK = (
    "attn1.to_q=attn.q_proj attn1.to_k=attn.k_proj attn1.to_v=attn.v_proj attn1.to_out.0=attn.o_proj"
    " ff.net.0.proj=mlp.fc1 ff.net.2=mlp.fc2"
)


def head_rules(embodiment: int) -> Rules:
    """Return the rules for the action head's tensors.

    Args:
        embodiment: Index of the embodiment to select.
    """

    def weight(source: TensorSource) -> TensorSource:  # shapes: [embodiments, in, out] -> [out, in]
        return transpose(pick(source, embodiment))

    def bias(source: TensorSource) -> TensorSource:
        return pick(source, embodiment)

    coder = HEAD + r"(state_encoder|action_decoder)\.layer(\d)\."
    return (
        Rule(coder + "W", (r"head.\1.fc\2.weight",), weight),
        Rule(coder + "b", (r"head.\1.fc\2.bias",), bias),
        Rule(HEAD + r"action_encoder\.W(\d)\.W", (r"head.action_encoder.fc\1.weight",), weight),
        Rule(HEAD + r"action_encoder\.W(\d)\.b", (r"head.action_encoder.fc\1.bias",), bias),
        *transformer_rules(HEAD),
        *renames(
            HEAD + r"vl_self_attention\.transformer_blocks\.(\d+)\.",
            r"head.vl_layers.\1.",
            f"{BLOCK} norm1 norm3=norm2",
        ),
        *renames(HEAD, "head.", "vlln=vl_norm"),
        Rule(HEAD + r"mask_token"),  # used in training only
    )


def transformer_rules(head: str) -> Rules:
    """Return the rules for the diffusion transformer and its embedding tables.

    Args:
        head: Regular expression of the prefix of their names.
    """
    dit, embedder = head + r"model\.", "timestep_encoder.timestep_embedder."
    time = f"{embedder}linear_1=time_in {embedder}linear_2=time_out"
    return (
        *renames(dit, "head.dit.", f"{time} proj_out_1=dense proj_out_2=proj"),
        *renames(dit + r"transformer_blocks\.(\d+)\.", r"head.dit.layers.\1.", f"norm1.linear=dense {BLOCK}"),
        *renames(head, "head.", "position_embedding future_tokens"),
    )


def siglip_rules(upstream: str, patch: int) -> Rules:
    """Return the rules for a SigLIP tower. Its pooling head is not used.

    Args:
        upstream: Regular expression of the prefix of the tensor names.
        patch: Side of a patch in pixels.
    """

    def patches(source: TensorSource) -> TensorSource:
        if len(source.shape) != 2:
            return source
        size = source.shape[0]  # a patch is stored as [row, column, colour]
        return moved(lambda x: x.reshape(size, patch, patch, 3).transpose(0, 3, 1, 2), source)

    layer = "layer_norm1=norm1 layer_norm2=norm2 self_attn.out_proj=attn.o_proj self_attn=attn mlp"
    return (
        Rule(upstream + r"head\..*"),
        Rule(upstream + r"embeddings\.patch_embedding\.weight", ("vision.patch_embedding.weight",), patches),
        *renames(upstream + r"embeddings\.", "vision.", "patch_embedding position_embedding"),
        *renames(upstream + r"encoder\.layers\.(\d+)\.", r"vision.layers.\1.", layer),
        *renames(upstream, "vision.", "post_layernorm=norm"),
    )


def qwen_vision_rules(upstream: str) -> Rules:
    """Return the rules for Qwen3-VL's tower. The two frames of a patch become channels of one picture."""

    def patches(
        source: TensorSource,
    ) -> TensorSource:  # input shape [C, 3, frames, rows, cols], output shape [C, 3 * frames, rows, cols]
        size, colours, frames, *sides = source.shape
        return reshape(source, size, colours * frames, *sides)

    merger = "linear_fc1=fc1 linear_fc2=fc2 norm"
    layer = "attn.qkv=attn.{qkv}_proj attn.proj=attn.o_proj mlp.linear_fc1=mlp.fc1 mlp.linear_fc2=mlp.fc2"
    return (
        Rule(upstream + r"patch_embed\.proj\.weight", ("vision.patch_embedding.weight",), patches),
        *renames(upstream, "vision.", "patch_embed.proj=patch_embedding pos_embed=position_embedding"),
        *renames(upstream + r"blocks\.(\d+)\.", r"vision.layers.\1.", f"{layer} norm1 norm2"),
        *renames(upstream + r"merger\.", "vision.merger.", merger),
        *renames(upstream + r"deepstack_merger_list\.(\d+)\.", r"vision.tap_mergers.\1.", merger),
    )
