"""The reproduction of VLA-Perf: its numbers to the printed digit, its takeaways, its defects, and the program."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
from sinew_perf.cli.run import write_table
from sinew_perf.hardware import load_hardware
from sinew_perf.needs import reach
from sinew_perf.operators import Component
from sinew_perf.roofline import seconds, timing
from sinew_perf.streams import loops

from research.vla_perf import layers, realtime
from research.vla_perf.__main__ import main
from research.vla_perf.defects import defects
from research.vla_perf.published import (
    CORRECTIONS,
    compare,
    corrected_study,
    corrections,
    explained,
    printed,
    rounded,
)
from research.vla_perf.study import PI0, Study
from research.vla_perf.takeaways import CLAIMS, takeaways
from sinew.cli import main as sinew
from sinew.core import SinewError


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    output = capsys.readouterr().out
    return code, json.loads(output) if output else {}


# ----------------------------------------------------------------------------- the paper


def test_every_number_of_the_paper():
    """All exact but 7 that say N/A and documented exceptions, nothing else; 2 of the 3 released ones among them."""
    rows = compare()
    wrong = [row for row in rows if row.status == "differs"]
    assert wrong == []
    exceptions = {row.quantity for row in rows if row.status not in ("exact", "ok")}
    assert exceptions == {
        "AR / diffusion x",
        "parallel decode OI chunk 10",
        "VLM/action size ratio",
        "KV download WiFi 7 ms",
        "5090 2 cam ms",
    }
    assert len(rows) == 268
    assert sum(row.status == "exact" for row in rows) == 254 + 2
    assert sum(row.status == "ok" for row in rows) == 7


def test_printed_number():
    """A fault names what moved. An exception that is none any more is a fault, too."""
    rows = {(row.where, row.quantity): row for row in compare()}
    wrong = [
        f"{where} {quantity}: expected {expected}, printed {number}, ours {rows[where, quantity].ours}"
        for where, quantity, number, expected in printed()
        if rows[where, quantity].status != {"fits not": "ok"}.get(expected, expected)
    ]
    assert not wrong


def test_the_comparison_can_fail():
    """Each of the published model's peculiarities matters: without it numbers move."""
    for name in CORRECTIONS:
        assert any(row.status == "differs" for row in compare(corrected_study([name]))), name
    with pytest.raises(SinewError, match="expected one of decimal-bandwidth"):
        corrected_study(["zebra"])


@pytest.mark.parametrize(
    ("value", "number", "expected"),
    [(43.81, "43.7", "truncated"), (43.69, "43.7", "truncated"), (16.16, "16.1", "rounded twice")],
)
def test_an_exception_explains_its_own_number_alone(value, number, expected):
    assert not explained(value, number, expected)


def test_every_correction_has_its_switch():
    """All switches together are what the rest of the project computes with."""
    assert corrected_study(CORRECTIONS).how == layers.CORRECTED
    assert corrected_study(()).how == layers.PAPER


def test_corrected_preset():
    """End to end on the five machines, from an independent computation of the same corrections."""
    corrected = corrections()[-1]
    expected = {"Thor": 53.63, "RTX4090": 30.76, "A100": 16.03, "H100": 6.04, "B100": 3.11}
    assert {name: round(corrected[name], 2) for name in expected} == expected


