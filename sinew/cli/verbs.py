"""The verbs of ``sinew``: in which section of its help each stands, where it is, and an example of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verb:
    """A verb, or a group of them.

    summary: its line in the help. example: a command line without ``sinew``. where: module:function in this package; a
    verb without one is the function of its name, in the module of its name. commands: of a group, which has no example.
    """

    summary: str
    example: str = ""
    where: str = ""
    commands: Mapping[str, Verb] = field(default_factory=dict)


FLEET = {"up": Verb("Start the replicas of a configuration, and answer.", "fleet up fleet.yaml", "fleet:up")}
PERF = {
    "run": Verb(
        "Latency by component on one or more machines.",
        "perf run policy.gguf --hardware thor --hardware h200",
        "perf.run:run",
    ),
    "fit": Verb(
        "Does it fit a board's memory?", "perf fit policy.gguf --hardware orin-nano", "perf.machine:fit"
    ),
    "need": Verb(
        "Which machine reaches a rate?", "perf need --rate 10 --model policy.gguf", "perf.need:need"
    ),
    "gains": Verb(
        "What to do first to make it faster.",
        "perf gains policy.gguf --hardware agx-orin",
        "perf.gains:gains",
    ),
    "scenario": Verb(
        "Where to run it: on the robot, on a server, split.",
        "perf scenario policy.gguf --server h200 --device agx-orin --network wifi7",
        "perf.scenario:scenario",
    ),
    "stream": Verb(
        "How fast the loops of a stream turn.",
        "perf stream policy.gguf --camera-hz 30 --hz 480",
        "perf.stream:stream",
    ),
    "fleet": Verb(
        "How many robots one machine serves.",
        "perf fleet policy.gguf --hz 10 --deadline-ms 100",
        "perf.fleet:fleet",
    ),
    "calibrate": Verb(
        "Measure this machine, for predictions.",
        "perf calibrate policy.gguf --threads 4",
        "perf.machine:calibrate",
    ),
    "predict": Verb(
        "What an engine will take on this machine.",
        "perf predict policy.gguf --threads 4",
        "perf.machine:predict",
    ),
    "sync": Verb("What lies between two kernels here.", "perf sync --products 1378", "perf.machine:sync"),
    "tiers": Verb("Seven policies on three boards, printed and traced.", "perf tiers", "perf.tiers:tiers"),
    "machines": Verb("The machines and networks that are known.", "perf machines", "perf.need:machines"),
}
RECORDING = {
    "replay": Verb(
        "Repeat a recording, and compare what comes of it.", "recording replay records/ tcp://127.0.0.1:5555"
    ),
    "mcap": Verb(
        "Write a recording for Foxglove or PlotJuggler.",
        "recording mcap records/ run.mcap --bundle policy.gguf",
        "mcap:mcap",
    ),
    "rrd": Verb(
        "Write a recording for Rerun.", "recording rrd records/ run.rrd --bundle policy.gguf", "mcap:rrd"
    ),
    "dataset": Verb(
        "Write a LeRobot data set of episodes or a recording.",
        "recording dataset records/ build/recorded --hz 10 --bundle policy.gguf",
        "dataset:dataset",
    ),
}
CACHE = {
    "list": Verb("List the checkpoints that were converted.", "hub cache list", "hub_cache:list_entries"),
    "show": Verb(
        "Print what is known of one of them.", "hub cache show pick-cube --verify", "hub_cache:show"
    ),
    "rm": Verb("Remove some of them.", "hub cache rm pick-cube", "hub_cache:remove"),
}
HUB = {
    "pull": Verb(
        "Fetch a policy of the hub, for later.", "hub pull my-lab/pick-cube --out policy.gguf", "hub:pull"
    ),
    "push": Verb(
        "Upload a bundle to the hub, with a card.", "hub push policy.gguf my-lab/pick-cube", "hub:push"
    ),
    "cache": Verb("List and remove checkpoints that were converted on first use.", commands=CACHE),
}

SECTIONS: dict[str, dict[str, Verb]] = {
    "Start": {
        "demo": Verb("Run the trained demo policy in closed loop.", "demo act --episodes 20"),
        "doctor": Verb("Check the installation and this machine.", "doctor policy.gguf"),
    },
    "Policy": {
        "convert": Verb(
            "Turn an upstream checkpoint into one bundle file.",
            "convert outputs/train/pick-cube policy.gguf --control-hz 30",
        ),
        "inspect": Verb("Print what a bundle holds.", "inspect policy.gguf --tensors"),
        "infer": Verb(
            "Run a bundle once on image files and a state.",
            "infer policy.gguf --image camera1=front.jpg --state 0,-45,60,10,0,20 --prompt 'pick up the cube'",
        ),
        "validate": Verb(
            "Prove that an engine computes a bundle as the reference does.",
            "validate policy.gguf --engine onnx --out build/proof",
        ),
        "quantize": Verb(
            "Choose a precision per component and measure what it costs.",
            "quantize policy.gguf --recipe vision=int8,language=int8 --out small.gguf",
        ),
        "prepare": Verb("Make, prove and measure the faster form of a bundle.", "prepare policy.gguf"),
        "export": Verb(
            "Write a folder that runs without torch, or vla.cpp's file.", "export policy.gguf --onnx robot/"
        ),
    },
    "Run": {
        "serve": Verb("Serve a bundle over the network.", "serve policy.gguf --record records/"),
        "run": Verb(
            "Drive a robot with a policy.", "run tcp://127.0.0.1:5555 --robot my_robot:Arm --seconds 60"
        ),
        "top": Verb("Show what a server does, in the terminal.", "top http://127.0.0.1:8000"),
    },
    "Measure": {
        "eval": Verb(
            "Run a policy in closed loop and count successes.", "eval blocks --episodes 100 --out build/eval"
        ),
        "bench": Verb(
            "Time a bundle or a server, stage by stage.", "bench policy.gguf --runs 50 --deadline-ms 100"
        ),
        "leaderboard": Verb(
            "Rank evaluations, with intervals and paired differences.",
            "leaderboard build/eval/blocks build/eval/int8",
        ),
        "perf": Verb("Predict latency, rates and memory on any machine.", commands=PERF),
    },
    "Recordings": {
        "recording": Verb("Repeat recordings; make data sets and viewers' files of them.", commands=RECORDING)
    },
    "Hub": {"hub": Verb("Fetch policies from the hub, upload them, and see what was kept.", commands=HUB)},
    "Expert": {
        "new": Verb("Begin a package of your own that Sinew finds.", "new family my_arm"),
        "fleet": Verb("Serve policies on replicas of a Ray cluster.", commands=FLEET),
    },
}
VERBS = {name: verb for section in SECTIONS.values() for name, verb in section.items()}


def commands(
    verbs: Mapping[str, Verb] = VERBS, group: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Verb]]:
    """Yield everything in a group that does something: its words, as ("perf", "run"), and what it is."""
    for name, verb in verbs.items():
        if verb.commands:
            yield from commands(verb.commands, (*group, name))
        else:
            yield (*group, name), verb


def groups_of(words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Verb]]]:
    """Yield the groups that a command is in, the outermost first: the words of each, and what is in it."""
    inside: Mapping[str, Verb] = VERBS
    for place, word in enumerate(words[:-1], start=1):
        inside = inside[word].commands
        yield words[:place], inside


# What is looked for without the words before it.
WITHIN = {words[-1]: " ".join(words) for words, _ in commands() if words[0] in ("recording", "hub")}
WITHIN |= {"cache": "hub cache", "completion": "--completion", "stream": "run --stream"}


def function_of(words: tuple[str, ...], verb: Verb) -> str:
    """Return the module of a command and the function in it, as ``sinew.cli.serve:serve``."""
    return f"sinew.cli.{verb.where or f'{words[-1]}:{words[-1]}'}"
