"""An adapter apart from its base (`--no-merge`): the low-rank form of what a merged bundle would have."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

import sinew
from sinew.bundle import Bundle, TensorSource
from sinew.bundle.adapter import weights_hash
from sinew.convert import convert, tensors
from sinew.convert.adapter import Changed, merge
from sinew.convert.tensors import computed, constant, join, read_array, reshape, rows, split, transpose
from sinew.convert.unmerged import unmerge
from sinew.core import ConvertError
from tests.adapters import ATTENTION, Make, options_of, write_folder
from tests.cases import cases, golden_cases

CASES = ("smolvla-2cam", "pi0-2cam", "pi05-2cam", "pi0fast-2cam", "smolvla-bf16-vlm")
ROUNDING = 2.0**-23


def values(bundle: Bundle, name: str) -> np.ndarray:
    found: np.ndarray = bundle.tensor(name).float().numpy()
    return found


@pytest.mark.parametrize("case", CASES)
def test_base_and_adapter_are_the_merged_bundle(case: str, adapters: Make) -> None:
    found = adapters(case)
    base = Bundle(found.base)
    for name, file in found.files.items():
        adapter, merged = Bundle(file), Bundle(found.merged[name])
        changed = {
            each for each in base.infos if not np.array_equal(values(merged, each), values(base, each))
        }
        assert len(changed) > 4
        for each in changed:
            module = each.removesuffix(".weight")
            if each in adapter.infos:
                assert np.array_equal(values(adapter, each), values(merged, each))
                continue
            product = values(adapter, f"{module}.lora_b") @ values(adapter, f"{module}.lora_a")
            wanted = values(merged, each)
            unit = 2.0**-8 if merged.infos[each].type.name == "BF16" else ROUNDING
            np.testing.assert_allclose(
                values(base, each) + product, wanted, rtol=0, atol=4 * unit * np.abs(wanted).max()
            )
        named = {each.removesuffix(".weight") for each in changed}
        assert {each.rpartition(".")[0] for each in adapter.infos} <= named | {"action_out_proj"}
        said = adapter.manifest
        assert said.base is not None
        assert base.hashes is not None
        assert said.base.weights == weights_hash(base.hashes)
        assert said.tokenizer == ""
        assert said.processing == merged.manifest.processing
        assert said.config == base.manifest.config
        sources = [each.name for each in said.provenance.sources]
        assert {f"{name}/adapter_model.safetensors", f"{name}/adapter_config.json"} <= set(sources)
        assert file.stat().st_size < found.base.stat().st_size
        assert not adapter.verify()


def test_weights_in_half_precision_stay_it(adapters: Make) -> None:
    """Beside bfloat16 the factors are float32, which a merged weight would have rounded away."""
    found = adapters("smolvla-bf16-vlm")
    policy, plain = (
        sinew.load(found.base, "cpu", "native", "eager", adapters=files) for files in (found.files, {})
    )
    given = {**vars(plain.dummy_observation())}
    assert np.array_equal(policy.infer(given).actions, plain.infer(given).actions)
    for name, file in found.merged.items():
        merged = sinew.load(file, "cpu", "native", "eager").infer(given).actions
        size = np.abs(merged - plain.infer(given).actions).max()
        assert np.abs(policy.infer({**given, "adapter": name}).actions - merged).max() < 0.1 * size


def test_a_whole_model_is_refused(golden: Path, tmp_path: Path) -> None:
    case = "smolvla-2cam"
    with pytest.raises(ConvertError, match="--no-merge: expected an adapter with --base, got a whole model"):
        convert(golden / case / "checkpoint", tmp_path / "out.gguf", merge=False, **options_of(case))
    assert not (tmp_path / "out.gguf").exists()


def test_scales_and_ranks_are_pefts(tmp_path: Path) -> None:
    """The product of the factors that are written is scale B A, as PEFT's own fields say it."""
    case = "smolvla-2cam"
    checkpoint = golden_cases() / cases()[case].home / "checkpoint"
    folders = {
        "usual": write_folder(case, tmp_path / "usual", 3, ATTENTION, 4, lora_alpha=8),
        "stabilised": write_folder(
            case, tmp_path / "stabilised", 3, ATTENTION, 4, lora_alpha=8, use_rslora=True
        ),
        "patterns": write_folder(
            case,
            tmp_path / "patterns",
            3,
            ATTENTION,
            4,
            r=9,
            rank_pattern={"q_proj": 4, "v_proj": 4},
            alpha_pattern={"v_proj": 2},
        ),
    }
    products = {}
    for name, folder in folders.items():
        out = convert(folder, tmp_path / f"{name}.gguf", merge=False, base=checkpoint, **options_of(case))
        found = Bundle(out)
        for which in "qv":
            module = f"expert.layers.0.attn.{which}_proj"
            products[name, which] = values(found, f"{module}.lora_b") @ values(found, f"{module}.lora_a")
    for name, which, scale in (
        ("stabilised", "q", 2.0),
        ("stabilised", "v", 2.0),
        ("patterns", "q", 0.5),
        ("patterns", "v", 0.25),
    ):
        np.testing.assert_allclose(products[name, which], scale * products["usual", which], rtol=1e-5)


