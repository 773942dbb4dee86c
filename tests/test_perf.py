"""The roofline: the paper's numbers to the printed digit, formulas against events, data files, the verbs."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest

from sinew.cli import main
from sinew.core import CameraSpec, PolicySpec, SinewError, VectorSpec
from sinew.perf import events, layers, scenarios
from sinew.perf.hardware import Hardware, Network, hardware, load_hardware, load_network, networks
from sinew.perf.operators import Component, Operator, Residency, Tensor
from sinew.perf.paper import GEMMA, PAYLOAD, PI0, Study
from sinew.perf.published import CORRECTIONS, compare, corrections, printed, rounded
from sinew.perf.roofline import seconds, time_of, timing, weight_bytes

MACHINE = Hardware("m", "m", {"bfloat16": 100.0, "float32": 10.0}, 10.0, 8, "test")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    code = main(["perf", *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    return code, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


# ----------------------------------------------------------------------------- the paper


def test_every_number_of_the_paper():
    """152 of 161 exact and 5 that say N/A, by the reference's count; four documented exceptions, nothing else."""
    rows = compare()
    wrong = [row for row in rows if row.status == "differs"]
    assert wrong == []
    exceptions = {row.quantity for row in rows if row.status not in ("exact", "ok")}
    assert exceptions == {
        "AR / diffusion x",
        "parallel decode OI chunk 10",
        "VLM/action size ratio",
        "KV download WiFi 7 ms",
    }
    assert len(rows) == 164
    assert sum(row.status == "ok" for row in rows) == 5


@pytest.mark.parametrize(("where", "quantity", "number", "_expected"), printed())
def test_printed_number(where, quantity, number, _expected):
    """One line per number, so that a fault names what moved."""
    row = {(row.where, row.quantity): row for row in ROWS}[where, quantity]
    assert row.status != "differs", f"printed {number}, ours {row.ours}"


ROWS = compare()


def test_the_comparison_can_fail():
    """Each of the published model's peculiarities matters: without it numbers move."""
    for name, (_, change, decimal) in CORRECTIONS.items():
        machine = (lambda m: m) if decimal else None
        study = Study(change(layers.PAPER), machine) if machine else Study(change(layers.PAPER))
        assert any(row.status == "differs" for row in compare(study)), name


def test_paper_in_two_seconds():
    begun = time.process_time()
    compare()
    corrections()
    assert time.process_time() - begun < 2


def test_corrected_preset():
    """End to end on the five machines, from an independent computation of the same corrections."""
    corrected = corrections()[-1]
    expected = {"Thor": 53.63, "RTX4090": 30.76, "A100": 16.03, "H100": 6.04, "B100": 3.11}
    assert {name: round(corrected[name], 2) for name in expected} == expected


@pytest.mark.parametrize(
    ("value", "like", "text"),
    [(16.151, "16.1", "16.2"), (0.5, "1", "1"), (2.5, "2", "3"), (53.625, "1.00", "53.63")],
)
def test_rounding(value, like, text):
    assert rounded(value, like) == text


def test_figures_have_the_tables_values():
    study = Study()
    figures = study.figures()
    base = {
        row["part"]: row["ms"]
        for row in figures["figure 5"]
        if (row["machine"], row["family"]) == ("thor", "pi0")
    }
    assert {part: round(ms, 2) for part, ms in base.items()} == {
        "vision": 6.06,
        "language": 20.30,
        "action": 26.20,
    }
    decoding = {(row["kind"], row["chunk"]): row["ms"] for row in figures["figure 7"]}
    assert round(decoding["autoregressive", 50], 1) == 327.6
    assert decoding["parallel", 1] < decoding["diffusion", 1]  # takeaway 8: it wins for few tokens
    assert decoding["parallel", 50] > decoding["diffusion", 50]
    assert decoding["diffusion-large", 50] == pytest.approx(19.76, abs=0.01)
    on_device = figures["figure 8"][0]["ms"]
    assert [row["ms"] < on_device for row in figures["figure 9"]] == [True, False, False]  # takeaway 10


# ----------------------------------------------------------------------------- the core


def test_an_operator_takes_its_slower_side():
    big = Operator("x", 1000, (Tensor(4, "bfloat16"),), "bfloat16")
    assert time_of(big, MACHINE) == (10.0, 0.8)
    chip = Operator("x", 0, (Tensor(4, "bfloat16", Residency.ON_CHIP), Tensor(5, "bfloat16")), "bfloat16")
    assert time_of(chip, MACHINE)[1] == 1.0
    counted = Hardware("m", "m", MACHINE.peak, 10.0, 8, "test", on_chip_bandwidth=8.0)
    assert time_of(chip, counted)[1] == 2.0
    part = Component("a", (Operator("x", 1000, big.tensors, "bfloat16", count=3), chip), repeats=2)
    found = timing(part, MACHINE)
    assert found.seconds == pytest.approx(2 * (3 * 10 + 1.0))
    assert (found.bound, found.flops) == ("compute", 6000)
    assert seconds([part, part], MACHINE) == pytest.approx(2 * found.seconds)


