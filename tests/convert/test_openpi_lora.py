"""openpi's LoRA runs: the adapters of a JAX checkpoint are merged by openpi's own equations, or the conversion fails.

Two factors lie beside each weight of Gemma. The expected weights here are not those of the reader's formula: a layer's
two einsums are computed as openpi's ``models/lora.py`` writes them, with and without the factors, and compared with
the product with the converted weight.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError
from tests.convert.openpi_layout import write_checkpoint
from tests.convert.test_openpi import write_jax_params

tensorstore = pytest.importorskip("tensorstore")

# Each einsum with LoRA: the equations of x, W and of its two factors (openpi's ``_make_lora_eqns``)
EINSUMS = {
    "q_einsum": ("BTD,NDH->BTNH", "BTD,NDL->BTNL", "BTNL,NLH->BTNH"),
    "kv_einsum": ("BSD,2KDH->2BSKH", "BSD,2KDL->2BSKL", "2BSKL,2KLH->2BSKH"),
    "attn_vec_einsum": ("BTNH,NHD->BTD", "BTNH,NHL->BTL", "BTL,NLD->BTD"),
}
PROJECTIONS = {"q_einsum": "q", "kv_einsum": "kv", "attn_vec_einsum": "o"}
EXPERTS = {"": "language", "_1": "expert"}


class Run:
    """A JAX checkpoint of golden weights, to which factors are added."""

    def __init__(self, golden, directory, name="pi05_droid", value=True):
        self.name, self.directory = name, directory
        self.path, self.arch, _ = write_checkpoint(golden, directory, name)
        weights = load_file(self.path / "model.safetensors")
        weights = {key: each.numpy() for key, each in weights.items() if "lm_head" not in key}
        (self.path / "model.safetensors").unlink()
        (self.path / "config.json").unlink()
        widths = json.loads(self.arch.read_text())
        heads = {"vision": widths["vision"], "llm": widths["language"]}
        heads = {key: each["num_attention_heads"] for key, each in heads.items()}
        self.params, self.end = self.path / "params", ".value" if value else ""
        write_jax_params(weights, self.params, heads, value)
        self.rng, self.factors = np.random.default_rng(0), {}

    def _store(self, name):
        kvstore = {"driver": "ocdbt", "base": f"file://{self.params}/", "path": f"params.{name}{self.end}/"}
        return {"driver": "zarr", "kvstore": kvstore}

    def read(self, name):
        return tensorstore.open(self._store(name), read=True).result().read().result()

    def add(self, name, array):
        spec = self._store(name) | {"metadata": {"compressor": {"id": "zstd"}}}
        opened = tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result()
        opened.write(array).result()
        file = self.params / "_METADATA"
        meta = json.loads(file.read_text())
        key = ["params", *name.split("."), *([self.end[1:]] if self.end else [])]
        meta["tree_metadata"][str(tuple(key))] = {"key_metadata": [{"key": k, "key_type": 2} for k in key]}
        file.write_text(json.dumps(meta))

    def adapt(self, name, rank):
        """Add factors of the last two axes of a stored weight, as openpi names them."""
        shape = self.read(name).shape
        down = self.rng.normal(0, 0.3, (*shape[:-1], rank)).astype(np.float32)
        up = self.rng.normal(0, 0.3, (*shape[:-2], rank, shape[-1])).astype(np.float32)
        before = name[:-2] + "." if name.endswith(".w") else name + "_"
        self.add(f"{before}lora_a", down)
        self.add(f"{before}lora_b", up)
        self.factors[name] = (down, up)

    def adapt_all(self, ranks):
        for suffix, rank in ranks.items():
            for einsum in EINSUMS:
                self.adapt(f"PaliGemma.llm.layers.attn.{einsum}{suffix}.w", rank)
            for matrix in ("gating_einsum", "linear"):
                self.adapt(f"PaliGemma.llm.layers.mlp{suffix}.{matrix}", rank)
        return self

    def convert(self, **settings):
        out = self.directory / f"out-{len(list(self.directory.iterdir()))}.gguf"
        given = {key: str(value) for key, value in settings.items()}
        return Bundle(convert(self.path, out, arch=self.arch, openpi_config=self.name, settings=given))


def weight(bundle, name):
    return bundle.tensor(f"{name}.weight").float().numpy()


def assert_attention(run, bundle, suffix, layer, scale):
    """Compare x @ (converted weight) with openpi's two einsums, for each projection of a layer."""
    for einsum, (whole, first, second) in EINSUMS.items():
        stored = f"PaliGemma.llm.layers.attn.{einsum}{suffix}.w"
        w = run.read(stored)[layer]
        down, up = (each[layer] for each in run.factors[stored])
        letters = whole.split("->")[0].split(",")[0]
        sizes = {"B": 2, "T": 3, "S": 3} | dict(zip(whole.split("->")[0].split(",")[1], w.shape, strict=True))
        x = run.rng.normal(0, 1, [sizes[letter] for letter in letters])
        as_text = {"2": "Z"}  # numpy takes letters only
        whole, first, second = (re.sub("2", as_text["2"], each) for each in (whole, first, second))
        expected = np.einsum(whole, x, w) + scale * np.einsum(second, np.einsum(first, x, down), up)
        path = f"{EXPERTS[suffix]}.layers.{layer}.attn."
        if einsum == "q_einsum":
            got = x @ weight(bundle, f"{path}q_proj").T
            expected = expected.reshape(*expected.shape[:2], -1)
        elif einsum == "kv_einsum":
            got = np.stack([x @ weight(bundle, f"{path}{each}_proj").T for each in "kv"])
            expected = expected.reshape(*expected.shape[:3], -1)
        else:
            got = x.reshape(*x.shape[:2], -1) @ weight(bundle, f"{path}o_proj").T
        np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())


