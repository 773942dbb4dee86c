"""The commands of ``sinew perf``, which `sinew` reads through the entry point ``sinew.verbs``.

`sinew` reads this table at the start of every command, so this file imports nothing.
"""

from __future__ import annotations

# Words of each command -> (help line, example without ``sinew``, "module:function").
VERBS: dict[str, tuple[str, str, str]] = {
    "perf run": (
        "Latency by component on one or more machines.",
        "perf run policy.gguf --hardware thor --hardware h200",
        "sinew_perf.cli.run:run",
    ),
    "perf fit": (
        "Does it fit a board's memory?",
        "perf fit policy.gguf --hardware orin-nano",
        "sinew_perf.cli.machine:fit",
    ),
    "perf need": (
        "Which machine reaches a rate?",
        "perf need --rate 10 --model policy.gguf",
        "sinew_perf.cli.need:need",
    ),
    "perf gains": (
        "What to do first to make it faster.",
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
        "How fast the loops of a stream turn.",
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
        "What an engine will take on this machine.",
        "perf predict policy.gguf --threads 4",
        "sinew_perf.cli.machine:predict",
    ),
    "perf sync": (
        "What lies between two kernels here.",
        "perf sync --products 1378",
        "sinew_perf.cli.machine:sync",
    ),
    "perf tiers": (
        "Seven policies on three boards, printed and traced.",
        "perf tiers",
        "sinew_perf.cli.tiers:tiers",
    ),
    "perf machines": (
        "The machines and networks that are known.",
        "perf machines",
        "sinew_perf.cli.need:machines",
    ),
}
