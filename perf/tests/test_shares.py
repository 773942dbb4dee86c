"""Shares of the roofline that engines reached: each row's share and source, and what a prediction takes from them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from sinew.core import SinewError
from tests.covering import some

from sinew_perf import shares
from sinew_perf.hardware import KINDS, hardware, load_hardware
from sinew_perf.program import PRESETS, PublishedProgram
from sinew_perf.request import TracedRequest
from sinew_perf.roofline import seconds
from sinew_perf.shares import NEAR, MeasuredShare, measured, others, used

ROOT = Path(__file__).parents[2]
QUICK = [row for row in measured() if row.model.endswith(".gguf")]


def roofline_ms(row: MeasuredShare) -> float:
    source = row.model if row.model in PRESETS else str(ROOT / "sinew/assets" / row.model)
    request = TracedRequest(row.cameras, row.prompt_tokens, row.chunk, row.steps)
    program = PublishedProgram.load(source, request, dtypes=row.dtypes, engine="plan")
    assert program.family == row.family
    return 1e3 * seconds(program.components(), hardware()[row.machine])


@pytest.mark.parametrize("row", some(measured(), *QUICK), ids=str)
def test_a_share_is_the_roofline_of_the_measured_request_by_its_time(row):
    assert row.share == pytest.approx(roofline_ms(row) / row.ms, rel=0.01)


@pytest.mark.parametrize("row", measured(), ids=str)
def test_a_measurement_has_its_source(row):
    """The page has the section, and the section has the number."""
    page, _, rest = row.source.partition(", ")
    section = rest.split(":")[0]
    text = (ROOT / page).read_text("utf-8")
    found = re.search(rf"^#+ {re.escape(section)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section {section!r}"
    numbers = {f"{row.ms:g}", f"{row.ms:.2f}", f"{row.ms:.1f}", f"{row.ms / 1e3:g}", f"{row.ms / 1e3:.2f}"}
    assert numbers & set(re.findall(r"\d+(?:\.\d+)?", found[1]))


def test_pi05_on_an_h200_is_predicted_as_it_was_measured():
    """62 answers a second (docs/gpu.md). 0.7 of the roofline would promise 118."""
    card = load_hardware("h200")
    program = PublishedProgram.load("pi0.5", TracedRequest(cameras=3), dtypes="bf16", engine="plan")
    roofline_s = seconds(program.components(), card)
    share = used(program.family, "bf16", card, roofline_s)
    assert share.share / roofline_s == pytest.approx(62, rel=0.05)
    assert [row.machine for row in share.rows] == ["h200"]
    assert others().share / roofline_s > 1.8 * 62


def test_a_measurement_of_the_same_policy_and_machine_counts_first():
    card = load_hardware("h200")
    share = used("smolvla", "bf16", card, 1.3e-3)  # pi0's rooflines are no farther
    assert (share.rows[0].family, share.rows[0].machine, len(share.rows)) == ("smolvla", "h200", 1)
    assert share.share == share.rows[0].share
    far = used("smolvla", "bf16", card, 1.1 * NEAR * share.rows[0].roofline_ms / 1e3)
    assert far.rows != share.rows


def test_another_policy_lies_between_two_measurements():
    card = load_hardware("h200")
    share = used("gr00t_n1_7", "bf16", card, 2.55e-3)
    low, high = share.rows
    assert low.roofline_ms < 2.55 < high.roofline_ms
    assert min(low.share, high.share) < share.share < max(low.share, high.share)
    assert str(low) in share.why
    assert str(high) in share.why


# What shorter requests took longer than longer ones, as they were measured: SmolVLA in FP8 8.36 and 7.3 ms, on an H200
# and on an H100 some days later.
@pytest.mark.parametrize(
    ("machine", "precision", "least"), [("b100", "bf16", 0.96), ("b100", "fp8", 0.87), ("cpu", "int8", 1.0)]
)
def test_a_longer_roofline_never_predicts_a_shorter_time(machine, precision, least):
    """Else a slower machine would be predicted as the faster one."""
    board = load_hardware(machine)
    times = [10 ** (exponent / 10) for exponent in range(-60, 30)]
    took = [each / used("no-such-family", precision, board, each).share for each in times]
    longest = list(itertools.accumulate(took, max))
    assert all(each >= 0.999 * least * before for each, before in zip(took, longest, strict=True))
    assert took[0] > 1e-3  # waiting does not get shorter with the work


def test_ceilings_of_a_data_sheet_and_measured_ones_are_not_mixed():
    sheet, card = load_hardware("agx-orin"), load_hardware("thor-measured")
    assert all(row.machine != "h200-measured" for row in used("pi0", "bf16", sheet, 0.1).rows)
    assert all(row.machine == "h200-measured" for row in used("pi0", "bf16", card, 0.1).rows)


def test_a_kind_that_nobody_measured_has_the_share_of_others():
    share = used("pi0", "int8", load_hardware("imx95"), 1.0)
    assert (share.share, share.rows) == (others().share, ())
    assert "no machine of kind npu was measured" in share.why
    assert used("pi0", "bf16", load_hardware("h200"), 1.0, 0.5).share == 0.5


def test_the_kind_of_a_machine(tmp_path):
    mine = tmp_path / "mine.toml"
    numbers = "peak = { fp32 = 2e11 }\nbandwidth = 1e10\nmemory_gib = 4\n"
    mine.write_text(f"[cpu]\n{numbers}[box]\n{numbers}")
    assert [load_hardware(name, mine).kind for name in ("cpu", "box", "imx95")] == ["cpu", "gpu", "npu"]
    mine.write_text(f"[box]\nkind = 'abacus'\n{numbers}")
    with pytest.raises(SinewError, match=f"box: kind: expected one of {', '.join(KINDS)}, got 'abacus'"):
        load_hardware("box", mine)
    assert replace(load_hardware("cpu"), name="x").kind == "cpu"


@pytest.mark.parametrize("row", [row for row in measured() if row.engine == "cuda"], ids=str)
@pytest.mark.parametrize("without", ["the machine", "the family"])
def test_a_measurement_that_is_left_out_is_predicted(row, without, monkeypatch):
    """By the other measurements, without those of this model on this machine, or without its whole family."""
    card = row.machine.removesuffix("-measured")
    rest = tuple(
        other
        for other in measured()
        if other.family != row.family
        or (
            without == "the machine"
            and (other.model, other.machine.removesuffix("-measured")) != (row.model, card)
        )
    )
    monkeypatch.setattr(shares, "measured", lambda: rest)
    share = used(row.family, row.precision, hardware()[row.machine], row.roofline_ms / 1e3)
    ratio = row.roofline_ms / share.share / row.ms
    if "shortest" in share.why:  # nothing shorter was measured, so that the prediction is too slow
        assert ratio > 1
    else:
        assert 0.8 < ratio < 1.3
    assert (
        row.roofline_ms / others().share / row.ms < 0.7
    )  # 70 % of the roofline is faster than any measurement
