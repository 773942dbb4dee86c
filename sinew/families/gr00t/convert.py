"""GR00T checkpoints -> bundles: N1.5, N1.6 and N1.7 in NVIDIA's layout, fine-tunes of N1.5 and N1.7 in LeRobot's.

NVIDIA's folder holds config.json, sharded weights and, from N1.6 on, processor_config.json, statistics.json and
embodiment_id.json. What the vision-language model is made of (widths, tokenizer, chat template, image processor)
lies elsewhere and is given with --vlm: for N1.7 the hub repository that ``model_name`` names, for N1.6 the folder
``Eagle-Block2A-2B-v2`` of NVIDIA's package, for N1.5 its ``eagle2_hg_model`` or the repository of LeRobot's assets.
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
    "chunk": Setting(int, "actions of a chunk that are returned", 1),
    "frames": Setting(str, "HEIGHTxWIDTH of the camera frames, where their aspect ratio is kept"),
    "letterbox": Setting(bool, "black bars around frames that are not square"),
    "center_crop": Setting(bool, "N1.5: crop 95 % of a frame first, as NVIDIA's data configurations do"),
    "transforms": Setting(str, "whose image transforms without albumentations", values=("nvidia", "lerobot")),
    "embodiment_id": Setting(int, "number of the embodiment, where no file says it", 0),
}


def recognises(path: Path) -> bool:
    """Return True for a directory of any GR00T version."""
    return path.is_dir() and (model_type(path) in NAMES or is_lerobot(path))


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint directory, the weights aside. Raises :class:`ConvertError`."""
    if is_lerobot(path) and n17_lerobot.recognises(path):
        return qwen.assemble(n17_lerobot.LeRobotFiles(path, options))
    return READERS.get(str(model_type(path)), eagle).read(path, options)
