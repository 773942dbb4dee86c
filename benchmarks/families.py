"""The policy families for which ``benchmarks/full_size.py`` writes random checkpoints at published sizes."""

from __future__ import annotations

from benchmarks.inflate import Family

# The tower is SigLIP with 400M parameters, and the language model is Qwen3 with 1.7B, as in Eagle.
SIGLIP = {36: 1152, 68: 4304, 108: 3456}
QWEN3 = {56: 2048, 88: 6144, 20: 128, 40: 1024, 80: 2048}
EAGLE = {
    "eagle/config.json": {
        "text_config.hidden_size": 2048,
        "text_config.intermediate_size": 6144,
        "text_config.head_dim": 128,
        "text_config.num_attention_heads": 16,
        "text_config.num_key_value_heads": 8,
        "text_config.num_hidden_layers": 28,
        "text_config.vocab_size": 151680,
        "vision_config.hidden_size": 1152,
        "vision_config.intermediate_size": 4304,
        "vision_config.num_attention_heads": 16,
        "vision_config.num_hidden_layers": 27,
    }
}
DIT = {48: 1536, 96: 3072, 192: 6144, 56: 2048, 44: 1024, 5: 32}
GROOT_LAYERS = (
    (r"vision_model\.vision_model\.encoder\.layers\.(\d+)\.", 27),
    (r"vl_self_attention\.transformer_blocks\.(\d+)\.", 4),
)
HEAD_N15 = {
    "action_head_cfg.backbone_embedding_dim": 2048,
    "action_head_cfg.action_dim": 32,
    "action_head_cfg.max_action_dim": 32,
    "action_head_cfg.action_horizon": 16,
    "action_head_cfg.hidden_size": 1024,
    "action_head_cfg.input_embedding_dim": 1536,
    "action_head_cfg.max_state_dim": 64,
    "action_head_cfg.max_num_embodiments": 32,
    "action_head_cfg.max_seq_len": 1024,
    "action_head_cfg.num_target_vision_tokens": 32,
    "action_head_cfg.diffusion_model_cfg.attention_head_dim": 48,
    "action_head_cfg.diffusion_model_cfg.num_attention_heads": 32,
    "action_head_cfg.diffusion_model_cfg.num_layers": 16,
    "action_head_cfg.diffusion_model_cfg.output_dim": 1024,
    "action_head_cfg.vl_self_attention_cfg.attention_head_dim": 64,
    "action_head_cfg.vl_self_attention_cfg.num_attention_heads": 32,
    "action_head_cfg.vl_self_attention_cfg.num_layers": 4,
    "backbone_cfg.select_layer": 12,
}
HEAD_N16 = {
    "backbone_embedding_dim": 2048,
    "select_layer": 16,
    "shortest_image_edge": 256,
    "max_state_dim": 128,
    "max_action_dim": 128,
    "action_horizon": 50,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "max_seq_len": 1024,
    "max_num_embodiments": 32,
    "diffusion_model_cfg.attention_head_dim": 48,
    "diffusion_model_cfg.num_attention_heads": 32,
    "diffusion_model_cfg.num_layers": 32,
    "diffusion_model_cfg.output_dim": 1024,
}
# The model has 2 billion parameters, as Cosmos-Reason2.
QWEN3_VL = {
    "text_config.hidden_size": 2048,
    "text_config.intermediate_size": 6144,
    "text_config.head_dim": 128,
    "text_config.num_attention_heads": 16,
    "text_config.num_key_value_heads": 8,
    "text_config.num_hidden_layers": 28,
    "text_config.vocab_size": 151936,
    "text_config.rope_parameters.mrope_section": [24, 20, 20],
    "vision_config.hidden_size": 1024,
    "vision_config.intermediate_size": 4096,
    "vision_config.num_heads": 16,
    "vision_config.depth": 24,
    "vision_config.out_hidden_size": 2048,
    "vision_config.num_position_embeddings": 2304,
    "vision_config.deepstack_visual_indexes": [5, 11, 17],
}
# The model consists of PaliGemma and an expert with 300M parameters. LeRobot's files contain the language heads of
# both.
PI_SIZES = (
    (r"(action_in|state)_proj\.weight", (1024, 32)),
    (r"action_out_proj\.weight", (32, 1024)),
    (r"action_out_proj\.bias", {}),
    (r"vision_tower", {48: 1152, 96: 4304, 16: 256}),
    (r"projector", {48: 1152, 64: 2048}),
    (r"paligemma\.model\.language_model.*self_attn", {64: 2048, 128: 2048, 16: 256}),
    (r"paligemma\.(model\.language_model|lm_head)", {64: 2048, 128: 16384, 600: 257152}),
    (r"gemma_expert", {32: 1024, 64: 4096, 96: 3072, 128: 2048, 16: 256, 600: 257152}),
    (r"", {32: 1024, 64: 2048}),
)
PI_LAYERS = ((r"vision_tower\.vision_model\.encoder\.layers\.(\d+)\.", 27), (r"\.layers\.(\d+)\.", 18))
PI_EDITS = {"checkpoint/config.json": {"image_resolution": [224, 224]}}
# The towers are DINOv2 L and SigLIP so400m. The files contain the last block of each tower, which inference never
# uses.
PRISMATIC = (
    (r"featurizer\.pos_embed", {48: 1152, 32: 1152, 64: 1024}),
    (r"fused_featurizer", {48: 1152, 96: 2304, 144: 3456, 179: 4304}),
    (r"\.featurizer", {64: 1024, 192: 3072, 256: 4096}),
)
PRISMATIC_ADAPTER = (
    PRISMATIC[0],
    (r"fused_featurizer", {32: 1152, 64: 2304, 96: 3456, 119: 4304}),
    PRISMATIC[2],
)
TOWERS = ((r"fused_featurizer\.blocks\.(\d+)\.", 27), (r"\.featurizer\.blocks\.(\d+)\.", 24))
LLAMA = {20: 4096, 52: 11008, 448: 8704, 112: 2176, 140: 28672}
LLAMA_EDITS = {
    "checkpoint/config.json": {
        "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064},
    }
}

