"""Find the checkpoint in a folder of a training run, and read facts from LeRobot's data sets that a checkpoint does
not contain. The runs are LeRobot's, or those of transformers' Trainer (which GR00T uses)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sinew.convert.read.files import directory_config, read_json
from sinew.convert.read.safetensors import read_weights, refuse_adapter
from sinew.convert.tokenizer_files import download
from sinew.core import ConvertError
from sinew.core.progress import say

EPISODES = "episodes_stats.jsonl"
STEP = re.compile(r"checkpoint-\d+")  # name of a checkpoint folder of transformers' Trainer
MODEL, ADAPTER = "pretrained_model", "adapter_config.json"


def resolve(path: Path, adapters: bool = False) -> Path:
    """Return the ``pretrained_model`` folder of a training run or of one of its checkpoints.

    For a run, the link ``checkpoints/last`` selects the checkpoint. Without this link, the checkpoint with the
    highest number is selected. For a run of transformers' Trainer, the checkpoint is the ``checkpoint-STEP`` with the
    highest number whose weights are complete, and its name is printed. Other paths are returned unchanged.

    Args:
        path: A training run, one of its checkpoints, or any other path.
        adapters: True if the user has given the base of an adapter, so that an adapter is accepted.

    Raises:
        ConvertError: The run contains no checkpoint, or it is an adapter and ``adapters`` is False.
    """
    if not path.is_dir():
        return path
    if not adapters:
        refuse_adapter(path)
    if (path / "config.json").exists():
        return path
    if any((path / MODEL / name).exists() for name in ("config.json", ADAPTER)):
        return resolve(path / MODEL, adapters)
    checkpoints = path if path.name == "checkpoints" else path / "checkpoints"
    if not checkpoints.is_dir():
        return newest_complete(path)
    numbered = sorted((p for p in checkpoints.iterdir() if p.name.isdecimal()), key=lambda p: int(p.name))
    for folder in (checkpoints / "last", *reversed(numbered)):
        if any((folder / MODEL / name).exists() for name in ("config.json", ADAPTER)):
            return resolve(folder / MODEL, adapters)
    raise ConvertError(
        f"{path}: a training folder without a checkpoint; expected checkpoints/*/{MODEL}/config.json in it"
    )


def newest_complete(run: Path) -> Path:
    """Return the newest complete checkpoint of a run of transformers' Trainer, and print its name. A folder without
    checkpoints is returned unchanged.

    Raises:
        ConvertError: No checkpoint of the run is complete.
    """
    steps = [each for each in run.glob("checkpoint-*") if STEP.fullmatch(each.name)]
    steps = [each for each in steps if (each / "config.json").exists()]
    incomplete: list[str] = []
    for step in sorted(steps, key=lambda each: int(each.name.rpartition("-")[2]), reverse=True):
        try:
            # Reading the headers is enough to detect an incomplete file, because they state the length of the file.
            read_weights(step)
        except ConvertError as error:
            incomplete.append(f"{step.name} is not complete ({error})")
            continue
        passed = f"; {'; '.join(incomplete)}" if incomplete else ""
        say(f"{run}: using {step.name}, the newest complete checkpoint of {len(steps)}{passed}")
        return step
    if incomplete:
        raise ConvertError(f"{run}: expected a complete checkpoint-STEP in it: {'; '.join(incomplete)}")
    return run


def runs_near(path: Path) -> list[Path]:
    """Return up to three training runs in folders above or below ``path``, to suggest them in an error message."""
    above = [each for each in list(path.parents)[:2] if (each / MODEL / "config.json").exists()]
    below = (run.parent for depth in ("", "*/", "*/*/") for run in path.glob(f"{depth}*/checkpoints"))
    return above or list(islice(below, 3))


def name_of(path: Path) -> str:
    """Return a policy's name, from its ``train_config.json`` if it exists, else from its folder.

    The name is the repository of the run, else the job's name. LeRobot's default job name is the type of the policy, so
    a default name is skipped. Folder names such as ``pretrained_model`` and ``checkpoint-STEP`` are replaced by the
    name of the run's folder.
    """
    file, folder = path / "train_config.json", path.resolve()
    record = read_json(file) if file.exists() else {}
    policy = record.get("policy")
    repository = policy.get("repo_id") if isinstance(policy, dict) else None
    kind = policy.get("type") if isinstance(policy, dict) else None
    kind = kind if isinstance(kind, str) else directory_config(path).get("type")
    environment = record.get("env")
    place = environment.get("type") if isinstance(environment, dict) else None
    # LeRobot's default job names (its configs/train.py) only repeat the types of the policy and the environment.
    usual = {kind, f"{place}_{kind}"}
    job = record.get("job_name")
    for name in (repository, None if job in usual else job):
        if isinstance(name, str) and (printable := _printable(name.strip().split("/")[-1])[:100].strip()):
            return printable
    if folder.name == MODEL:
        step = folder.parent
        folder = step.parent.parent if step.parent.name == "checkpoints" else step
    elif STEP.fullmatch(folder.name):
        folder = folder.parent
    return _printable(folder.name) or "policy"


def _printable(text: str) -> str:
    return "".join(each for each in text if each.isprintable())


def _trained_on(path: Path) -> dict[str, Any]:
    """Return the entry about the data set in the ``train_config.json`` of a checkpoint."""
    file = path / "train_config.json"
    dataset = (read_json(file) if file.is_file() else {}).get("dataset")
    return dataset if isinstance(dataset, dict) else {}


def trained_on(path: Path) -> str:
    """Return the data set of a run as text for the user: its folder, else its hub name; "" if the run names none."""
    record = _trained_on(path)
    names = (record.get(key) for key in ("root", "repo_id"))
    return next((_printable(name)[:300] for name in names if isinstance(name, str) and name.strip()), "")


def run_dataset(path: Path) -> Path | None:
    """Return the data set of a run's ``train_config.json`` if it is inside the run's own folder.

    LeRobot's relative paths start in the folder where the training was started, which the run does not name. So a
    path may start in the run's folder, in the current folder, or in a folder that contains the run, in this order.
    A path that leads out of the run's folder is not opened, because it comes from a file and not from the user.
    """
    root = _trained_on(path).get("root")
    folder = run_folder(path)
    if not isinstance(root, str) or not root or "\0" in root:
        return None
    for start in (folder, Path.cwd(), *folder.parents):
        try:
            dataset = (start / root).resolve()
            if dataset == folder or not dataset.is_relative_to(folder):
                continue
            if (dataset / "meta" / "info.json").is_file():
                return dataset
        except (OSError, RuntimeError, ValueError):
            continue
    return None


def run_folder(path: Path) -> Path:
    """Return the folder of the training run that a checkpoint's folder belongs to."""
    folder = path.resolve()
    if folder.name == MODEL:
        step = folder.parent
        folder = step.parent.parent if step.parent.name == "checkpoints" else step
    return folder


