"""Names and forms of GR00T's tensors. Weights that upstream keeps per embodiment are cut to one here."""

from __future__ import annotations

from sinew.bundle.writer import TensorSource
from sinew.convert.tensors import Rule, moved, pick, reshape, split_qkv, transpose

Rules = tuple[Rule, ...]
HEAD = r"action_head\."


def head_rules(embodiment: int) -> Rules:
    """Return the rules of the action head, for the embodiment of this number."""

    def weight(source: TensorSource) -> TensorSource:  # [embodiments, in, out] -> [out, in]
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
        *_blocks(HEAD + r"vl_self_attention\.transformer_blocks", "head.vl_layers"),
        Rule(
            HEAD + r"vl_self_attention\.transformer_blocks\.(\d+)\.norm1\.(.*)",
            (r"head.vl_layers.\1.norm1.\2",),
        ),
        Rule(
            HEAD + r"vl_self_attention\.transformer_blocks\.(\d+)\.norm3\.(.*)",
            (r"head.vl_layers.\1.norm2.\2",),
        ),
        Rule(HEAD + r"vlln\.(.*)", (r"head.vl_norm.\1",)),
        Rule(HEAD + r"mask_token"),  # of training
    )


def transformer_rules(head: str) -> Rules:
    """Return the rules of the diffusion transformer below ``head``, and of the tables beside it."""
    dit = head + r"model\."
    return (
        Rule(dit + r"timestep_encoder\.timestep_embedder\.linear_1\.(.*)", (r"head.dit.time_in.\1",)),
        Rule(dit + r"timestep_encoder\.timestep_embedder\.linear_2\.(.*)", (r"head.dit.time_out.\1",)),
        Rule(dit + r"proj_out_1\.(.*)", (r"head.dit.dense.\1",)),
        Rule(dit + r"proj_out_2\.(.*)", (r"head.dit.proj.\1",)),
        Rule(dit + r"transformer_blocks\.(\d+)\.norm1\.linear\.(.*)", (r"head.dit.layers.\1.dense.\2",)),
        *_blocks(dit + "transformer_blocks", "head.dit.layers"),
        Rule(head + r"(position_embedding|future_tokens)\.(.*)", (r"head.\1.\2",)),
    )


def _blocks(upstream: str, ours: str) -> Rules:
    old, new = upstream + r"\.(\d+)\.", ours + r".\1."
    return (
        Rule(old + r"attn1\.to_([qkv])\.(.*)", (new + r"attn.\2_proj.\3",)),
        Rule(old + r"attn1\.to_out\.0\.(.*)", (new + r"attn.o_proj.\2",)),
        Rule(old + r"ff\.net\.0\.proj\.(.*)", (new + r"mlp.fc1.\2",)),
        Rule(old + r"ff\.net\.2\.(.*)", (new + r"mlp.fc2.\2",)),
    )


def siglip_rules(upstream: str, patch: int) -> Rules:
    """Return the rules of a SigLIP tower; its pooling head is read by nobody."""
    old, new = upstream + r"encoder\.layers\.(\d+)\.", r"vision.layers.\1."

    def patches(source: TensorSource) -> TensorSource:
        if len(source.shape) != 2:
            return source
        size = source.shape[0]  # a patch is stored as [row, column, colour]
        return moved(lambda x: x.reshape(size, patch, patch, 3).transpose(0, 3, 1, 2), source)

    return (
        Rule(upstream + r"head\..*"),
        Rule(upstream + r"embeddings\.patch_embedding\.weight", ("vision.patch_embedding.weight",), patches),
        Rule(upstream + r"embeddings\.(patch|position)_embedding\.(.*)", (r"vision.\1_embedding.\2",)),
        Rule(old + r"layer_norm([12])\.(.*)", (new + r"norm\2.\3",)),
        Rule(old + r"self_attn\.out_proj\.(.*)", (new + r"attn.o_proj.\2",)),
        Rule(old + r"self_attn\.(.*)", (new + r"attn.\2",)),
        Rule(old + r"(mlp\..*)", (new + r"\2",)),
        Rule(upstream + r"post_layernorm\.(.*)", (r"vision.norm.\1",)),
    )


def qwen_vision_rules(upstream: str) -> Rules:
    """Return the rules of Qwen3-VL's tower. Both frames of a patch become channels of one picture."""

    def patches(
        source: TensorSource,
    ) -> TensorSource:  # [C, 3, frames, rows, cols] -> [C, 3 * frames, rows, cols]
        size, colours, frames, *sides = source.shape
        return reshape(source, size, colours * frames, *sides)

    old, new = upstream + r"blocks\.(\d+)\.", r"vision.layers.\1."
    qkv = tuple(new + rf"attn.{part}_proj.\2" for part in "qkv")
    return (
        Rule(upstream + r"patch_embed\.proj\.weight", ("vision.patch_embedding.weight",), patches),
        Rule(upstream + r"patch_embed\.proj\.bias", ("vision.patch_embedding.bias",)),
        Rule(upstream + r"pos_embed\.weight", ("vision.position_embedding.weight",)),
        Rule(old + r"attn\.qkv\.(.*)", qkv, split_qkv),
        Rule(old + r"attn\.proj\.(.*)", (new + r"attn.o_proj.\2",)),
        Rule(old + r"mlp\.linear_(fc[12])\.(.*)", (new + r"mlp.\2.\3",)),
        Rule(old + r"(norm[12]\..*)", (new + r"\2",)),
        Rule(upstream + r"merger\.linear_(fc[12])\.(.*)", (r"vision.merger.\1.\2",)),
        Rule(upstream + r"merger\.(norm\..*)", (r"vision.merger.\1",)),
        Rule(
            upstream + r"deepstack_merger_list\.(\d+)\.linear_(fc[12])\.(.*)",
            (r"vision.tap_mergers.\1.\2.\3",),
        ),
        Rule(upstream + r"deepstack_merger_list\.(\d+)\.(norm\..*)", (r"vision.tap_mergers.\1.\2",)),
    )
