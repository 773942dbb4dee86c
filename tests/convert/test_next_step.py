"""What is missing in a checkpoint, or beside it: the message names what there is, what is missing, what to type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.convert.lerobot.stats import stats_record
from sinew.core import ConvertError
from tests.cases import FIXTURES, cases

NUMBERS = ("mean", "std", "min", "max")


@pytest.fixture
def case(golden, tmp_path):
    """``case(name) -> (its checkpoint, a copy that can be changed; what its conversion is given)``."""

    def make(name: str):
        path = tmp_path / "run" / name
        home = golden / cases()[name].home
        shutil.copytree(home / cases()[name].checkpoint, path)
        return path, cases()[name].options(home)

    return make


def refused(path: Path, **given) -> str:
    with pytest.raises(ConvertError) as caught:
        convert(path, path.parents[1] / "no.gguf", **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(file: Path, **changes) -> None:
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, **changes}))


# ----------------------------------------------------------------------------- statistics of several data sets


def by_set(path: Path, sets: dict[str, float], only: str = "") -> None:
    """Put statistics under the names of data sets, as lerobot/smolvla_base has them. only: those of one feature."""
    for file in path.glob("policy_*step*.safetensors"):
        found = load_file(file)
        kept = {key: value for key, value in found.items() if only in key}
        save_file({f"{name}.buffer.{k}": v * x for name, x in sets.items() for k, v in kept.items()}, file)


@pytest.mark.parametrize("name", ["smolvla-2cam", "act-2cam", "pi05-2cam", "diffusion-ddpm"])
def test_statistics_of_data_sets_are_named_and_chosen(case, name):
    path, given = case(name)
    plain = Bundle(convert(path, path.parents[1] / "a.gguf", **given)).manifest.processing.action.stats
    by_set(path, {"so100": 1.0, "so100-red": 2.0, "my.arm": 3.0})
    message = refused(path, **given)
    assert (
        "but those of the data sets my.arm, so100, so100-red: choose one with --stats-key my.arm" in message
    )
    chosen = Bundle(convert(path, path.parents[1] / "b.gguf", stats_key="so100-red", **given)).manifest
    for key, values in plain.items():
        np.testing.assert_allclose(chosen.processing.action.stats[key], 2.0 * np.float32(values))
    assert any("statistics of the data set so100-red" in note for note in chosen.provenance.notes)
    assert "expected one of the data sets my.arm, so100, so100-red" in refused(
        path, stats_key="so101", **given
    )


def test_sets_without_the_state_are_named_as_such(case):
    """lerobot/smolvla_base has those of actions alone."""
    path, given = case("smolvla-2cam")
    by_set(path, {"so100": 1.0, "so100-red": 2.0}, only="action")
    message = refused(path, **given)
    assert (
        "those of the data sets so100, so100-red: none of these sets has the missing statistics, or pass the"
        " statistics of your own" in message
    )
    assert "'observation.state'" in message


def test_a_key_of_statistics_where_there_is_one_set(case):
    path, given = case("act-2cam")
    assert "--stats-key x: expected one of the data sets none: the checkpoint has one set" in refused(
        path, stats_key="x", **given
    )


# ----------------------------------------------------------------------------- --stats and --dataset


def without_statistics(path: Path) -> None:
    for file in path.glob("policy_*step*.safetensors"):
        save_file({"observation.state.count": np.ones(1, np.float32)}, file)


@pytest.mark.parametrize("name", ["pi05-2cam", "pi05-mem"])
@pytest.mark.parametrize("has", [NUMBERS, ("mean",), ("q10", "q90", "mean")])
def test_a_file_without_quantiles_is_named_with_what_adds_them(case, name, has):
    path, given = case(name)
    without_statistics(path)
    file = path.parent / "stats.json"
    file.write_text(json.dumps({key: {k: [0.1] * 7 for k in has} for key in ("observation.state", "action")}))
    message = refused(path, stats=file, **given)
    assert message.startswith(f"--stats {file}: no statistics ['q01', 'q99'] for 'observation.state'")
    assert (
        f"it has {', '.join(sorted(has))}; to add quantiles to a data set (version 3), run LeRobot's "
        in message
    )
    assert "augment_dataset_quantile_stats.py" in message


def test_a_minimum_above_its_maximum_is_no_statistic(case):
    path, given = case("diffusion-ddpm")
    for file in path.glob("policy_*step*.safetensors"):
        found = load_file(file)
        if "action.max" in found:
            found["action.max"][0], found["action.min"][0] = -3.0, 3.0
        save_file(found, file)
    assert "action.stats.min[0]: expected at most max[0] = -3.0, got 3.0" in refused(path, **given)


@pytest.mark.parametrize("name", ["meta/stats.json", "dataset_statistics.json"])
@pytest.mark.parametrize("layout", ["pi05-2cam", "openvla-oft"])
def test_a_folder_in_place_of_the_statistics_names_its_file(case, tmp_path, name, layout):
    path, given = case(layout)
    folder = tmp_path / "data"
    (folder / name).parent.mkdir(parents=True)
    assert f"{folder}: expected a JSON file, got a folder" in refused(path, stats=folder, **given)
    (folder / name).write_text("{}")
    assert f"got a folder; pass {folder / name}" in refused(path, stats=folder, **given)


def test_a_file_of_other_features_is_named_with_its_own(case):
    path, given = case("smolvla-2cam")
    file = path.parent / "stats.json"
    file.write_text(json.dumps({"observation.joints": {}, "actions": {}}))
    message = refused(path, stats=file, **given)
    assert "it has none of this feature, only of actions, observation.joints" in message


def data_set(folder: Path, episodes=3, dim=6, version="v2.1", **features) -> Path:
    """A data set of version 2.1, whose statistics are those of each episode."""
    (folder / "meta").mkdir(parents=True)
    names = [f"joint_{i}.pos" for i in range(dim)]
    feature = {"dtype": "float32", "shape": [dim], "names": names}
    info = {
        "codebase_version": version,
        "fps": 30,
        "features": {"action": feature, "observation.state": feature},
    }
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    lines = []
    for each in range(episodes):
        stats = {"min": [-50.0 - each] * dim, "max": [50.0 + each] * dim, "mean": [float(each)] * dim}
        stats |= {"std": [10.0 + each] * dim, "count": [100 * (each + 1)]}
        lines.append(
            json.dumps({"episode_index": each, "stats": {"action": stats, "observation.state": stats}})
        )
    if episodes:
        (folder / "meta" / "episodes_stats.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_episodes_are_pooled_as_their_frames_would_be(tmp_path):
    rng = np.random.default_rng(0)
    frames = [rng.normal(k, 1 + k, (count, 2)) for k, count in enumerate((10, 300, 7))]
    lines = []
    for part in frames:
        numbers = {"min": part.min(0), "max": part.max(0), "mean": part.mean(0), "std": part.std(0)}
        numbers = {key: value.tolist() for key, value in numbers.items()} | {"count": [len(part)]}
        lines.append(json.dumps({"episode_index": 0, "stats": {"action": numbers}}))
    file = tmp_path / "episodes_stats.jsonl"
    file.write_text("\n".join(lines))
    whole, found = np.concatenate(frames), stats_record(file)["action"]
    for key, value in (
        ("mean", whole.mean(0)),
        ("std", whole.std(0)),
        ("min", whole.min(0)),
        ("max", whole.max(0)),
    ):
        np.testing.assert_allclose(found[key], value, rtol=1e-12)
    assert found["count"] == [317]


@pytest.mark.parametrize("name", ["smolvla-2cam", "pi0-2cam"])
@pytest.mark.parametrize("flag", ["dataset", "stats"])
def test_a_data_set_of_version_2_1_gives_its_statistics(case, tmp_path, name, flag):
    path, given = case(name)
    without_statistics(path)
    folder = data_set(tmp_path / "data", dim=6 if name.startswith("smolvla") else 7)
    file = folder if flag == "dataset" else folder / "meta" / "episodes_stats.jsonl"
    found = Bundle(convert(path, tmp_path / "out.gguf", **{flag: file}, **given)).manifest
    mean = (0 * 100 + 1 * 200 + 2 * 300) / 600
    np.testing.assert_allclose(found.processing.action.stats["mean"], mean, rtol=1e-6)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: expected JSON, got text that is not JSON"),
        ('{"episode_index": 1}', "line 2: not the statistics of an episode"),
        ('{"stats": {"action": {"mean": [0], "std": [1]}}}', "not a table of statistics"),
        (
            '{"stats": {"action": {"mean": [0], "std": [1], "min": [0], "max": [1], "count": [0]}}}',
            "count: expec",
        ),
    ],
)
def test_episodes_that_are_no_statistics(tmp_path, line, told):
    good = '{"stats": {"action": {"mean": [0], "std": [1], "min": [0], "max": [1], "count": [5]}}}'
    file = tmp_path / "episodes_stats.jsonl"
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(ConvertError, match=f"episodes_stats.jsonl: .*{told}|{told}"):
        stats_record(file)


def test_a_data_set_without_statistics_is_named_with_its_version(case, tmp_path):
    path, given = case("smolvla-2cam")
    without_statistics(path)
    message = refused(path, dataset=data_set(tmp_path / "data", episodes=0), **given)
    assert "the data set (version v2.1) has neither meta/stats.json nor meta/episodes_stats.jsonl" in message


# ----------------------------------------------------------------------------- the run's own data set


def test_the_data_set_of_a_run_is_read_inside_of_its_folder_alone(case, tmp_path):
    """Its path comes from a file of somebody else: any other place is one to type."""
    path, given = case("smolvla-2cam")
    run = tmp_path / "run" / "smolvla-2cam-run"
    model = run / "checkpoints" / "000100" / "pretrained_model"
    model.parent.mkdir(parents=True)
    path.rename(model)
    inside = data_set(run / "dataset")
    outside = data_set(tmp_path / "elsewhere")
    for root, names, told in (
        ("dataset", True, "data set dataset in this run's folder"),
        (str(inside), True, "data set dataset in this run's folder"),
        ("../../elsewhere", False, "--dataset ../../elsewhere, on which this run was trained"),
        (str(outside), False, f"--dataset {outside}, on which this run"),
        ("../elsewhere/../smolvla-2cam-run/dataset/../../x", False, "joints have no names"),
        ("my data; rm", False, "--dataset 'my data; rm', on which"),
    ):
        (model / "train_config.json").write_text(json.dumps({"dataset": {"root": root, "repo_id": "me/arm"}}))
        manifest = Bundle(convert(run, tmp_path / "out.gguf", **given)).manifest
        assert bool(manifest.spec.state.names) == names, root
        assert manifest.spec.control_hz == (30 if names else None)
        assert any(told in note for note in manifest.provenance.notes), manifest.provenance.notes
    (model / "train_config.json").write_text(json.dumps({"dataset": {"root": None, "repo_id": "me/arm"}}))
    manifest = Bundle(convert(run, tmp_path / "out.gguf", **given)).manifest
    assert any("--dataset me/arm, on which" in note for note in manifest.provenance.notes)
    without_statistics(model)
    assert "or the data set itself with --dataset me/arm (train_config.json)" in refused(model, **given)


def test_the_data_set_of_a_run_is_found_from_where_the_training_was_started(case, tmp_path, monkeypatch):
    """LeRobot joins a relative path to the working folder of the training."""
    path, given = case("smolvla-2cam")
    work = tmp_path / "work"
    run = work / "outputs" / "train" / "run"
    model = run / "checkpoints" / "000100" / "pretrained_model"
    model.parent.mkdir(parents=True)
    path.rename(model)
    data_set(run / "data" / "arm")
    data_set(work / "outside")
    (elsewhere := tmp_path / "a/b/c/d/e").mkdir(parents=True)
    for root, current, found in (
        ("outputs/train/run/data/arm", tmp_path, True),  # from a folder that contains the run
        ("train/run/data/arm", tmp_path, True),
        ("../../../../../work/outputs/train/run/data/arm", elsewhere, True),
        ("data/arm", tmp_path, True),
        ("outside", work, False),  # outside of the run, although it is in the current folder
        ("outputs/train/run", work, False),
    ):
        monkeypatch.chdir(current)
        (model / "train_config.json").write_text(json.dumps({"dataset": {"root": root}}))
        notes = Bundle(convert(run, tmp_path / "out.gguf", **given)).manifest.provenance.notes
        assert any("data set data/arm in this run's folder" in note for note in notes) == found, (
            root,
            notes,
        )
        assert any(f"--dataset {root}, on which" in note for note in notes) != found, (root, notes)


def test_a_job_that_nobody_named_names_no_policy(case, tmp_path):
    path, given = case("act-2cam")
    for train, name in (
        ({"job_name": "act"}, "act-2cam"),
        ({"job_name": "act", "policy": {"type": "act"}}, "act-2cam"),
        ({"job_name": "aloha_act", "env": {"type": "aloha"}, "policy": {"type": "act"}}, "act-2cam"),
        ({"job_name": "act_kitchen"}, "act_kitchen"),
        ({"job_name": "act", "policy": {"type": "act", "repo_id": "me/pick"}}, "pick"),
    ):
        (path / "train_config.json").write_text(json.dumps(train))
        assert Bundle(convert(path, tmp_path / "out.gguf", **given)).manifest.name == name


# ----------------------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("act-2cam", "act"),
        ("smolvla-2cam", "smolvla"),
        ("diffusion-ddim", "diffusion"),
        ("xvla-ee6d", "xvla"),
        ("vla-jepa", "vla_jepa"),
    ],
)
def test_a_configuration_without_its_type(case, name, kind):
    path, given = case(name)
    record = json.loads((path / "config.json").read_text())
    del record["type"]
    (path / "config.json").write_text(json.dumps(record | {"optimizer_new": 1}))
    message = refused(path, **given)
    assert 'the key "type" is missing' in message
    assert f'"type": "{kind}"' in message


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (
            {"input_features": {}, "something": 1},
            'the key "type" is missing, .* add the key, with one of smolvla',
        ),
        (
            {"hidden_size": 8},
            r'expected the key "type" \(LeRobot\) or "model_type" \(transformers\), got neither',
        ),
        ({"type": "rdt"}, "checkpoint type 'rdt' is not one of smolvla"),
    ],
)
def test_a_configuration_of_nobody(tmp_path, record, told):
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ConvertError, match=told):
        convert(tmp_path, tmp_path / "no.gguf")


def test_unknown_fields_are_named_at_once_and_those_of_training_left_aside(case, tmp_path):
    path, given = case("act-2cam")
    training = {"optimizer_fused": True, "kl_loss_weight": 2.0, "freeze_backbone": True, "vision_lr": 1e-5}
    training |= {"fine_tune_vision_encoder": False, "finetune_head": True}
    edit(path / "config.json", **training)
    manifest = Bundle(convert(path, tmp_path / "out.gguf", **given)).manifest
    note = next(note for note in manifest.provenance.notes if "concern training only" in note)
    assert all(key in note for key in training)
    edit(path / "config.json", head_style="wide", use_memory=True)
    message = refused(path, **given)
    assert 'head_style="wide", use_memory=true are not understood' in message
    assert "--set ignore=head_style,use_memory to skip" in message
    convert(path, tmp_path / "out.gguf", settings={"ignore": "head_style,use_memory"}, **given)


def layouts() -> list[str]:
    """Return the cases whose checkpoint has a config.json, one of each layout."""
    found = [FIXTURES / each.home / each.checkpoint / "config.json" for each in cases().values()]
    return [name for name, file in zip(cases(), found, strict=True) if file.is_file()]


@pytest.mark.parametrize("name", layouts())
def test_no_layout_is_silent_about_an_entry_that_nothing_reads(case, tmp_path, name):
    """LeRobot's layouts and TurboVLA's refuse one that may change what is computed. Others say so: transformers adds
    entries."""
    path, given = case(name)
    out = tmp_path / "out.gguf"
    plain = Bundle(convert(path, out, **given)).manifest.provenance.notes
    assert not any("not understood" in note for note in plain)
    edit(path / "config.json", head_style="wide", optimizer_fused=True)
    record = json.loads((path / "config.json").read_text())
    if record.get("input_features") or record.get("name") == "TurboVLA":
        message = refused(path, **given)
        assert 'head_style="wide" is not understood' in message
        assert "--set ignore=head_style" in message
        return
    notes = Bundle(convert(path, out, **given)).manifest.provenance.notes
    added = [note for note in notes if note not in plain]
    assert any('not understood, and ignored: head_style="wide"; check' in note for note in added), added
    assert any("concern training only" in note and "optimizer_fused" in note for note in added), added


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("openvla-oft", {"image_resize_strategy": "letterbox"}),
        ("openvla-ar", {"timm_override_act_layers": ["quick_gelu", None]}),
        ("bitvla", {"multimodal_projector_bias": False}),
        ("evo1-mint", {"vision_masked": True}),
        ("groot-n17", {"exclude_state": True}),
        ("groot-n16", {"reproject_vision": True}),
    ],
)
def test_an_entry_with_another_value_than_the_implemented_one_is_named(case, tmp_path, name, entry):
    path, given = case(name)
    edit(path / "config.json", **entry)
    notes = Bundle(convert(path, tmp_path / "out.gguf", **given)).manifest.provenance.notes
    ((key, value),) = entry.items()
    assert any(f"not understood, and ignored: {key}={json.dumps(value)}" in note for note in notes), notes


def test_cameras_of_two_sizes(case):
    """LeRobot rejects such a configuration of Diffusion Policy, too."""
    path, given = case("diffusion-ddpm")
    features = json.loads((path / "config.json").read_text())["input_features"]
    (first, *_) = [key for key, each in features.items() if each["type"] == "VISUAL"]
    features[first]["shape"] = [3, 68, 100]
    edit(path / "config.json", input_features=features)
    message = refused(path, **given)
    assert f"expected cameras of one size, got {first.rpartition('.')[2]} 68 x 100" in message
    assert "policies of type diffusion read all cameras at one size" in message
    assert "resized to one size" in message


# ----------------------------------------------------------------------------- folders


@pytest.mark.parametrize("steps", [("10000",), ("500", "10000", "2000"), ("1", "2", "3", "40")])
def test_a_run_of_transformers_is_its_newest_complete_checkpoint(case, tmp_path, monkeypatch, steps):
    """GR00T's experiment folder. A step that training was still writing is passed over."""
    said: list[str] = []
    monkeypatch.setattr("sinew.core.progress._teller", said.append)
    path, given = case("groot-n16")
    run = tmp_path / "pick cube"
    newest = str(max(map(int, steps)))
    for each in (*steps, "best"):
        (run / f"checkpoint-{each}").mkdir(parents=True)
        (run / f"checkpoint-{each}" / "config.json").write_text('{"model_type": "Gr00tN1d6"}')
    message = refused(run, **given)
    assert f"expected a complete checkpoint-STEP in it: checkpoint-{newest} is not complete" in message
    assert "model.safetensors is missing" in message
    shutil.rmtree(run / f"checkpoint-{newest}")
    shutil.copytree(path, run / f"checkpoint-{newest}")
    manifest = Bundle(convert(run, tmp_path / "a.gguf", **given)).manifest
    assert manifest.name == "pick cube"
    assert said == [f"{run}: using checkpoint-{newest}, the newest complete checkpoint of {len(steps)}"]
    later = run / f"checkpoint-{int(newest) + 1}"
    shutil.copytree(path, later)
    shard = max(later.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-64])  # as training has written it so far
    again = Bundle(convert(run, tmp_path / "b.gguf", **given)).manifest
    assert again.provenance.sources == manifest.provenance.sources
    assert (
        f"using checkpoint-{newest}, the newest complete checkpoint of {len(steps) + 1}; {later.name} is not"
        in said[1]
    )
    assert shard.name in refused(later, **given)  # what is given is taken
    step = run / f"checkpoint-{newest}"
    assert Bundle(convert(step, tmp_path / "c.gguf", **given)).manifest.name == "pick cube"