FAMILIES = {
    "pi0": Family("pi0-2cam", PI_SIZES, PI_LAYERS, PI_EDITS),
    "pi05": Family("pi05-2cam", PI_SIZES, PI_LAYERS, PI_EDITS),
    "groot-n15": Family(
        "groot-n15",
        (
            (r"position_embedding\.weight", {16: 256, 36: 1152, 32: 1024, 48: 1536}),
            (r"vision_model", SIGLIP),
            (r"language_model", QWEN3 | {293: 151680}),
            (r"mlp1|vl_self_attention|vlln", {36: 1152, 56: 2048, 224: 8192}),
            (r"future_tokens", {6: 32, 48: 1536}),
            (r"action_head", DIT | {22: 32, 20: 64}),
        ),
        (
            *GROOT_LAYERS,
            (r"language_model\.model\.layers\.(\d+)\.", 12),
            (r"action_head\.model\.transformer_blocks\.(\d+)\.", 16),
        ),
        {
            "eagle/config.json": EAGLE["eagle/config.json"] | {"vision_config.image_size": 224},
            "eagle/preprocessor_config.json": {"size.height": 224, "size.width": 224},
            "base/config.json": HEAD_N15,
        },
        folder="base",
        given={"vlm": "eagle", "settings": {"embodiment_id": "2"}},
    ),
    "groot-n16": Family(
        "groot-n16",
        (
            (r"position_embedding\.weight", {16: 256, 36: 1152, 32: 1024, 48: 1536}),
            (r"vision_model", SIGLIP),
            (r"language_model", QWEN3 | {293: 151680}),
            (r"mlp1|vlln", {144: 4608, 56: 2048}),
            (r"action_head", DIT | {22: 128, 26: 128}),
        ),
        (
            *GROOT_LAYERS,
            (r"language_model\.model\.layers\.(\d+)\.", 16),
            (r"action_head\.model\.transformer_blocks\.(\d+)\.", 32),
        ),
        {
            "eagle/config.json": EAGLE["eagle/config.json"] | {"vision_config.num_patches": 256},
            "checkpoint/config.json": HEAD_N16,
            "checkpoint/processor_config.json": {"processor_kwargs.shortest_image_edge": 256},
        },
        given={"vlm": "eagle", "settings": {"letterbox": "true"}},
    ),
    "groot-n17": Family(
        "groot-n17",
        (
            (r"visual", {24: 1024, 72: 3072, 40: 4096, 96: 4096, 56: 2048, 25: 2304}),
            (r"language_model", {56: 2048, 88: 6144, 64: 1024, 128: 2048, 32: 128, 272: 151936}),
            (r"position_embedding", {32: 1024, 48: 1536}),
            (r"vl_self_attention|vlln", {56: 2048, 224: 8192}),
            (r"action_head", DIT | {20: 132, 22: 132}),
        ),
        (
            (r"visual\.blocks\.(\d+)\.", 24),
            (r"language_model\.layers\.(\d+)\.", 16),
            (r"vl_self_attention\.transformer_blocks\.(\d+)\.", 4),
            (r"action_head\.model\.transformer_blocks\.(\d+)\.", 32),
        ),
        {
            "vlm/config.json": QWEN3_VL,
            "checkpoint/config.json": HEAD_N16
            | {
                "max_state_dim": 132,
                "max_action_dim": 132,
                "action_horizon": 40,
                "vl_self_attention_cfg.num_layers": 4,
                "vl_self_attention_cfg.num_attention_heads": 32,
                "vl_self_attention_cfg.attention_head_dim": 64,
            },
            "checkpoint/processor_config.json": {"processor_kwargs.shortest_image_edge": 256},
        },
        given={
            "vlm": "vlm",
            "settings": {"letterbox": "true"},
            "embodiment": "oxe_droid_relative_eef_relative_joint",
        },
    ),
    "evo1": Family(
        "evo1",
        (
            (r"position_embeddings", {37: 1025, 40: 1024}),
            (r"vision_tower", {40: 1024, 72: 4096}),
            (r"multi_modal_projector", {160: 4096, 60: 896}),
            (r"language_model", {60: 896, 92: 4864, 20: 128, 287: 151674}),
            (r"pos_encoding", {14: 50, 60: 896}),
            (
                r"action_head",
                {60: 896, 180: 2688, 240: 3584, 52: 1024, 36: 1024, 11: 24, 13: 24, 840: 44800, 154: 1200},
            ),
        ),
        (
            (r"vision_tower\.encoder\.layer\.(\d+)\.", 24),
            (r"language_model\.layers\.(\d+)\.", 14),
            (r"transformer_blocks\.(\d+)\.", 8),
        ),
        {
            "vlm/config.json": {
                "image_seq_length": 256,
                "text_config.hidden_size": 896,
                "text_config.intermediate_size": 4864,
                "text_config.num_attention_heads": 14,
                "text_config.num_hidden_layers": 24,
                "text_config.vocab_size": 151674,
                "vision_config.hidden_size": 1024,
                "vision_config.intermediate_size": 4096,
                "vision_config.num_attention_heads": 16,
                "vision_config.num_hidden_layers": 24,
                "vision_config.image_size": [448, 448],
            },
            "checkpoint/config.json": {
                "chunk_size": 50,
                "n_action_steps": 50,
                "max_state_dim": 24,
                "max_action_dim": 24,
                "image_resolution": [448, 448],
                "vlm_num_layers": 14,
                "embed_dim": 896,
                "hidden_dim": 1024,
                "state_hidden_dim": 1024,
                "num_heads": 8,
                "num_layers": 8,
                "num_inference_timesteps": 32,
            },
        },
        given={"vlm": "vlm"},
    ),
    "bitvla": Family(
        "bitvla",
        (
            (r"position_embedding", {16: 256, 48: 1152}),
            (r"vision_tower", {48: 1152, 108: 4304, 144: 3456, 56: 14}),
            (r"multi_modal_projector", {48: 1152, 80: 2560}),
            (r"language_model", {80: 2560, 152: 6912, 16: 640, 648: 128264}),
            (r"", {80: 2560, 560: 17920}),
        ),
        ((r"encoder\.layers\.(\d+)\.", 26), (r"language_model\.model\.layers\.(\d+)\.", 30)),
        {
            "checkpoint/config.json": {
                "text_config.hidden_size": 2560,
                "text_config.intermediate_size": 6912,
                "text_config.num_attention_heads": 20,
                "text_config.num_hidden_layers": 30,
                "text_config.num_key_value_heads": 5,
                "text_config.vocab_size": 128264,
                "vision_config.hidden_size": 1152,
                "vision_config.intermediate_size": 4304,
                "vision_config.num_attention_heads": 16,
                "vision_config.num_hidden_layers": 26,
                "vision_config.patch_size": 14,
            },
        },
    ),
    "vla-adapter": Family(
        "vla-adapter",
        (
            *PRISMATIC_ADAPTER,
            (r"projector\.fc1", {384: 8704, 96: 2176, 48: 896}),
            (r"projector", {384: 8704, 48: 896}),
            (r"", {48: 896, 88: 4864, 16: 128, 464: 151936, 336: 6272, 96: 1792}),
        ),
        (*TOWERS, (r"language_model\.model\.layers\.(\d+)\.", 24)),
        {
            "checkpoint/config.json": {
                "text_config.hidden_size": 896,
                "text_config.intermediate_size": 4864,
                "text_config.num_attention_heads": 14,
                "text_config.vocab_size": 151936,
            },
        },
    ),
    "vla-jepa": Family(
        "vla-jepa",
        (
            (r"visual", {48: 1024, 144: 3072, 104: 4096, 192: 4096, 64: 2048, 576: 2304}),
            (r"qwen", {64: 2048, 144: 6144, 48: 1024, 96: 2048, 24: 128, 462: 151936}),
            (r"position_embedding", {64: 1024, 60: 768}),
            (r"action_model", {60: 768, 120: 1536, 240: 3072, 52: 1024, 64: 2048}),
        ),
        (
            (r"visual\.blocks\.(\d+)\.", 24),
            (r"language_model\.layers\.(\d+)\.", 28),
            (r"transformer_blocks\.(\d+)\.", 16),
        ),
        {
            "vlm/config.json": QWEN3_VL,
            "checkpoint/config.json": {
                "action_hidden_size": 1024,
                "action_num_layers": 16,
                "action_num_heads": 12,
                "action_attention_head_dim": 64,
                "action_max_seq_len": 1024,
                "torch_dtype": "bfloat16",
            },
        },
        given={"vlm": "vlm"},
    ),
    "xvla": Family(  # Florence-2-large, and the action head of the checkpoints from 2toINF
        "xvla-ee6d",
        (
            *(
                (
                    rf"vision_tower\.(convs|blocks)\.{stage}\.",
                    {width // 2: 16 * width, width: 32 * width, 3 * width: 96 * width, 4 * width: 128 * width}
                    | {3: 3, 7: 7},
                )
                for stage, width in enumerate((8, 16, 32, 64))
            ),
            (r"image_pos_embed", {32: 1024}),
            (r"vlm\.(image|visual)", {64: 2048, 40: 1024}),
            (r"language_model", {40: 1024, 56: 4096, 300: 51289, 130: 4098}),
            (r"mlp", {48: 1024, 144: 4096}),
            (
                r"transformer",
                {4: 30, 40: 1024, 48: 1024, 128: 512, 144: 3072, 240: 32768, 960: 20480, 2496: 73728},
            ),
        ),
        (
            (r"vision_tower\.blocks\.2\.(\d+)\.", 9),
            (r"encoder\.layers\.(\d+)\.", 12),
            (r"transformer\.blocks\.(\d+)\.", 24),
        ),
        {
            "checkpoint/config.json": {
                "florence_config.vision_config.depths": [1, 1, 9, 1],
                "florence_config.vision_config.dim_embed": [256, 512, 1024, 2048],
                "florence_config.vision_config.num_heads": [8, 16, 32, 64],
                "florence_config.vision_config.num_groups": [8, 16, 32, 64],
                "florence_config.vision_config.window_size": 12,
                "florence_config.vision_config.projection_dim": 1024,
                "florence_config.projection_dim": 1024,
                "florence_config.text_config.vocab_size": 51289,
                "florence_config.text_config.d_model": 1024,
                "florence_config.text_config.encoder_layers": 12,
                "florence_config.text_config.encoder_attention_heads": 16,
                "florence_config.text_config.encoder_ffn_dim": 4096,
                "florence_config.text_config.max_position_embeddings": 4096,
                "chunk_size": 30,
                "n_action_steps": 30,
                "hidden_size": 1024,
                "depth": 24,
                "num_heads": 16,
                "mlp_ratio": 4.0,
                "num_domains": 30,
                "len_soft_prompts": 32,
                "dim_time": 32,
                "max_len_seq": 512,
                "num_denoising_steps": 10,
                "resize_imgs_with_padding": [224, 224],
            },
            "checkpoint/policy_preprocessor.json": {"steps.2.config.max_length": 64},
        },
    ),
    "openvla": Family(
        "openvla-ar",
        (*PRISMATIC, (r"", LLAMA)),
        (*TOWERS, (r"language_model\.model\.layers\.(\d+)\.", 32)),
        LLAMA_EDITS,
        run=False,
    ),
    "openvla-oft": Family(
        "openvla-oft",
        (*PRISMATIC, (r"", LLAMA)),
        (*TOWERS, (r"language_model\.model\.layers\.(\d+)\.", 32)),
        LLAMA_EDITS,
        run=False,
    ),
}