def test_defects():
    """Against an independent computation; the payload's 56 bytes of state are ours (70.64, 208.8 without)."""
    found = {(defect.name, defect.quantity): (defect.published, defect.corrected) for defect in defects()}
    expected = {
        ("payload-jpeg", "B100 over 5G, latency ms"): (27.83, 27.97),
        ("payload-raw", "B100 over 5G, latency ms"): (27.83, 70.65),
        ("payload-raw", "B100 over 5G, asynchronous Hz"): (215.27, 21.07),
        ("payload-raw", "B100 over 4G, asynchronous Hz"): (50.45, 4.93),
        ("vision-in-split", "split over Ethernet 10G, ms"): (40.59, 40.99),
        ("one-token-per-action", "Diffusion-Large, chunk 50, ms"): (19.76, 7.26),
        ("growing-suffix", "autoregressive, chunk 50, ms"): (327.64, 327.11),
        ("token-table", "pi0, GiB"): (5.14, 6.12),
        ("measured-thor", "Thor VLM ms, memory to compute"): (21.78, 26.83),
        ("measured-thor", "Thor end to end, ms"): (53.63, 60.29),
    }
    for key, pair in expected.items():
        assert found[key] == pytest.approx(pair, abs=0.0051), key
    published, played = found["network-not-machine", "B100 over 5G, System 1 beside 10 Hz, Hz"]
    assert published < played < 1 / 0.02596  # never faster than System 1 alone


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
        "prefix": 20.30,
        "head": 26.20,
    }
    decoding = {(row["kind"], row["chunk"]): row["ms"] for row in figures["figure 7"] if row["dof"] == 14}
    assert round(decoding["autoregressive", 50], 1) == 327.6
    assert decoding["parallel", 1] < decoding["diffusion", 1]  # takeaway 8: it wins for few tokens
    assert decoding["parallel", 50] > decoding["diffusion", 50]
    assert decoding["diffusion-large", 50] == pytest.approx(19.76, abs=0.01)
    one_action = {(row["kind"], row["dof"]): row["ms"] for row in figures["figure 7"] if row["chunk"] == 1}
    for dof in (7, 14):  # takeaway 8: few tokens beat the large diffusion head, not the small one
        assert one_action["diffusion", dof] < one_action["autoregressive", dof]
    assert one_action["autoregressive", 7] < one_action["diffusion-large", 7]
    assert one_action["autoregressive", 42] > one_action["diffusion-large", 42]
    sweep = {(row["steps"], row["chunk"]): row for row in figures["figure 6"]}
    assert sweep[50, 50]["action_ms"] == pytest.approx(5 * sweep[10, 50]["action_ms"])
    assert sweep[10, 250]["ms"] / sweep[10, 50]["ms"] == pytest.approx(1.1139, abs=1e-4)
    assert round(sweep[10, 50]["oi"], 1) == 54.0
    on_device = figures["figure 8"][0]["ms"]
    assert len(sweep) == 36
    assert (
        len(figures["figure 8"]) == 1 + 2 * 6 + 2 * 6
    )  # the device, two machines at the edge, one in two clouds
    device, *others = figures["figure 9"]
    assert device["ms"] == on_device
    servers, splits = others[::2], others[1::2]
    assert all(
        split["ms"] > server["ms"] for server, split in zip(servers, splits, strict=True)
    )  # takeaway 10
    assert [row["ms"] < on_device for row in splits] == [True, False, False, False, False, False]


def test_takeaways():
    """Which of the fifteen hold: as published, with everything put right, and without compressing pictures."""
    judged = takeaways()
    assert [each.number for each in judged] == list(range(1, 16))
    fails = {
        name: [each.number for each in judged if not each.verdicts[name].holds] for name in judged[0].verdicts
    }
    # 4: 9.6 Hz is below the paper's own 10 Hz; 14: an RTX 4090 over 4G reaches 9.9, printed as 10.
    assert fails == {
        "as published": [4, 14],
        "corrected": [2, 5, 14],
        "corrected, raw pictures": [2, 5, 9, 11, 14],
    }


@pytest.mark.parametrize("number", range(1, 16))
def test_every_verdict_can_fail(number):
    """A world in which the claim is wrong: every machine and link like one of the others."""

    class Other(Study):
        def e2e(self, machine, family=PI0, **shape):
            return {4: 9.0, 9: 1e-6, 13: 0.5, 14: 1.0, 15: 1.0}.get(number, 0.05) * (
                1 + family.parameters / 1e12
            )

        def long_context(self, machine, observations):
            return 1.0

        def table4(self):
            yield from ((where, what, "Neither") for where, what, _ in super().table4())

        def decoding(self, kind, chunk, dof=14):
            return 1.0

        def collaboration(self, link):
            return 0.0

        def section45(self):
            yield from ((where, what, 100.0) for where, what, _ in super().section45())

        def asynchronous(self, links, machine="b100"):
            return 1.0

        def table9(self):
            yield from ((where, what, 1.0) for where, what, _ in super().table9())

        def sizes(self):
            return [row | {"ms": 1.0} for row in super().sizes()]

    claim, judge = CLAIMS[number - 1]
    assert not judge(Other()).holds, claim