@pytest.mark.parametrize(
    ("base", "told"),
    [
        (
            "lab/no_such_policy",
            "--base lab/no_such_policy: no such folder on this machine, and .*hub",
        ),
        (
            "nothing/here/at/all",
            "--base nothing/here/at/all: not a directory; expected a folder on this machine",
        ),
        ("{file}", "--base .*/config.json: expected a folder, got a file"),
        (
            "{empty}",
            "--base .*/empty: expected a checkpoint, a folder with config.json, got a folder without it",
        ),
    ],
)
def test_a_base_that_is_not_here(case, tmp_path, monkeypatch, base, told):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    path, given = case("smolvla-2cam")
    weights = load_file(path / "model.safetensors")
    name = "model.state_proj.weight"
    rows, columns = weights[name].shape
    (path / "model.safetensors").unlink()
    factors = {"A": np.ones((2, columns), np.float32), "B": np.ones((rows, 2), np.float32)}
    module = f"base_model.model.{name.removesuffix('.weight')}"
    save_file(
        {f"{module}.lora_{k}.weight": v for k, v in factors.items()}, path / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "base_model_name_or_path": "lab/no_such_policy", "revision": "v2", "r": 2}
    (path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "empty").mkdir()
    given_base = base.format(file=path / "config.json", empty=tmp_path / "empty")
    with pytest.raises(ConvertError, match=told):
        convert(path, tmp_path / "no.gguf", base=Path(given_base), **given)
