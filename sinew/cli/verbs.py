"""The commands of ``sinew``: for each command its section of the help, its module and an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sinew.core import providers


@dataclass(frozen=True)
class Verb:
    """A command, or a group of commands.

    Attributes:
        summary: The command's line in the help.
        example: A command line without ``sinew``. A group has no example.
        where: ``module:function`` in `sinew.cli` or in `package`. "" takes the module and the function with the
            command's name.
        commands: The commands of a group.
        package: The distribution that has the command, if it is not this one. Its entry point ``sinew.verbs`` provides
            the missing fields.
    """

    summary: str
    example: str = ""
    where: str = ""
    commands: Mapping[str, Verb] = field(default_factory=dict)
    package: str = ""

    @property
    def absent(self) -> bool:
        """Return True if the distribution that has the command is not installed."""
        return bool(self.package and not self.where and not self.commands)


FLEET = {
    "up": Verb(
        "Start the replicas of policies, and answer robots with them.", "fleet up fleet.yaml", "fleet:up"
    )
}
RECORDING = {
    "replay": Verb(
        "Repeat a recording, and compare the results.", "recording replay records/ tcp://127.0.0.1:5555"
    ),
    "advise": Verb(
        "Print which settings would have suited a recorded run better.",
        "recording advise run.jsonl --frames frames/ --policy policy.gguf",
    ),
    "mcap": Verb(
        "Write a recording for Foxglove or PlotJuggler.",
        "recording mcap records/ run.mcap --bundle policy.gguf",
        "mcap:mcap",
    ),
    "rrd": Verb(
        "Write a recording for Rerun.", "recording rrd records/ run.rrd --bundle policy.gguf", "mcap:rrd"
    ),
    "dataset": Verb("Write a LeRobot data set of episodes or a recording.", package="sinew-eval"),
}
CACHE = {
    "list": Verb("List the checkpoints that were converted.", "hub cache list", "hub_cache:list_entries"),
    "show": Verb(
        "Print the record of a converted checkpoint.", "hub cache show pick-cube --verify", "hub_cache:show"
    ),
    "rm": Verb("Remove converted checkpoints from the cache.", "hub cache rm pick-cube", "hub_cache:remove"),
}
HUB = {
    "pull": Verb(
        "Download a policy from the hub.", "hub pull my-lab/pick-cube --out policy.gguf", "hub:pull"
    ),
    "push": Verb(
        "Upload a bundle to the hub, with a card.", "hub push policy.gguf my-lab/pick-cube", "hub:push"
    ),
    "cache": Verb("List and remove checkpoints that were converted on first use.", commands=CACHE),
}

OWN: dict[str, dict[str, Verb]] = {
    "Start": {
        "demo": Verb("Run the trained demo policy in closed loop.", package="sinew-eval"),
        "doctor": Verb("Check the installation and this machine.", "doctor policy.gguf"),
    },
    "Policy": {
        "convert": Verb(
            "Turn an upstream checkpoint into one bundle file.",
            "convert outputs/train/pick-cube policy.gguf --control-hz 30",
        ),
        "inspect": Verb("Print what a bundle contains.", "inspect policy.gguf --tensors"),
        "infer": Verb(
            "Run a bundle once on image files and a state.",
            "infer policy.gguf --image camera1=front.jpg --state 0,-45,60,10,0,20 --prompt 'pick up the cube'",
        ),
        "validate": Verb(
            "Verify that an engine computes a bundle as the reference does.",
            "validate policy.gguf --engine onnx --out build/proof",
        ),
        "quantize": Verb(
            "Choose a precision per component and measure what it costs.",
            "quantize policy.gguf --recipe vision=int8,language=int8 --out small.gguf",
        ),
        "skip": Verb(
            "Leave layers out of a policy and measure the change of its actions.",
            "skip policy.gguf --layers vision=1 --out short.gguf",
        ),
        "prepare": Verb("Build, verify and time faster engines for a bundle.", "prepare policy.gguf"),
        "export": Verb(
            "Write a folder that runs without torch, or a file for vla.cpp.",
            "export policy.gguf --onnx robot/",
        ),
    },
    "Run": {
        "serve": Verb("Serve a bundle over the network.", "serve policy.gguf --record records/"),
        "run": Verb(
            "Drive a robot with a policy.", "run tcp://127.0.0.1:5555 --robot my_robot:Arm --seconds 60"
        ),
        "trials": Verb("Compare policies on one robot, blind and scene by scene.", package="sinew-eval"),
    },
    "Measure": {
        "eval": Verb("Run a policy in closed loop and count successes.", package="sinew-eval"),
        "bench": Verb(
            "Time a bundle or a server, stage by stage.", "bench policy.gguf --runs 50 --deadline-ms 100"
        ),
        "leaderboard": Verb("Rank evaluations, with intervals and paired differences.", package="sinew-eval"),
        "perf": Verb("Predict latency, rates and memory on any machine.", package="sinew-perf"),
    },
    "Recordings": {
        "recording": Verb("Repeat recordings, or export them to LeRobot, MCAP or Rerun.", commands=RECORDING)
    },
    "Hub": {"hub": Verb("Download policies from the hub, upload them, and manage the cache.", commands=HUB)},
    "Expert": {
        "new": Verb("Write a package of your own that extends Sinew.", "new family my_arm"),
        "fleet": Verb("Serve policies on replicas of a Ray cluster.", commands=FLEET),
    },
}


def _filled(verbs: Mapping[str, Verb], group: tuple[str, ...] = ()) -> dict[str, Verb]:
    """Return commands with the fields that other distributions provide in their tables."""
    return {name: _of_package(verb, (*group, name)) for name, verb in verbs.items()}


def _of_package(verb: Verb, words: tuple[str, ...]) -> Verb:
    if verb.commands:
        return replace(verb, commands=_filled(verb.commands, words))
    if verb.package not in TABLES:
        return verb
    rows, prefix = TABLES[verb.package], " ".join(words)
    if prefix in rows:
        return Verb(*rows[prefix], package=verb.package)
    within = {name: row for name, row in rows.items() if name.startswith(f"{prefix} ")}
    return replace(
        verb,
        commands={
            name.removeprefix(f"{prefix} "): Verb(*row, package=verb.package) for name, row in within.items()
        },
    )


# Distribution -> its table of commands, for the distributions that are installed.
TABLES: dict[str, Mapping[str, tuple[str, str, str]]] = dict(providers.provided("sinew.verbs"))
SECTIONS = {title: _filled(section) for title, section in OWN.items()}
VERBS = {name: verb for section in SECTIONS.values() for name, verb in section.items()}


def commands(
    verbs: Mapping[str, Verb] = VERBS, group: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Verb]]:
    """Yield the words of each command in a group, such as ("perf", "run"), and the command."""
    for name, verb in verbs.items():
        if verb.absent:
            continue
        if verb.commands:
            yield from commands(verb.commands, (*group, name))
        else:
            yield (*group, name), verb


def groups_of(words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Verb]]]:
    """Yield the words of each group of a command, the outermost group first, and the group's commands."""
    inside: Mapping[str, Verb] = VERBS
    for place, word in enumerate(words[:-1], start=1):
        inside = inside[word].commands
        yield words[:place], inside


# A word that a user may type alone by mistake -> the complete words of its command.
WITHIN = {words[-1]: " ".join(words) for words, _ in commands() if words[0] in ("recording", "hub")}
WITHIN |= {"cache": "hub cache", "completion": "--completion", "stream": "run --stream"}


def absent(words: Sequence[str]) -> tuple[str, Verb] | None:
    """Return the words of a command, and the command, if its distribution is not installed.

    The result is None if the command is installed or unknown.

    Args:
        words: The words of a command line.
    """
    inside: Mapping[str, Verb] = VERBS
    for place, word in enumerate(words, start=1):
        if (verb := inside.get(word)) is None:
            return None
        if verb.absent:
            return " ".join(words[:place]), verb
        inside = verb.commands
    return None


def function_of(words: tuple[str, ...], verb: Verb) -> str:
    """Return the module and the function of a command, such as ``sinew.cli.serve:serve``."""
    if verb.package:
        return verb.where
    return f"sinew.cli.{verb.where or f'{words[-1]}:{words[-1]}'}"
