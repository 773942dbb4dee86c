"""Weights in half precision on a CPU that does not multiply it, and policies whose float32 copies do not fit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sinew import load
from sinew.bundle import Bundle, write_bundle
from sinew.cli import main
from sinew.core import machine
from sinew.engine.backend import choose
from sinew.engine.clone import on_meta
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.loading import load_model
from sinew.layers.linear import Linear
from sinew.layers.stores import half
from sinew.layers.stores.half import HALF, product
from sinew.layers.stores.plain import PLAIN
from sinew.layers.stores.rows import Rows
from sinew.lowbit.sources import lowbit_sources
from tests.engines import trace_one
from tests.golden import Golden, assert_parity, relative_l2

TEXT = "fp32 (bf16 weights)"


@pytest.fixture
def no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "half_units", lambda dtype: None)


@pytest.fixture
def all_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "half_units", lambda dtype: "a test")


@pytest.mark.parametrize("dtype", half.DTYPES)
@pytest.mark.parametrize(("rows", "count", "width"), [(1, 7, 5), (3, 64, 40), (50, 33, 24)])
def test_products_of_blocks_are_those_of_the_whole(monkeypatch, dtype, rows, count, width) -> None:
    """A block of a few rows, the last one shorter; the layer's bias and the gradient of its input."""
    monkeypatch.setattr(half, "BLOCK", 4 * width)
    monkeypatch.setattr(half, "ROWS", 2)
    torch.manual_seed(0)
    x, weight = torch.randn(2, rows, width), torch.randn(count, width).to(dtype)
    layer = Linear(width, count)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias.requires_grad_(False)
    layer.store = HALF
    wanted = F.linear(x, weight.float(), layer.bias)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-6, atol=1e-5)
    assert layer(x).dtype == layer.dtype == torch.float32
    assert layer(x.to(dtype)).dtype == torch.float32
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), wanted, rtol=1e-6, atol=1e-5)
    gradients = []
    for call in (layer, lambda each: F.linear(each, weight.float(), layer.bias)):
        at = x.clone().requires_grad_(True)
        call(at).square().sum().backward()
        gradients.append(at.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-3)


def test_copies_are_bounded_by_a_block(monkeypatch) -> None:
    monkeypatch.setattr(half, "BLOCK", 64)
    monkeypatch.setattr(half, "ROWS", 1)
    monkeypatch.setattr(half, "_scratch", half.threading.local())
    product(torch.ones(2, 16), torch.ones(40, 16, dtype=torch.bfloat16))
    assert half._scratch.tensor.numel() == 64