def test_formats_without_a_rate_use_the_next_wider():
    assert MACHINE.peak_flops("int4") == 100.0  # unpacked to half precision
    assert MACHINE.peak_flops("float16") == 100.0
    assert load_hardware("b100").peak_flops("float8") == 3500e12
    with pytest.raises(SinewError, match="no peak for float32"):
        Hardware("m", "m", {"bfloat16": 1.0}, 1.0, 1, "test").peak_flops("float32")


def test_weights_of_layers():
    parts = PI0.components(layers.CORRECTED)
    assert weight_bytes(parts) == 2 * sum(net.product_weights for net in PI0.nets)
    doubled = weight_bytes(PI0.components(layers.PAPER)) - weight_bytes(parts)
    assert doubled == 2 * 18 * 1024 * (8 + 2) * 256  # the second QKV of the action expert


# ----------------------------------------------------------------------------- scenarios and events


def test_payload_of_a_policy():
    cameras = (CameraSpec("a", 224, 224), CameraSpec("b", 480, 640))
    spec = PolicySpec("pi0", "p", cameras, VectorSpec(7), VectorSpec(6), 50, 32, 10, 48)
    raw = scenarios.payload(spec)
    assert raw == scenarios.Payload(3 * (224 * 224 + 480 * 640) + 28, 4 * 50 * 6)
    jpeg = scenarios.payload(spec, "jpeg", rows=10)
    assert (jpeg.up, jpeg.down) == (pytest.approx((raw.up - 28) / 10 + 28), 240)
    with pytest.raises(SinewError, match="codec"):
        scenarios.payload(spec, "h264")


@pytest.mark.parametrize("link", ["ethernet-10g", "wifi7", "5g", "4g"])
@pytest.mark.parametrize("compute_ms", [3.18, 52.6])
def test_asynchronous_rate_by_formula_and_by_events(link, compute_ms):
    route = [load_network(link)]
    want = scenarios.asynchronous_hz(compute_ms / 1e3, PAYLOAD, route)
    played = events.asynchronous(
        compute_ms / 1e3, PAYLOAD, route, control_hz=4000, chunk=40_000, duration_s=20, in_flight=None
    )
    assert played.chunk_hz == pytest.approx(want, rel=0.15)
    assert played.chunk_hz <= want * 1.01


def test_one_request_at_a_time_is_the_synchronous_rate():
    route = [load_network("5g")]
    latency = scenarios.synchronous_s(0.05, PAYLOAD, route)
    played = events.asynchronous(
        0.05, PAYLOAD, route, control_hz=2000, chunk=4000, in_flight=1, duration_s=20
    )
    assert played.chunk_hz == pytest.approx(1 / latency, rel=0.02)
    assert played.age_max_s <= 2 * latency + 2e-3
    assert played.underruns == 0


@pytest.mark.parametrize(("replan", "chunk"), [(5, 20), (10, 20), (18, 20)])
def test_staleness_and_underruns(replan, chunk):
    """50 Hz, 100 ms: five steps pass before a chunk is there, so a chunk must reach five beyond the replan."""
    latency = 0.1
    stale = scenarios.staleness(latency, replan, chunk, 50)
    played = events.asynchronous(
        latency, PAYLOAD, [], control_hz=50, chunk=chunk, replan=replan, duration_s=40
    )
    assert (played.underruns > 0) == stale.underrun == (replan + 5 > chunk)
    if not stale.underrun:
        assert played.age_max_s == pytest.approx(stale.last_s, abs=1e-6)


@pytest.mark.parametrize("cap", [5, 10])
def test_dual_system_by_formula_and_by_events(cap):
    fast, slow = 0.032262, 0.020303  # Thor, table 9
    played = events.dual_system(fast, slow, cap, duration_s=200)
    want = scenarios.dual_system_hz(fast, slow, cap, 1 / (fast + slow))
    assert played.fast_hz == pytest.approx(want, rel=0.02)
    assert played.slow_hz == pytest.approx(cap, rel=0.02)
    assert played.plan_age_max_s < 1 / cap + slow + 2 * fast


def test_impossible_cases_are_refused():
    for call in (
        lambda: events.asynchronous(0, PAYLOAD, [], control_hz=1, chunk=1),
        lambda: events.dual_system(1, 1, 0),
        lambda: scenarios.staleness(0.1, 9, 8, 50),
    ):
        with pytest.raises(SinewError):
            call()


def test_splitting_moves_the_cache():
    link = load_network("ethernet-10g")
    whole = scenarios.split_s(0.01, 0.02, 1000, GEMMA.kv_bytes(800), [link])
    assert GEMMA.kv_bytes(800) == 14_745_600
    assert whole == pytest.approx(0.03 + 2 * 0.05e-3 + (1000 + 14_745_600) * 1.05 * 8 / 1e10)