@dataclass(frozen=True)
class Dataset:
    """The facts of a LeRobot data set that inference can use.

    Attributes:
        folder: The data set's folder.
        fps: Frames per second; None if the data set does not state them.
        names: Feature -> names of its values.
        version: The version of the data set's format; "" if it is not stated.
    """

    folder: Path
    fps: float | None
    names: dict[str, tuple[str, ...]]
    version: str = ""

    @property
    def stats(self) -> Path | None:
        """Return the file with the data set's statistics. They are of all frames together, or of each episode in
        version 2.1. None if the data set has no such file."""
        files = (self.folder / "meta" / name for name in ("stats.json", EPISODES))
        return next((file for file in files if file.exists()), None)

    @property
    def files(self) -> list[Path]:
        return [file for file in (self.folder / "meta" / "info.json", self.stats) if file]


def read_dataset(path: Path) -> Dataset:
    """Read ``meta/info.json`` of a data set's directory, or of a data set on the hub.

    Raises:
        ConvertError: The file is missing or not valid.
    """
    if not path.exists() and len(path.parts) == 2:
        path = download(
            path.as_posix(),
            f"meta/info.json meta/stats.json meta/{EPISODES}",
            "download the data set and pass its folder",
            "dataset",
        )
    file = path / "meta" / "info.json"
    info = read_json(file)
    fps, features = info.get("fps"), info.get("features")
    if fps is not None and (
        isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 10_000
    ):
        raise ConvertError(f"{file}: fps: expected frames per second, above 0, got {fps!r}")
    if not isinstance(features, dict) or not all(isinstance(entry, dict) for entry in features.values()):
        raise ConvertError(f"{file}: features: expected a table of features, each a JSON object")
    names_of = {key: _names(entry.get("names")) for key, entry in features.items()}
    version = info.get("codebase_version")
    stated = _printable(version)[:20] if isinstance(version, str) else ""
    return Dataset(path, fps, {key: names for key, names in names_of.items() if names}, stated)


def _names(names: Any) -> tuple[str, ...]:
    """Return the names of a vector's values.

    In LeRobot's file they are a list, or a table of lists with keys such as "motors".
    """
    if isinstance(names, dict):
        names = [name for group in names.values() if isinstance(group, list) for name in group]
    flat = names if isinstance(names, list) else []
    return tuple(flat) if all(isinstance(name, str) for name in flat) else ()
