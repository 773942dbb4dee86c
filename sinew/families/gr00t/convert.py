"""Convert GR00T checkpoints: N1.5, N1.6 and N1.7 in NVIDIA's layout, and LeRobot fine-tunes of N1.5 and N1.7.

NVIDIA's folder contains config.json, sharded weights and, since N1.6, processor_config.json, statistics.json and
embodiment_id.json. The widths, tokenizer, chat template and image processor of the vision-language model are in another
folder, which the user passes with --vlm:

* N1.7: the hub repository that ``model_name`` names.
* N1.6: the folder ``Eagle-Block2A-2B-v2`` of NVIDIA's package.
* N1.5: the folder ``eagle2_hg_model`` of NVIDIA's package, or the repository of LeRobot's assets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from sinew.convert.conversion import Conversion
from sinew.convert.options import IGNORE_SETTING, SOLVER_STEPS_SETTING, ConvertOptions, Setting
from sinew.families.gr00t import eagle, n17_lerobot, qwen
from sinew.families.gr00t.files import is_lerobot, model_type

NAMES = ("Gr00tN1d7", "Gr00tN1d6", "gr00t_n1_5", "groot")
OPTIONS = ("vlm", "base", "tokenizer", "embodiment")
READERS: Mapping[str, ModuleType] = {"Gr00tN1d7": qwen}
SETTINGS = {
    "ignore": IGNORE_SETTING,
    "solver_steps": SOLVER_STEPS_SETTING,
    "chunk": Setting(int, "number of actions of a chunk that the policy returns", 1),
    "frames": Setting(str, "HEIGHTxWIDTH of the camera frames, for a policy that keeps their aspect ratio"),
    "letterbox": Setting(bool, "true adds black bars to frames that are not square"),
    "center_crop": Setting(
        bool, "N1.5: true crops a frame to 95 % first, as in NVIDIA's data configurations"
    ),
    "transforms": Setting(
        str,
        "the project whose image transforms are used if albumentations is off",
        values=("nvidia", "lerobot"),
    ),
    "embodiment_id": Setting(int, "number of the embodiment, if the files do not contain it", 0),
}


def recognises(path: Path) -> bool:
    """Return True for a directory of any GR00T version."""
    return path.is_dir() and (model_type(path) in NAMES or is_lerobot(path))


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported GR00T.
    """
    if is_lerobot(path) and n17_lerobot.recognises(path):
        return qwen.assemble(n17_lerobot.LeRobotFiles(path, options))
    return READERS.get(str(model_type(path)), eagle).read(path, options)