@pytest.mark.parametrize("engine", ["eager", "plan"])
def test_float32_arithmetic_on_the_stored_weights(golden, smolvla_bundle, no_units, engine) -> None:
    """Native precision without half products: the chunk of float32, from weights that stay in the file's map."""
    path = smolvla_bundle("smolvla-bf16-vlm")
    options = {"engine": engine, "allow_missing_cameras": True}
    policy, wide = (load(path, "cpu", dtype, **options) for dtype in ("native", "fp32"))
    observation = Golden(golden / "smolvla-bf16-vlm").observation()
    got, wanted = (each.infer(observation).actions for each in (policy, wide))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
    assert policy.facts.precision == {"vision": TEXT, "language": TEXT, "head": TEXT}  # bf16 among others
    assert policy.facts.weights_nbytes < wide.facts.weights_nbytes
    mapped = policy.bundle.tensor("language.layers.0.attn.o_proj.weight")
    assert policy.engine.model.language.layers[0].attn.o_proj.weight.data_ptr() == mapped.data_ptr()
    assert "this CPU has no bf16 products" in policy.dtype_reason
    assert policy.describe()["dtype"] == TEXT


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("", "fp32"), ("", "native"), ("", "fp16"), ("q8_0", "fp32"), ("q4_0", "native"), ("int8", "bf16")],
)
def test_token_tables_stay_in_the_file(golden, smolvla_bundle, all_units, tmp_path, recipe, dtype) -> None:
    """Rows of the stored table give the actions of a table that was converted whole, to the bit."""
    path = smolvla_bundle("smolvla-bf16-vlm")
    if recipe:
        bundle, small = Bundle(path), tmp_path / "small.gguf"
        sources = lowbit_sources(bundle, {"language.embed_tokens": recipe})
        write_bundle(small, lambda: bundle.manifest, sources)
        path = small
    policy = load(path, "cpu", dtype, engine="eager", allow_missing_cameras=True)
    cpu, bundle = torch.device("cpu"), Bundle(path)
    whole = EagerEngine(load_model(bundle, cpu, dtype), cpu)
    table, wide = (each.model.language.embed_tokens for each in (policy.engine, whole))
    assert table.weight.data_ptr() == policy.bundle.tensor("language.embed_tokens.weight").data_ptr()
    assert wide.store == PLAIN
    assert table.dtype == wide.dtype == wide.weight.dtype
    assert isinstance(table.store, Rows) == bool(recipe or dtype in ("fp32", "fp16"))
    observation = replace(policy.dummy_observation(), **Golden(golden / "smolvla-bf16-vlm").observation())
    inputs, noise = policy.processor.inputs(observation), np.zeros(whole.model.noise_shape, np.float32)
    found, wanted = (trace_one(engine, inputs, noise, 2) for engine in (policy.engine, whole))
    np.testing.assert_array_equal(found.head[-1], wanted.head[-1])
    np.testing.assert_array_equal(found.rows["language.embed_tokens"], wanted.rows["language.embed_tokens"])
    with torch.device("meta"):  # shapes alone, as memory and time are predicted
        made = on_meta(policy.engine.model).language.embed_tokens
    assert made(torch.zeros(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, made.embedding_dim)
    with pytest.raises(TypeError, match="row indices must be int64 or int32"):
        table(torch.zeros(2))


@pytest.mark.parametrize("case", ["pi0-2cam", "pi05-2cam"])
def test_plan_keeps_what_it_joins_in_half_precision(golden, pi_bundle, no_units, case) -> None:
    eager, planned = (load(pi_bundle(case), "cpu", "bf16", engine=engine) for engine in ("eager", "plan"))
    observation = Golden(golden / case).observation()
    got, wanted = (torch.from_numpy(each.infer(observation).actions) for each in (planned, eager))
    assert relative_l2(got, wanted) <= 1e-5
    packed = planned.engine.model.language.layers[0].attn.qkv_proj
    assert packed.store == HALF
    assert packed.weight.dtype == torch.bfloat16


def test_a_cpu_with_half_products_computes_in_them(smolvla_bundle, all_units) -> None:
    policy = load(
        smolvla_bundle("smolvla-bf16-vlm"), "cpu", "native", engine="eager", allow_missing_cameras=True
    )
    assert policy.facts.precision["language"] == "bf16"
    assert not any(getattr(module, "store", PLAIN) == HALF for module in policy.engine.model.modules())


def test_copies_that_do_not_fit_are_not_made(golden, smolvla_bundle, all_units, monkeypatch) -> None:
    """fp32, the default: the same numbers, whatever memory there is."""
    path = smolvla_bundle("smolvla-bf16-vlm")
    g = Golden(golden / "smolvla-bf16-vlm")
    assert choose(Bundle(path), device="cpu").options.storage == ""
    wide = load(path, "cpu", engine="eager", allow_missing_cameras=True).infer(g.observation()).actions
    monkeypatch.setattr(machine, "memory", lambda: (1 << 30, 1 << 30))
    choice = choose(Bundle(path), device="cpu")
    assert choice.options.storage == "bf16"
    assert choice.precision_text == TEXT
    assert "do not fit the 1.0 GiB available: weights stay bf16" in choice.dtype_reason
    policy = load(path, "cpu", engine="eager", allow_missing_cameras=True)
    assert policy.facts.precision["language"] == TEXT
    assert_parity(policy.infer(g.observation()).actions, wide)


def test_verbs_say_what_computes(smolvla_bundle, no_units, capsys) -> None:
    path = str(smolvla_bundle("smolvla-bf16-vlm"))
    options = ["--dtype", "bf16", "--device", "cpu", "--engine", "eager", "--json"]
    assert main(["bench", path, "--runs", "1", "--solver-steps", "1", *options]) == 0
    about = json.loads(capsys.readouterr().out)["policy"]
    assert TEXT in about["dtype"]
    assert about["dtype_reason"].startswith("asked for; this CPU has no bf16 products: weights stay bf16")