# ----------------------------------------------------------------------------- transforms


def changed(name: str, weight: np.ndarray, seed: int, rank: int = 2) -> tuple[TensorSource, np.ndarray]:
    """Return a weight that an adapter changed as :func:`merge` changes it, and its change."""
    random = np.random.default_rng(seed)
    down, up = random.normal(size=(rank, weight.shape[1])), random.normal(size=(weight.shape[0], rank))
    base, a, b = constant(name, weight), constant("a", down), constant("b", up)
    merged = computed(lambda w, x, y: w + np.float32(0.5) * (y @ x), base, a, b)
    data = Changed(merged.data, base, (a, b, 0.5))
    return TensorSource(name, merged.shape, merged.type, merged.nbytes, data), 0.5 * up @ down


def weight(outputs: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(outputs).normal(size=(outputs, inputs)).astype(np.float32)


def product(source: TensorSource, name: str = "x") -> np.ndarray:
    found = unmerge({f"{name}.weight": source}, "base", "").tensors
    return read_array(found[f"{name}.lora_b"]) @ read_array(found[f"{name}.lora_a"])


def test_parts_of_one_weight_have_their_factors_side_by_side() -> None:
    """Queries, keys and values that a bundle has as one; only two of them were trained."""
    (q, of_q), (v, of_v) = changed("q", weight(4, 6), 1), changed("v", weight(3, 6), 2)
    k = constant("k", weight(5, 6))
    joined = join(q, k, v)
    np.testing.assert_allclose(product(joined), np.concatenate([of_q, np.zeros((5, 6)), of_v]), atol=1e-6)
    found = unmerge({"x.weight": joined}, "base", "")
    assert found.tensors["x.lora_a"].shape == (4, 6)
    plain = unmerge({"y.weight": changed("y", weight(2, 2), 3)[0], "x.weight": joined}, "b", "").base
    assert plain.weights != found.base.weights


def test_a_weight_that_is_split_or_cut() -> None:
    fused, delta = changed("qkv", weight(6, 4), 1)
    for index, part in enumerate(split(fused, (2, 2, 2))):
        np.testing.assert_allclose(product(part), delta[2 * index : 2 * index + 2], atol=1e-6)
    np.testing.assert_allclose(product(rows(fused, 1, 4)), delta[1:4], atol=1e-6)
    turned = tensors.moved(lambda x: x.reshape(3, 2, -1)[:, ::-1].reshape(x.shape[0], -1), fused)  # heads
    np.testing.assert_allclose(product(turned), delta.reshape(3, 2, 4)[:, ::-1].reshape(6, 4), atol=1e-6)


def test_what_has_no_such_form_is_refused() -> None:
    fused, _ = changed("w", weight(4, 4), 1)
    whole = constant("v", weight(4, 4))
    replaced = TensorSource("v", whole.shape, whole.type, whole.nbytes, Changed(whole.data, whole))
    refused = {
        "does more than move rows": (transpose(fused), reshape(fused, 2, 8)),
        "changes the weight's values": (
            computed(lambda x: 1 + x, fused),
            tensors.moved(lambda x: x[:, ::-1], fused),
        ),
        "a whole part of x.weight": (join(fused, replaced),),
    }
    for words, sources in refused.items():
        for source in sources:
            with pytest.raises(ConvertError, match=f"{words}.*omit --no-merge"):
                unmerge({"x.weight": source}, "base", "")


def test_the_base_is_found_below_each_transform() -> None:
    """Its hash is that of what would be written without the adapter."""
    base = weight(4, 6)
    plain, (fused, _) = constant("w", base), changed("w", base, 1)
    other = constant("o", weight(2, 6))
    for make in (lambda x: x, lambda x: join(x, other), lambda x: rows(x, 1, 3), tensors.rounded):
        with_adapter, without = make(fused), make(plain)
        found = unmerge({"x.weight": with_adapter, "y.weight": fused}, "base", "").base
        hashes = {
            name: hashlib.sha256(b"".join(map(bytes, each.data.blocks()))).hexdigest()
            for name, each in (("x.weight", without), ("y.weight", plain))
        }
        assert found.weights == weights_hash(hashes)


def test_changes_are_noted_where_they_are_made(golden: Path, tmp_path: Path) -> None:
    case = "smolvla-2cam"
    folder = write_folder(case, tmp_path / "a", 1, ATTENTION, whole=("model.state_proj",))
    sources, _files = tensors_of(golden / case / "checkpoint")
    found, _ = merge(sources, folder)
    marked = {name for name, each in found.items() if isinstance(each.data, Changed)}
    assert marked == {name for name in found if found[name] is not sources[name]}
    assert {f"model.state_proj.{part}" for part in ("weight", "bias")} <= marked


def tensors_of(folder: Path) -> tuple[dict[str, TensorSource], list[Path]]:
    from sinew.convert.read.safetensors import read_weights

    return read_weights(folder)