# ----------------------------------------------------------------------------- data files


def test_every_entry_has_a_source():
    for entry in (*hardware().values(), *networks().values()):
        assert len(entry.source) > 5
    assert {"thor", "h200", "rtx5090", "rtx3060", "l40s", "agx-orin", "orin-nx", "orin-nano", "cpu"} <= set(
        hardware()
    )


def test_user_files_merge(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[bench]\npeak = { bfloat16 = 1e12 }\nbandwidth = 1e9\nmemory_gib = 4\n")
    assert load_hardware("bench", mine).balance == 1000
    assert "h200" in hardware(mine)
    link = tmp_path / "link.toml"
    link.write_text("[tether]\nupload = 1e6\ndownload = 1e6\nbase_ms = 1\n")
    assert isinstance(load_network("tether", link), Network)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x]\npeak = { bfloat16 = 1 }\nbandwidth = 0\nmemory_gib = 1", "above 0"),
        ("[x]\npeak = { bfloat16 = 'fast' }\nbandwidth = 1\nmemory_gib = 1", "above 0"),
        ("[x]\npeak = { fp99 = 1 }\nbandwidth = 1\nmemory_gib = 1", "expected formats"),
        ("[x]\nbandwidth = 1", "missing"),
        ("[x]\npeak = { bfloat16 = 1 }\nbandwidth = 1\nmemory_gib = 1\ncolour = 'red'", "colour"),
        ("x = 1", "expected a table"),
        ("[x", "mine.toml"),
    ],
)
def test_bad_user_files(tmp_path, text, message):
    mine = tmp_path / "mine.toml"
    mine.write_text(text)
    with pytest.raises(SinewError, match=message):
        load_hardware("x", mine)


def test_unknown_names():
    with pytest.raises(SinewError, match="hardware 'abacus': expected one of thor"):
        load_hardware("abacus")
    with pytest.raises(SinewError, match="network 'pigeon'"):
        load_network("pigeon")


# ----------------------------------------------------------------------------- the verbs


def test_perf_paper(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    code, result = run(capsys, "paper", "--table", tmp_path / "paper.csv", "--plot", tmp_path)
    assert code == 0
    assert result["numbers"] == 164
    with (tmp_path / "paper.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 164
    assert {path.name for path in tmp_path.glob("*.png")} == {"latency_over_size.png", "placements.png"}


def test_perf_run(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    bundle = Path(__file__).resolve().parents[1] / "sinew" / "assets" / "blocks.gguf"
    code, result = run(capsys, "run", bundle, "--hardware", "cpu", "--plot", tmp_path / "roof.png")
    assert code == 0
    (machine,) = result["machines"]
    assert [part["component"] for part in machine["components"]] == ["vision", "language", "action"]
    assert machine["ms"] == pytest.approx(sum(part["ms"] for part in machine["components"]))
    assert (tmp_path / "roof.png").stat().st_size > 10_000


def test_perf_run_depends_on_what_is_asked(capsys):
    def ms(*options: object) -> float:
        return run(capsys, "run", "smolvla", "--hardware", "h200", *options)[1]["machines"][0]["ms"]

    base = ms()
    assert ms("--cameras", 1) < base < ms("--steps", 40)
    assert ms("--dtype", "vision=float8,language=float8") < base < ms("--traffic", "unfused")


def test_perf_scenario(capsys):
    code, result = run(capsys, "scenario", "pi0", "--network", "ethernet-1g", "--codec", "jpeg")
    assert code == 0
    rows = {row["where"]: row for row in result["rows"]}
    assert set(rows) == {"robot", "server", "split", "dual, robot", "dual, server"}
    assert rows["server"]["latency_ms"] < rows["robot"]["latency_ms"]


def test_perf_need(capsys):
    code, result = run(capsys, "need", "--rate", 30, "--model", "pi0.5", "--cameras", 3)
    assert code == 0
    names = {row["machine"] for row in result["found"]}
    assert "h200" in names
    assert "orin-nano" not in names
    assert all(row["hz"] >= 30 for row in result["found"])
    code, result = run(capsys, "need", "--rate", 1e6, "--model", "smolvla")
    assert (code, result["found"]) == (1, [])


def test_perf_machines(capsys):
    assert main(["perf", "machines"]) == 0
    assert "H200" in capsys.readouterr().out


def test_perf_mistakes(capsys):
    assert main(["perf", "run", "nowhere.gguf"]) == 1
    assert "expected a bundle file or one of" in " ".join(capsys.readouterr().err.split())
    assert main(["perf", "run", "pi0", "--dtype", "vision="]) == 1
    assert "STAGE=FORMAT" in " ".join(capsys.readouterr().err.split())