def assert_feed_forward(run, bundle, suffix, layer):
    for stored, names in (("gating_einsum", ("gate", "up")), ("linear", ("down",))):
        stored = f"PaliGemma.llm.layers.mlp{suffix}.{stored}"
        w, (down, up) = run.read(stored)[layer], (each[layer] for each in run.factors[stored])
        expected = w + down @ up  # never scaled
        expected = expected if len(names) == 2 else expected[None]
        for each, values in zip(names, expected, strict=True):
            got = weight(bundle, f"{EXPERTS[suffix]}.layers.{layer}.mlp.{each}_proj")
            np.testing.assert_allclose(got, values.T, atol=2e-5 * np.abs(values).max())


@pytest.mark.parametrize(
    ("name", "ranks", "settings", "scales"),
    [
        ("pi05_droid", {"": 16, "_1": 32}, {}, (1.0, 1.0)),  # openpi's own variants
        ("pi0_libero_low_mem_finetune", {"": 16, "_1": 32}, {}, (1.0, 1.0)),
        ("pi05_droid", {"": 4, "_1": 8}, {"lora_alpha": 16}, (4.0, 2.0)),
        ("pi05_droid", {"_1": 9}, {"lora_alpha": "16,6", "rslora": "true"}, (0.0, 2.0)),
    ],
)
def test_adapters_are_merged_by_openpis_equations(golden, tmp_path, name, ranks, settings, scales):
    run = Run(golden, tmp_path, name, value=len(ranks) == 2)
    base = run.convert(**({"lora_merged": "true"} if name.endswith("low_mem_finetune") else {}))
    bundle = run.adapt_all(ranks).convert(**settings)
    for suffix, scale in zip(EXPERTS, scales, strict=True):
        changed = [key for key in base.infos if base.hashes[key] != bundle.hashes[key]]
        assert any(key.startswith(EXPERTS[suffix]) for key in changed) == (suffix in ranks)
        if suffix in ranks:
            for layer in (0, 1):
                assert_attention(run, bundle, suffix, layer, scale)
                assert_feed_forward(run, bundle, suffix, layer)
    assert f"the adapters of {5 * len(ranks)} stacked weights were merged" in str(
        bundle.manifest.provenance.notes
    )