# ----------------------------------------------------------------------------- the program


def test_the_program(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    code, result = run(capsys, "--table", tmp_path / "paper.csv", "--plot", tmp_path)
    assert code == 0
    assert result["numbers"] == 268
    with (tmp_path / "paper.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 268
    assert all(row["ours"] for row in rows)  # what does not fit says so
    drawn = ("latency_over_size", "latency_over_steps", "decoders", "placements", "split")
    assert {path.stem for path in tmp_path.glob("*.png")} == set(drawn)
    assert set(json.loads((tmp_path / "figures.json").read_text())) == {f"figure {n}" for n in range(5, 10)}


def test_the_program_corrects(capsys):
    code, result = run(capsys, "--correct", "all")
    assert (code, result["corrected"]) == (0, list(CORRECTIONS))
    assert result["statuses"]["differs"] > 30
    assert main(["--correct", "zebra"]) == 1
    assert "expected one of decimal-bandwidth" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("machine", ["thor", "rtx4090", "h200"])
def test_no_component_stands_above_its_roof(machine):
    """Scores lie on the chip, so a rate over all bytes would."""
    how, board = replace(layers.CORRECTED, scores=True), load_hardware(machine)
    for part in PI0.components(how):
        found = timing(part, board)
        roof = min(board.peak_flops("bf16"), found.intensity * board.bandwidth)
        assert found.flops / found.seconds <= roof * (1 + 1e-9), part.name


def weight_bytes(components: list[Component]) -> int:
    """Return the bytes of the products' weights, each counted once per component that reads it."""
    operators = [operator for component in components for operator in component.operators]
    return sum(each.count * t.bytes for each in operators for t in each.tensors if t.kind == "weight")


def test_weights_of_layers():
    parts = PI0.components(layers.CORRECTED)
    assert weight_bytes(parts) == 2 * sum(net.product_weights for net in PI0.nets)
    doubled = weight_bytes(PI0.components(layers.PAPER)) - weight_bytes(parts)
    assert doubled == 2 * 18 * 1024 * (8 + 2) * 256  # the second QKV of the action expert


def test_tables_are_written_for_latex_too(tmp_path, capsys):
    """Each row a line, and every character that LaTeX reads as something else escaped."""
    path = tmp_path / "rows.tex"
    assert main(["realtime-vla", "--table", str(path)]) == 0
    begin, rule, head, _, *body, _, end = path.read_text(encoding="utf-8").splitlines()
    assert (begin, rule, end) == (r"\begin{tabular}{lllll}", r"\hline", r"\end{tabular}")
    assert head == r"where & quantity & printed & ours & status \\"
    assert len(body) == 130
    assert r"5.2 & room that is left 2 view \% & 30 & 24.69 & at most \\" in body
    assert all(line.count(" & ") == 4 for line in body)
    write_table(path, [{"a_b": "1 & 2 {x} \\ ~ ^ # $", "c": 1.25}])
    assert (
        r"1 \& 2 \{x\} \textbackslash{} \textasciitilde{} \textasciicircum{} \# \$ & 1.25 \\"
        in path.read_text()
    )
    capsys.readouterr()


FLOAT32 = ("1x32x1024", "63x32x1024", "63x1024x1024", "63x1024x32")  # the ends of the head, here


LEAST = ("--hardware", "rtx4090-boosted", "--chunk", 63, "--prompt-tokens", 0, "--traffic", "weights")


@pytest.mark.parametrize(
    ("views", "printed_ms"), [(1, 12.8), pytest.param(2, 19.7, marks=pytest.mark.slow), (3, 26.7)]
)
def test_the_lower_bound_of_the_traced_program(capsys, views, printed_ms):
    """Each product of arXiv 2510.26742's table 2 is there and equals it, but for what docs/perf.md names."""
    flags = map(str, (*LEAST, "--cameras", views, "--operators", "--sync-us", 0.624, "--json"))
    assert sinew(["perf", "run", "pi0", *flags]) == 0
    (machine,) = json.loads(capsys.readouterr().out)["machines"]
    bound = machine["ms"] - machine["sync_ms"]
    assert machine["sync_ms"] == pytest.approx(machine["products"] * 0.624e-3)
    state = sum(row["ms"] for row in machine["operators"] if row["shape"].startswith("1x"))  # its own pass
    assert bound - state == pytest.approx(printed_ms, rel=0.012)
    assert sum(row["ms"] for row in machine["operators"]) == pytest.approx(bound)
    assert sum(row["times"] for row in machine["operators"]) == machine["products"]
    ours = {(row["times"], row["shape"]): row["ms"] for row in machine["operators"]}
    theirs = {
        (row.times, f"{row.rows}x{row.depth}x{row.columns}"): 1e3 * row.seconds
        for row in realtime.products(views)
    }
    assert ours.keys() & theirs.keys() >= {
        (27, f"{256 * views}x1152x3456"), (27, f"{256 * views}x4304x1152"), (17, f"{256 * views}x2048x32768"),
        (17, f"{256 * views}x16384x2048"), (1, f"{256 * views}x1152x2048"),
    }  # fmt: skip
    for each in ours.keys() & theirs.keys():
        wide, biases = (2, 0.05) if each[1] in FLOAT32 else (1, 1e-9)
        assert ours[each] == pytest.approx(wide * theirs[each], rel=biases), each
    # The rest of the expert has one row less: the state's keys and values are made once, in the prefix.
    one_less = {(times, shape.replace("64x", "63x", 1)) for times, shape in theirs if shape.startswith("64x")}
    assert one_less <= ours.keys()


def test_reach_takes_any_components():
    parts = PI0.components(layers.CORRECTED)
    board = load_hardware("thor")
    *_, action = (timing(part, board).seconds for part in parts)
    whole = seconds(parts, board)
    assert reach(parts, board, 1 / whole, 1.0) == (10, pytest.approx(1 / whole))
    assert reach(parts, board, 1.0, 0.5) == (10, pytest.approx(0.5 / whole))  # never more than asked for
    steps, rate = reach(parts, board, 1 / (whole - 2.5 * action / 10), 1.0)
    assert (steps, rate) == (7, pytest.approx(1 / (whole - 0.3 * action)))
    assert reach(parts, board, 1000, 1.0) is None


def test_a_streams_loops_share_one_machine():
    parts, machine = PI0.components(layers.CORRECTED), load_hardware("h200")
    found = loops(parts, machine, 30.0, 0.5)
    assert found.head_s == pytest.approx(2 * timing(parts[-1], machine).seconds / parts[-1].repeats)
    assert 30 * found.prefix_s + found.beside_hz * found.head_s == pytest.approx(1)
    assert found.beside_hz < found.alone_hz
    assert loops(parts, machine, 1 / found.prefix_s, 0.5).beside_hz == pytest.approx(0, abs=1e-6)
    # At once, a second is full on one side, and on none of them overfull.
    sides = [
        30 * prefix + found.overlapped_hz * head
        for prefix, head in zip(found.prefix_sides, found.head_sides, strict=True)
    ]
    assert max(sides) == pytest.approx(1) or found.overlapped_hz == found.alone_hz
    assert max(sides) <= 1 + 1e-9
    assert found.beside_hz < found.overlapped_hz <= found.alone_hz
    slower = loops(parts, machine, 30.0, 0.5, sensing_s=0.02, actuation_s=0.01)
    assert slower.image_reaction_s == pytest.approx(found.image_reaction_s + 0.03)
    with pytest.raises(SinewError, match="camera_hz above 0"):
        loops(parts, machine, 0.0)
