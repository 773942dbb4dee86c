"""The commands of this package, which `sinew` reads through the entry point ``sinew.verbs``.

`sinew` reads this table at the start of every command, so this file imports nothing.
"""

from __future__ import annotations

# Key: words of a command. Value: (help line, example without ``sinew``, "module:function").
VERBS: dict[str, tuple[str, str, str]] = {
    "demo": (
        "Run the trained demo policy in closed loop.",
        "demo act --episodes 20",
        "sinew_eval.cli.demo:demo",
    ),
    "trials": (
        "Compare policies on one robot, blind and scene by scene.",
        "trials A.gguf --compare B.gguf --robot pen --scenes 20 --out runs/pen",
        "sinew_eval.cli.trials:trials",
    ),
    "eval": (
        "Run a policy in closed loop and count successes.",
        "eval blocks --episodes 100 --out build/eval",
        "sinew_eval.cli.eval:eval",
    ),
    "leaderboard": (
        "Rank evaluations, with intervals and paired differences.",
        "leaderboard build/eval/blocks build/eval/int8",
        "sinew_eval.cli.leaderboard:leaderboard",
    ),
    "recording dataset": (
        "Write a LeRobot data set of episodes or a recording.",
        "recording dataset records/ build/recorded --hz 10 --bundle policy.gguf",
        "sinew_eval.cli.dataset:dataset",
    ),
}
