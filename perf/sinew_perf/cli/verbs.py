"""The commands of ``sinew perf``, which `sinew` reads through the entry point ``sinew.verbs``.

`sinew` reads this table at the start of every command, so this file imports nothing.
"""

from __future__ import annotations

# Key: words of a command. Value: (help line, example without ``sinew``, "module:function").
VERBS: dict[str, tuple[str, str, str]] = {
    "perf run": (
        "Latency by component on one or more machines.",
        "perf run policy.gguf --hardware thor --hardware h200",
        "sinew_perf.cli.run:run",
    ),
    "perf fit": (
        "Check whether a policy fits a board's memory.",
        "perf fit policy.gguf --hardware orin-nano",
        "sinew_perf.cli.machine:fit",
    ),
    "perf need": (
        "Which machine reaches a rate?",
        "perf need --rate 10 --model policy.gguf",
        "sinew_perf.cli.need:need",
    ),
    "perf gains": (
        "Rank the changes that make a policy faster.",
        "perf gains policy.gguf --hardware agx-orin",
        "sinew_perf.cli.gains:gains",
    ),
    "perf choose": (
        "Which mode costs least, including its failures?",
        "perf choose --mode robot=runs/robot --mode cloud=runs/cloud --cost cloud=0.02 --failure-cost 5",
        "sinew_perf.cli.choose:choose",
    ),
    "perf scenario": (
        "Where to run it: on the robot, on a server, split.",
        "perf scenario policy.gguf --server h200 --device agx-orin --network wifi7",
        "sinew_perf.cli.scenario:scenario",
    ),
    "perf stream": (
        "Predict the rates of a stream's two loops.",
        "perf stream policy.gguf --camera-hz 30 --hz 480",
        "sinew_perf.cli.stream:stream",
    ),
    "perf fleet": (
        "How many robots one machine serves.",
        "perf fleet policy.gguf --hz 10 --deadline-ms 100",
        "sinew_perf.cli.fleet:fleet",
    ),
    "perf calibrate": (
        "Measure this machine, for predictions.",
        "perf calibrate policy.gguf --threads 4",
        "sinew_perf.cli.machine:calibrate",
    ),
    "perf predict": (
        "Predict the time of an engine on this machine.",
        "perf predict policy.gguf --threads 4",
        "sinew_perf.cli.machine:predict",
    ),
    "perf sync": (
        "Measure the gap between two kernels on this machine.",
        "perf sync --products 1378",
        "sinew_perf.cli.machine:sync",
    ),
    "perf tiers": (
        "Compare published measurements of seven policies with predictions.",
        "perf tiers",
        "sinew_perf.cli.tiers:tiers",
    ),
    "perf machines": (
        "List the known machines and networks.",
        "perf machines",
        "sinew_perf.cli.need:machines",
    ),
}