def test_an_alpha_that_nothing_states_is_asked_for(golden, tmp_path):
    run = Run(golden, tmp_path)
    run.adapt("PaliGemma.llm.layers.mlp_1.linear", 4)
    run.convert()  # the feed-forward is never scaled
    run.adapt("PaliGemma.llm.layers.attn.q_einsum.w", 4)
    with pytest.raises(
        ConvertError, match=r"LoRA adapter of rank 16 .*got rank 4; .*--set lora_alpha=NUMBER"
    ):
        run.convert()
    for text in ("0", "a", "1,2,3", "inf"):
        with pytest.raises(ConvertError, match="lora_alpha: expected one or two numbers above 0"):
            run.convert(lora_alpha=text)
    run.convert(lora_alpha=4)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("PaliGemma.llm.layers.attn.q_einsum.lora_a", r"got only \S*lora_a\. Use a complete checkpoint$"),
        (
            "PaliGemma.img.head.lora_a",
            "LoRA factors without a weight of the model: PaliGemma.img.head.lora_a;",
        ),
        (
            "PaliGemma.llm.layers.attn.q_einsum.dora_scale",
            "got other arrays: PaliGemma.llm.layers.attn.q_einsum.dora",
        ),
        ("value_head.kernel", r"got other arrays: value_head.kernel; .*--set ignore=value_head.kernel$"),
    ],
)
def test_arrays_that_nothing_reads_are_named(golden, tmp_path, name, told):
    run = Run(golden, tmp_path)
    run.add(name, np.ones((2, 3), np.float32))
    with pytest.raises(ConvertError, match=told):
        run.convert()
    if "got only" not in told:
        run.convert(ignore=name)
        with pytest.raises(ConvertError, match="--set ignore=other: expected the name of an array"):
            run.convert(ignore="other")


def test_factors_of_other_axes_are_named(golden, tmp_path):
    run = Run(golden, tmp_path)
    shape = run.read("PaliGemma.llm.layers.attn.q_einsum.w").shape
    run.add("PaliGemma.llm.layers.attn.q_einsum.lora_a", np.ones((*shape[:1], 16, *shape[2:]), np.float32))
    run.add("PaliGemma.llm.layers.attn.q_einsum.lora_b", np.ones((*shape[:-1], 16), np.float32))
    with pytest.raises(ConvertError, match=r"LoRA adapter of .*q_einsum.w: expected shapes"):
        run.convert(lora_alpha=16)


def test_pytorch_files_of_a_run_that_lost_its_adapters(golden, tmp_path):
    """openpi's converter drops the adapters and writes the variants' names: the file alone is the base model."""
    path, arch, _ = write_checkpoint(golden, tmp_path, "pi05_droid")
    file = path / "config.json"
    record = json.loads(file.read_text())
    given = {"arch": arch, "openpi_config": "pi05_droid"}
    for changed in (
        {"paligemma_variant": "gemma_2b_lora"},
        {"action_expert_variant": "gemma_300m_lora"},
        {"paligemma_variant": "gemma_2b_lora", "action_expert_variant": "gemma_300m_lora"},
    ):
        file.write_text(json.dumps(record | changed))
        with pytest.raises(ConvertError, match="expected the LoRA adapters of this run.*drops adapters"):
            convert(path, tmp_path / "out.gguf", **given)
    convert(path, tmp_path / "out.gguf", **given, settings={"lora_merged": "true"})
    file.write_text(json.dumps(record))
    with pytest.raises(ConvertError, match="--set lora_alpha: expected a checkpoint with params/ and LoRA"):
        convert(path, tmp_path / "no.gguf", **given, settings={"lora_alpha": "16"})
    weights = load_file(path / "model.safetensors")
    name = "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.lora_a"
    save_file(weights | {name: weights["action_in_proj.weight"].clone()}, path / "model.safetensors")
    with pytest.raises(ConvertError, match=re.escape(name)):
        convert(path, tmp_path / "no.gguf", **given)


def test_keys_of_openpis_configuration(golden, tmp_path):
    path, arch, _ = write_checkpoint(golden, tmp_path, "pi05_droid")
    file = path / "config.json"
    record, given = json.loads(file.read_text()), {"arch": arch, "openpi_config": "pi05_droid"}
    file.write_text(json.dumps(record | {"pi05": True, "max_token_len": 200, "dtype": "bfloat16"}))
    convert(path, tmp_path / "out.gguf", **given)
    for changed, told in (
        ({"pi05": False}, "pi05: expected True as in the training configuration pi05_droid, got False"),
        ({"max_token_len": 250}, "max_token_len: expected 200"),
        ({"discrete_state_input": False}, "discrete_state_input: expected True"),
        (
            {"flow": 1, "extra": 2},
            "expected only keys of openpi's Pi0Config, got flow, extra; .*ignore=flow,extra",
        ),
    ):
        file.write_text(json.dumps(record | changed))
        with pytest.raises(ConvertError, match=told):
            convert(path, tmp_path / "no.gguf", **given)
    convert(path, tmp_path / "out.gguf", **given, settings={"ignore": "flow,extra"})
