"""The story of each page: the order of its lines, the server that they need, and the required results."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil

from tests.adapters import ATTENTION, write_folder
from tests.cases import golden_cases
from tests.convert.openpi_layout import write_checkpoint
from tests.convert.sources.fake_hub import fake_hub
from tests.journeys.pages import ROOT, programs
from tests.journeys.walk import LOOPBACK, Ran, Story, Walk
from tests.serve.lerobot_releases import CLIENTS, RELEASES, lerobot_folder

FIXTURES = golden_cases()
ASSETS = ROOT / "sinew" / "assets"
NATIVE = f"tcp://{LOOPBACK}:5555"
GYM = "--robot gym:sinew/Blocks-v0 --episodes 5"
PICTURES = """
from PIL import Image
for number, name in enumerate(("front.jpg", "wrist.png")):
    Image.linear_gradient("L").resize((640, 480)).rotate(90 * number).convert("RGB").save(name)
"""
# The programs on the pages assume these variables: the frames and joints of a robot.
ROBOT = """
import numpy as np
front = wrist = frame1 = frame2 = np.zeros((480, 640, 3), np.uint8)
state = np.zeros(6, np.float32)
observation = {"images": {"camera1": front, "camera2": wrist}, "state": state, "prompt": "pick up the red cube"}
"""
GANTRY = (
    ROBOT.replace("zeros(6,", "zeros(4,") + 'frames = {"front": front, "wrist": wrist}\n'
)  # the policy of the blocks task
OPENPI = """
import numpy as np
frame = np.zeros((180, 320, 3), np.uint8)
observation = {
    "observation/exterior_image_1_left": frame,
    "observation/wrist_image_left": frame,
    "observation/joint_position": np.zeros(7),
    "observation/gripper_position": np.zeros(1),
    "prompt": "put the cup on the plate",
}
"""
PI05 = """
import numpy as np
frame = np.zeros((180, 320, 3), np.uint8)
observation = {
    "images": {"base_0_rgb": frame, "left_wrist_0_rgb": frame},
    "state": np.zeros(7, np.float32),
    "prompt": "clean the table",
}
"""
# A question whose frames have one pixel each: a PNG in base64.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
QUESTION = json.dumps(
    {
        "images": {"base_0_rgb": PIXEL, "left_wrist_0_rgb": PIXEL},
        "state": [0.0] * 7,
        "question": "what is in the gripper?",
        "text_tokens": 16,
    }
)
LIMITS = "[limits]\nlow = -1\nhigh = 1\nvelocity = 20\nstill = 0\n"
ARM = "needs an arm on this port"
SIMULATOR = "needs the Python environment of a simulator, which has gigabytes (for example make sim-aloha)"
NOT_HERE = {
    "pip": "`make installs` checks this line with the package index; the line in README.md made this environment",
    "uv": "`make installs` checks this line with the package index",
    "make env": "makes the environment in which this program runs",
}
ROS = "needs an installed ROS 2"
ONE_MACHINE = (
    '<CycloneDDS><Domain><General><Interfaces><NetworkInterface name="lo" multicast="false"/></Interfaces>'
    "<AllowMulticast>false</AllowMulticast></General><Discovery><ParticipantIndex>auto</ParticipantIndex>"
    '<Peers><Peer address="127.0.0.1"/></Peers></Discovery></Domain></CycloneDDS>'
)
# The changes that a reader makes in the contract, for the robot of tests/ros/twin.py: text in the contract -> its
# topics.
TOPICS = {
    r"prompt: .*": "prompt: put the red block into the left bin",
    r"start: false": "start: true",
    r"topic: /(front|wrist)/image_raw/compressed, type: sensor_msgs/msg/CompressedImage, max_age: 0.2": (
        r"topic: /\1, type: sensor_msgs/msg/Image, max_age: 1.0"
    ),
    r"joints: \[.*?\]": "joints: [x, y, z, grip]",
    r"topic: /arm_controller/joint_trajectory": "topic: /arm",
    r"max_age: 0.2": "max_age: 1.0",
}
# This request has no picture, which the policy requires.
CALL = """
from sinew_ros.dds import Dds
from sinew_ros.service import KIND, NAME
print(Dds().call(NAME, KIND, {"state": [0.0], "prompt": "go"}, 60.0).error)
"""
MANAGE = """
from sinew_ros.dds import Dds
dds = Dds()
for label in ("configure", "activate"):
    asked = {"transition": {"label": label}}
    print(label, dds.call("/sinew_policy/change_state", "lifecycle_msgs/srv/ChangeState", asked, 60.0).success)
"""
# The robot needs a simulator and DDS: the environment of this page, and then the packages in the robot's own
# environment.
TWIN = f"""
import glob, runpy, site, sys
site.addsitedir(glob.glob("robot/lib/python*/site-packages")[0])
sys.path.append("{ROOT}")
sys.argv[1:] = []
runpy.run_module("tests.ros.twin", run_name="__main__")
"""


# ----------------------------------------------------------------------------- required results of a line


def won(ran: Ran, least: int, of: int) -> None:
    """Check that all episodes were played, and that at least ``least`` of them succeeded."""
    assert ran.result["episodes"] == of, ran
    assert ran.result["successes"] >= least, ran


def evaluated(ran: Ran, least: float) -> None:
    """Check that every variant of an evaluation reached at least this success rate."""
    for variant in ran.result["variants"]:
        assert variant["success"] >= least, ran


def played(ran: Ran, episodes: int) -> None:
    """Check that the episodes were played to their end. The policy was trained for seconds and rarely succeeds."""
    (variant,) = ran.result["variants"]
    assert variant["episodes"] == episodes, ran
    assert variant["chunks"] > 0, ran
    assert not ran.result["failed"], ran


def written(walk: Walk, folder: str, episodes: int) -> None:
    """Check that a LeRobot data set with this number of episodes exists."""
    info = json.loads((walk.folder / folder / "meta" / "info.json").read_text())
    assert info["total_episodes"] == episodes, info
    assert info["total_frames"] > episodes, info


def streamed(ran: Ran) -> None:
    """Check that windows arrived during the whole run, that none failed, and that the robot executed commands."""
    assert ran.result["errors"] == 0, ran
    assert ran.result["windows"] > 0, ran
    assert ran.result["executed"] > 0, ran


def drove(ran: Ran) -> None:
    """Check that the robot executed commands and that no request failed."""
    assert ran.result["executed"] > 0, ran
    assert ran.result["failed_requests"] == 0, ran


# ----------------------------------------------------------------------------- files that the pages assume


def arm(walk: Walk) -> None:
    """Write a SmolVLA checkpoint for an arm with six joints and two cameras, its language model files, and pictures."""
    walk.copy(FIXTURES / "smolvla-2cam" / "checkpoint", "my_smolvla")
    walk.copy(FIXTURES / "smolvla-2cam" / "vlm", "SmolVLM2-500M-Video-Instruct")
    walk.run(f"python -c '{PICTURES}'")


def arm_policy(walk: Walk) -> None:
    """Convert that checkpoint to policy.gguf."""
    arm(walk)
    walk.run("sinew convert my_smolvla/ policy.gguf --vlm SmolVLM2-500M-Video-Instruct/")


def blocks(walk: Walk) -> None:
    """Copy the trained policy of the built-in blocks task to policy.gguf."""
    walk.copy(ASSETS / "blocks.gguf", "policy.gguf")


def my_robot(walk: Walk, cameras: tuple[str, ...], dim: int, most: int = 0) -> None:
    """Write my_robot.py: the class in docs/control.md with a simulated camera and bus.

    Args:
        walk: The reader.
        cameras: Names of the cameras.
        dim: Number of joints.
        most: Number of commands after which the robot ends the run. 0: no limit.
    """
    body = programs("docs/control.md")[0]
    arm_class = body[body.index("class Arm") : body.index("report = ")]
    images = ", ".join(f'"{name}": camera.read()' for name in cameras)
    assert '"images": {"front": camera.read()}' in arm_class
    arm_class = arm_class.replace('{"front": camera.read()}', f"{{{images}}}")
    walk.write(
        "my_robot.py",
        f"""
import numpy as np
from sinew_client.control import Stopped

class camera:
    read = staticmethod(lambda: np.full((48, 64, 3), 127, np.uint8))

class bus:
    last = np.zeros({dim}, np.float32)
    positions = staticmethod(lambda: bus.last)

    @staticmethod
    def write(row):
        bus.last = np.asarray(row, np.float32)

{arm_class}

act, acted = Arm.act, []

def ends(arm, row):
    act(arm, row)
    acted.append(row)
    if len(acted) == {most}:
        raise Stopped("enough commands")

Arm.act = ends
""",
    )


def openpi_client(walk: Walk) -> None:
    """Install openpi's client with the commands on the pages."""
    walk.run("python -m pip install -q --no-deps openpi-client")
    walk.run("python -m pip install -q dm-tree msgpack pillow typing-extensions websockets")


# ----------------------------------------------------------------------------- pages


def readme(walk: Walk) -> None:
    why = "`make journeys` made this environment with .[full]"
    walk.leaves("pip install -c constraints.txt ./packages/sinew-client '.[demo]' ./eval", why)
    walk.leaves("pip install -c constraints.txt ./packages/sinew-client '.[full]' ./eval ./perf", why)
    walk.type(
        "sinew demo --episodes 5 --sweep-episodes 0 --no-film", says=(r"closed loop: [45]/5", "95 % interval")
    )
    arm(walk)
    walk.type("sinew convert my_smolvla/ policy.gguf --vlm SmolVLM2-500M-Video-Instruct/")
    with walk.serving("sinew serve policy.gguf", says=("http://127.0.0.1:8000/",)):
        walk.program(0, before=ROBOT, after="assert actions.shape == (50, 6)")
    walk.program(1, before=GANTRY, after="assert chunk.actions.shape == (32, 4)")
    won(walk.type("sinew run blocks --robot gym:sinew/Blocks-v0", adds="--episodes 10"), 8, of=10)
    walk.type("sinew quantize blocks --recipe vision=int8 --out small.gguf", says=("gate", "success"))
    compared = walk.type("sinew eval blocks --compare small.gguf --episodes 100", instead=("100", "20"))
    evaluated(compared, 0.8)
    assert len(compared.result["variants"]) == 2, compared


def bundle(walk: Walk) -> None:
    arm(walk)
    walk.type("sinew convert my_smolvla/ policy.gguf --vlm SmolVLM2-500M-Video-Instruct/")
    walk.type("sinew inspect policy.gguf", says=("camera1", "total"))


def commands(walk: Walk) -> None:
    for folder in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        (walk.folder / folder).mkdir(parents=True)
    walk.type("sinew --completion bash > ~/.local/share/bash-completion/completions/sinew")
    walk.type("sinew --completion zsh > ~/.zfunc/_sinew")
    walk.type("sinew --completion fish > ~/.config/fish/completions/sinew.fish")
    walk.leaves("sinew demo", "`make demo` runs this line")
    walk.type("sinew demo act", adds="--episodes 10 --sweep-episodes 0", says=("10/10 succeeded",))
    evaluated(walk.type("sinew eval blocks --episodes 100", instead=("100", "10")), 0.9)
    walk.run("sinew eval blocks --episodes 2 --out runs/blocks")
    walk.type("sinew leaderboard runs/")
    adapter_files(walk)
    walk.type("sinew convert my_smolvla/ policy.gguf --vlm SmolVLM2-500M-Video-Instruct/")
    assert walk.type("sinew inspect policy.gguf", says=("camera1", "6 values")).result["architecture"]
    walk.program(0, before=ROBOT, after="assert action.shape == (6,) and 0 < smaller.record.error < 0.05")
    chunk = walk.type(
        "sinew infer policy.gguf --image camera1=front.jpg --image camera2=wrist.png"
        ' --state 0,-45,60,10,0,20 --prompt "pick up the red cube"'
    )
    assert len(chunk.result["actions"]) == 50, chunk
    walk.type("sinew bench policy.gguf")
    assert walk.type("sinew doctor policy.gguf").result["ok"]
    my_robot(walk, ("camera1", "camera2"), 6)
    walk.type("sinew doctor policy.gguf --observe my_robot:Arm", status=1, says=("one colour",))
    assert walk.type("sinew validate policy.gguf").result["passed"]
    walk.type("sinew perf run policy.gguf --hardware h200")
    walk.type("sinew quantize policy.gguf --recipe vision=int8,language=int8 --out small.gguf")
    assert walk.type("sinew prepare policy.gguf").result["engine"] == "onnx"
    walk.type("sinew export policy.gguf --onnx robot/")
    walk.type("sinew new family my_arm", says=("my-arm/",))
    with walk.serving("sinew serve policy.gguf", adds="--record records/"):
        walk.type("sinew bench tcp://127.0.0.1:5555")
        drove(
            walk.type(
                "sinew run tcp://127.0.0.1:5555 --robot my_robot:Arm --hz 30",
                adds="--prompt 'stack the cups' --seconds 3",
            )
        )
        drove(
            walk.type(
                "sinew run tcp://127.0.0.1:5555 --robot my_robot:Arm --set stale=1 --set report=false",
                adds="--prompt 'stack the cups' --hz 30 --seconds 3",
            )
        )
    with walk.serving("sinew serve --replay records/"):
        walk.type("sinew bench tcp://127.0.0.1:5555")
    walk.copy(walk.folder / "policy.gguf", "base.gguf")
    walk.run(
        "sinew convert kitchen/ kitchen.gguf --base my_smolvla/ --no-merge --vlm SmolVLM2-500M-Video-Instruct/"
    )
    with walk.serving("sinew serve base.gguf --adapter kitchen=kitchen.gguf"):
        pass


def quick_start(walk: Walk) -> None:
    walk.leaves(
        "pip install -c constraints.txt ./packages/sinew-client '.[full]' ./eval ./perf",
        "made the environment in which this program runs",
    )
    walk.leaves("uv pip install -c constraints.txt '.[full]'", NOT_HERE["uv"])
    won(walk.type("sinew run blocks --robot gym:sinew/Blocks-v0 --episodes 3"), 1, of=3)
    arm(walk)
    walk.type("sinew convert my_smolvla/ policy.gguf --vlm SmolVLM2-500M-Video-Instruct/")
    walk.type("sinew inspect policy.gguf", says=("camera1", "camera2", "6 values"))
    assert walk.type("sinew validate policy.gguf", says=("passes over",)).result["passed"]
    with walk.serving(
        "sinew serve policy.gguf", says=("native at tcp://127.0.0.1:5555", "openpi at .*:8000")
    ):
        drove(
            walk.type(
                'sinew run tcp://127.0.0.1:5555 --robot dry --prompt "pick up the cube" --hz 30 --seconds 10',
                instead=("10", "3"),
            )
        )
        walk.program(0, before=ROBOT, after="assert chunk.actions.shape == (50, 6)")
        walk.type("sinew bench tcp://127.0.0.1:5555", says=("p50", "p99"))
    walk.type("sinew bench policy.gguf", says=("vision", "head"))
    evaluated(walk.type("sinew eval blocks --episodes 20"), 0.8)


def adding_a_model(walk: Walk) -> None:
    # tests/cli/test_documented_commands.py compares the code on the page with the template, whose package runs here.
    walk.walked |= {f"program {number}" for number in range(len(programs(walk.page)))}
    walk.type(
        "sinew new family my_arm", says=("the family my_arm. It already works. To install and test it, run:",)
    )
    # this environment does not contain the new family
    into = "python -m pip install -q --disable-pip-version-check --target site"
    walk.type(
        "pip install -e './my-arm[test]'", instead=("pip install -e './my-arm[test]'", f"{into} pytest")
    )
    walk.run(f"{into} --no-deps ./my-arm")
    site = str(walk.folder / "site")
    walk.environment["PYTHONPATH"] = ":".join(filter(None, (site, walk.environment.get("PYTHONPATH", ""))))
    walk.type("python -m pytest my-arm", says=("6 passed",))
    walk.type("python -m my_arm.checkpoint random/")
    walk.type("sinew convert random/ my_arm.gguf")
    walk.type("sinew inspect my_arm.gguf --plan", says=("pack-qkv +applied",))
    assert walk.type("sinew validate my_arm.gguf --engine plan").result["passed"]
    assert walk.type("sinew validate my_arm.gguf --engine onnx").result["passed"]
    assert walk.type("sinew validate my_arm.gguf --engine cuda --device cpu").result["passed"]
    walk.type("sinew bench my_arm.gguf")
    walk.type("sinew perf run my_arm.gguf")
    walk.type("sinew perf fit my_arm.gguf")
    walk.type("sinew quantize my_arm.gguf --recipe head=int8 --out small.gguf")
    walk.type("sinew export my_arm.gguf --onnx folder")
    with walk.serving("sinew serve my_arm.gguf --wire native --wire openpi"):
        walk.run(f"sinew bench {NATIVE} --runs 3")


def control(walk: Walk) -> None:
    blocks(walk)
    my_robot(walk, ("front", "wrist"), 4)
    walk.type("sinew doctor policy.gguf --observe my_robot:Arm", status=1, says=("one colour",))
    walk.write("arm.toml", LIMITS)
    with walk.server("sinew serve policy.gguf"):
        drove(
            walk.type(
                'sinew run tcp://server:5555 --robot dry --prompt "stack the cups" --seconds 10',
                instead=("10", "3"),
            )
        )
        won(
            walk.type(
                "sinew run tcp://server:5555 --robot gym:sinew/Blocks-v0",
                adds="--episodes 10",
            ),
            8,
            of=10,
        )
        drove(
            walk.type(
                "sinew run tcp://server:5555 --robot my_robot:Arm --limits arm.toml --record run.jsonl",
                adds="--prompt 'stack the cups' --seconds 3",
            )
        )
        walk.leaves(
            "sinew run tcp://server:5555 --robot lerobot:so101_follower --robot-options"
            """ '{"port": "/dev/ttyACM0"}'""",
            ARM,
        )
        walk.program(
            0,
            ('{"front": camera.read()}', '{"front": camera.read(), "wrist": camera.read()}'),
            ("seconds=60", "seconds=3"),
            before="import my_robot; from my_robot import bus, camera\n",
            after="assert report.executed > 0, report",
        )
        walk.program(
            1,
            ("report = run.run()", "report = run.run(90)"),
            before="from my_robot import Arm",
            after="assert report.executed > 0, report",
        )
    walk.type("sinew recording replay run.jsonl", says=("0 differ",))


def late_answers(walk: Walk) -> None:
    evaluated(
        walk.type(
            "sinew eval blocks --latency 200ms --sweep handover=freeze,aligned+halt:1.5 --replan 8 --episodes 10",
        ),
        0.8,
    )
    won(walk.type("sinew run blocks --robot blocks --episodes 2 --handover aligned+halt:1.5"), 1, of=2)


def limits(walk: Walk) -> None:
    walk.write("arm.toml", LIMITS)
    won(
        walk.type("sinew run blocks --robot blocks --episodes 2 --limits arm.toml --set filter=lowpass:3"),
        1,
        of=2,
    )
    (page,) = programs(walk.page, "toml")
    walk.write("joints.toml", page)  # the file has three numbers, which do not fit this policy
    walk.run("sinew run blocks --robot blocks --limits joints.toml", status=1, says=("expected 4 numbers",))


def kinematics(walk: Walk) -> None:
    blocks(walk)
    drove(
        walk.type(
            "sinew run policy.gguf --robot dry --set kinematics=examples/robots/ur5e.urdf --prompt "
            """"stack the cups" --seconds 3""",
            says=("6 joints from base to tool0", "rotation keep"),
        )
    )
    walk.leaves(
        "sinew doctor policy.gguf --observe my_robot:Arm --set kinematics=arm.urdf --set"
        """ kinematics_options='{"tip": "fingertips", "base": "table"}'""",
        "needs an arm; tests/control/test_kinematics.py runs this line",
    )


def takeover(walk: Walk) -> None:
    blocks(walk)
    my_robot(walk, ("front", "wrist"), 4)
    found = walk.type(
        "sinew run policy.gguf --robot blocks --episodes 20 --takeover expert --set"
        """ takeover_options='{"after": 40}' --frames frames/""",
        instead=("20", "3"),
    )
    assert found.result["handed"]["to_human"], found
    walk.type(
        "sinew recording dataset frames/ fixes/ --corrections --hz 20 --bundle policy.gguf",
        says=("episodes",),
    )
    walk.leaves(
        "sinew run tcp://server:5555 --robot lerobot:so101_follower --takeover lerobot:so101_leader --set"
        " align=5 --frames frames/",
        ARM,
    )
    with walk.server("sinew serve policy.gguf"):
        walk.program(
            0,
            (
                "report = run.run()",
                "[each.take_over() for each in run.loop.listeners if isinstance(each, Takeover)]; report = run.run(40)",
            ),
            before="from my_robot import Arm\nclass my_leader:\n    read = staticmethod(lambda: [0.0] * 4)\n",
            after="assert report.handed['to_human'] == 1, report",
        )


def guidance(walk: Walk) -> None:
    ran = walk.type("sinew run blocks-rtc --robot blocks --episodes 2 --handover rtc")
    assert ran.result["episodes"] == 2, ran
    walk.copy(FIXTURES / "pi05-2cam" / "checkpoint", "checkpoint")
    walk.copy(FIXTURES / "pi05-2cam" / "arch.json", "arch.json")
    walk.type(
        "sinew convert checkpoint recap.gguf --set advantage=positive,negative --set usual_advantage=positive",
        adds="--arch arch.json",  # the checkpoint has miniature widths, which have no name
    )
    with walk.serving("sinew serve recap.gguf"):
        drove(
            walk.type(
                'sinew run tcp://server:5555 --robot dry --prompt "stack the cups" --hz 20 --seconds 10'
                " --set advantage=positive --set guidance_scale=1.5",
                instead=("10", "3"),
            )
        )


def health_of(ran: Ran) -> dict:
    """Return the last health report in the events of a server."""
    return json.loads(re.findall(r"^event: health\ndata: (.*)$", ran.text, re.MULTILINE)[-1])


def dashboard(walk: Walk) -> None:
    with walk.serving("sinew serve blocks --wire native --wire http"):
        won(walk.type("sinew run tcp://127.0.0.1:5555 --robot blocks --episodes 3"), 1, of=3)
        # The server sends events until curl ends, with status 28 after 3 seconds.
        seen = walk.type("curl --no-buffer http://127.0.0.1:8000/v1/events", adds="--max-time 3", status=28)
        (robot,) = health_of(seen)["robots"]
        assert (robot["name"], robot["state"], robot["episodes"]) == ("blocks", "ended", 3), robot
    if not walk.has("rerun"):
        for line in [each for each in walk.lines if "rerun" in each or " rrd " in each]:
            walk.leaves(
                line, "needs Rerun (the extra `rerun`, 500 MB); pass --python with an environment that has it"
            )
        return
    blocks(walk)
    # the viewer has no window here, and it is ended with a signal
    viewer = walk.meant(
        "rerun --bind 127.0.0.1 &", ("rerun --bind 127.0.0.1 &", "rerun --serve-grpc --bind 127.0.0.1")
    )
    ask = f"sinew bench {NATIVE} --runs 5"
    with (
        walk.beside(f"""bash -c '{viewer} & trap "kill $!; exit 0" TERM; wait'"""),
        walk.serving(
            "sinew serve policy.gguf --rerun rerun+http://127.0.0.1:9876/proxy", adds="--record records/"
        ),
    ):
        walk.run(ask)
        health = health_of(walk.run("curl -N -m 3 http://127.0.0.1:8000/v1/events", status=28))
        assert health["rerun"]["written"] >= 5, health
        assert health["rerun"]["dropped"] == 0, health
    with walk.serving("sinew serve policy.gguf --rerun run.rrd"):
        walk.run(ask)
    again = walk.type(
        "sinew eval blocks --episodes 3 --rerun run.rrd", status=1, says=("run.rrd: the file already exists",)
    )
    (walk.folder / "run.rrd").rename(walk.folder / "served.rrd")
    evaluated(walk.run(again.line), 0.5)
    (walk.folder / "run.rrd").rename(walk.folder / "played.rrd")
    counted = walk.type("sinew recording rrd records/ run.rrd --bundle policy.gguf").result["entries"]
    assert counted["camera/front"] >= 5, counted
    for name in ("served", "played"):
        assert (walk.folder / f"{name}.rrd").stat().st_size > 10_000, name


def deployment(walk: Walk) -> None:
    """Check the deployment without root and systemd, in this folder: the installation, the settings, and the unit's
    command."""
    walk.copy(ASSETS / "blocks.gguf", "policy.gguf")
    # `make roles` runs the page's role. The role of the client uses the same script and takes seconds.
    walk.type(
        "sudo docker/install.sh cpu /opt/sinew",
        instead=("sudo docker/install.sh cpu /opt/sinew", f"{ROOT}/docker/install.sh client opt/sinew"),
    )
    walk.run("opt/sinew/bin/python -c 'import sinew_client; assert sinew_client.Client'")
    walk.type(
        "sudo install -D -m 644 policy.gguf /var/lib/sinew/policy.gguf",
        instead=("sudo install -D -m 644 policy.gguf /", "install -D -m 644 policy.gguf "),
    )
    walk.type(
        'sudo install -D -m 600 /dev/stdin /etc/sinew/sinew.env <<< "SINEW_SERVE_WIRE=native openpi"',
        instead=("sudo install -D -m 600 /dev/stdin /", "install -D -m 600 /dev/stdin "),
    )
    assert (walk.folder / "etc/sinew/sinew.env").stat().st_mode & 0o777 == 0o600
    walk.leaves(
        "sudo install -m 644 docker/sinew.service /etc/systemd/system/ && sudo systemctl enable --now sinew",
        "needs systemd; the story starts the server of the unit below, with the same settings",
    )
    unit = (ROOT / "docker" / "sinew.service").read_text()
    (start,) = re.findall(r"^ExecStart=/opt/sinew/bin/(sinew .*)$", unit, re.MULTILINE)
    (settings,) = re.findall(r"^EnvironmentFile=-/(.*)$", unit, re.MULTILINE)
    walk.environment |= dict([(walk.folder / settings).read_text().strip().split("=", 1)])
    with walk.server(
        start.replace("/var/", "var/"), says=("native at tcp://127.0.0.1:5555", "openpi at .*:8000")
    ):
        walk.type("curl http://127.0.0.1:8000/healthz", says=("OK",))
        walk.run(f"sinew bench {NATIVE} --runs 3")
    (settings,) = programs("docs/deployment.md", "toml")
    walk.write("robot.toml", settings)
    del walk.environment["SINEW_SERVE_WIRE"]
    with walk.server("sinew serve policy.gguf --config robot.toml", says=("native at tcp://127.0.0.1:5555",)):
        pass
    walk.run("sinew perf run policy.gguf --config robot.toml", says=("H200 SXM",))
    walk.run(
        'SINEW_PERF_RUN_HARDWARE="h200 thor" sinew perf run policy.gguf', says=("H200 SXM", "Jetson Thor")
    )
    for line in walk.lines:
        if line.startswith("docker "):
            walk.leaves(
                line, "needs a Docker daemon; tests/test_deployment.py checks the names in these files"
            )


def install(walk: Walk) -> None:
    walk.run("python -m venv robot")
    walk.type("pip install ./packages/sinew-client", instead=("pip", "robot/bin/pip"))
    walk.run(
        """robot/bin/python -c 'import sinew_client, sys; assert "torch" not in sys.modules; sinew_client.Client'"""
    )
    for line in walk.lines:
        if line not in walk.walked:
            walk.leaves(line, next(why for start, why in NOT_HERE.items() if line.startswith(start)))


def engines(walk: Walk) -> None:
    arm_policy(walk)
    assert walk.type(
        "sinew prepare policy.gguf", says=("proved: ", "; --engine auto takes onnx from now on")
    ).result["seconds"]
    with walk.serving("sinew serve policy.gguf --reuse", adds="--no-prepare"):
        walk.write(
            "still.py",
            f"""
import numpy as np
from sinew_client import Client

with Client("{NATIVE}", timeout=120) as client:
    spec = client.spec
    frames = {{c.name: np.full((c.height, c.width, 3), 90, np.uint8) for c in spec.cameras}}
    seen = {{"images": frames, "state": np.zeros(spec.state.dim), "prompt": "wait", "seed": 1}}
    first, second = client.infer(seen), client.infer(seen)
    assert (second.timing.reused_views, second.timing.reused_prefix) == (len(frames), True), second.timing
    assert not first.timing.reused_views
    assert np.array_equal(first.actions, second.actions)
""",
        )
        walk.run("python still.py")
    with walk.serving("sinew serve blocks --reuse", adds="--no-prepare"):
        refreshed = walk.type(
            "sinew run tcp://127.0.0.1:5555 --robot gym:sinew/Blocks-v0 --replan 4 --episodes 3"
            " --set refresh=front:every:4"
        ).result["refresh"]
        assert re.fullmatch(r"front: an older frame in [1-9]\d* of \d+ requests", refreshed), refreshed
        walk.type(
            "sinew bench tcp://127.0.0.1:5555 --idle 0,1,10", adds="--runs 3", says=("of the steady p50",)
        )
    walk.type("sinew bench policy.gguf --idle 0,1,10", adds="--runs 3", says=("of the steady p50",))
    walk.leaves("sinew serve policy.gguf --device cuda --engine cuda", "needs a GPU; make gpu tests this")
    walk.type("sinew export policy.gguf --onnx robot/")
    with walk.serving("sinew serve robot/"):
        walk.run(f"sinew bench {NATIVE} --runs 3")
    walk.type(
        "sinew quantize policy.gguf --recipe vision=int8,language=int8,head=fp32 --out policy-int8.gguf"
    )


def suites(walk: Walk) -> None:
    """Check the suites without their interpreters, which need gigabytes. Each command must name the missing
    interpreter."""
    blocks(walk)
    walk.environment |= {
        "SINEW_SIMS": str(walk.folder / "sims")
    }  # the interpreters of this checkout would play for hours
    walk.leaves("sinew eval --setup aloha", f"{SIMULATOR}; eval/tests use the environments that exist")
    for line, name in (
        ("sinew eval BUNDLE --env gym_aloha/AlohaTransferCube-v0", "aloha"),
        ("sinew eval BUNDLE --suite libero --episodes 2000 --out runs/libero", "libero"),
        ("sinew eval tcp://gpu-machine:5555 --suite metaworld_mt50", "metaworld"),
        ("sinew eval expert --suite metaworld_mt50 --replan 1", "metaworld"),
        ("sinew eval expert --suite libero_object --replan 1", "libero"),
    ):
        walk.type(
            line,
            instead=("BUNDLE", "policy.gguf") if "BUNDLE" in line else None,
            status=1,
            says=(f"error: {name} is not installed; run `sinew eval --setup {name}`",),
        )
    benchmarks = "eval/tests/test_vla_eval.py runs a benchmark, and a built-in task with a model server"
    walk.leaves(
        "sinew eval policy.gguf --suite vla-eval/libero --interpreter sims/bin/python --env-options"
        """ '{"params": {"suite": "libero_goal"}}'""",
        benchmarks,
    )
    walk.leaves(
        "sinew eval policy.gguf --env vla-eval/my_benchmark:Mine --interpreter sims/bin/python --env-options"
        """ '{"control_hz": 20}'""",
        benchmarks,
    )
    walk.leaves("sinew eval vla-eval://gpu-machine:8000 --env sinew/Blocks-v0", benchmarks)


def evaluation(walk: Walk) -> None:
    blocks(walk)
    evaluated(walk.type("sinew eval blocks --episodes 10"), 0.8)
    evaluated(walk.type("sinew eval policy.gguf --episodes 200", instead=("200", "10")), 0.8)
    with walk.server("sinew serve policy.gguf"):
        evaluated(walk.type("sinew eval tcp://127.0.0.1:5555 --episodes 200", instead=("200", "10")), 0.8)
    evaluated(walk.type("sinew eval expert --env sinew/Pen-v0", adds="--episodes 20"), 0.9)
    evaluated(walk.type("sinew eval blocks --episodes 8 --shards 2 --out runs/blocks"), 0.8)
    evaluated(walk.type("sinew eval policy.gguf --gate blocks --episodes 20", says=("passes",)), 0.8)
    walk.program(0, after="assert result.success >= 0.9")
    walk.program(1, before="import numpy as np\nimport sinew_client", after="assert infer")


def policies_compared(walk: Walk) -> None:
    for name in ("A.gguf", "B.gguf"):
        walk.copy(ASSETS / "blocks.gguf", name)
    compared = walk.type(
        "sinew eval A.gguf --compare B.gguf --compare dtype=bf16 --episodes 100", instead=("100", "4")
    )
    evaluated(compared, 0.7)
    assert len(compared.result["variants"]) == 3, compared
    walk.type("sinew eval A.gguf --sweep replan=8,full --episodes 6 --out runs/replan")
    assert (walk.folder / "runs" / "replan" / "success_replan.png").exists()
    walk.type(
        "sinew eval blocks --latency 200ms --sweep handover=freeze,naive --episodes 10", instead=("10", "2")
    )


def evidence(walk: Walk) -> None:
    for name in ("A.gguf", "B.gguf"):
        walk.copy(ASSETS / "blocks.gguf", name)
    walk.type("sinew eval blocks --compare dtype=bf16 --episodes 4 --out runs/a-and-b --films 1")
    equal = ("equal: every command of every episode",)
    walk.type("sinew eval --repeat runs/a-and-b/report.html", says=equal)
    walk.run("sinew eval A.gguf --compare B.gguf --episodes 2 --out two")
    walk.type(
        "sinew eval A.gguf --compare B.gguf --repeat report.json",
        instead=("report.json", "two/report.json"),
        says=equal,
    )
    walk.leaves(
        "sinew eval A.gguf --env lab.tasks:Reach --repeat report.json",
        "needs a report of the user's own environment; eval/tests/test_outside.py tests this",
    )
    walk.type("sinew leaderboard runs/ --out board.html", says=("SmolVLM2",))


def farm(walk: Walk) -> None:
    evaluated(walk.type("sinew eval blocks --episodes 8 --shards 2 --out runs/blocks"), 0.8)
    walk.leaves("sinew eval --join runs/blocks --shards 8", "eval/tests/test_farm.py joins a run in progress")
    evaluated(
        walk.type(
            "sinew eval blocks --episodes 2000 --shards 8 --out runs/far --listen 0.0.0.0:7777",
            instead=(
                "2000 --shards 8 --out runs/far --listen 0.0.0.0:7777",
                "6 --out runs/far --listen 127.0.0.1:0",
            ),
            says=("sinew eval --join http://127.0.0.1:",),
        ),
        0.6,
    )
    walk.leaves(
        "sinew eval --join http://head:7777 --shards 8", "eval/tests/test_farm.py joins a run by its address"
    )
    walk.environment |= {
        "RAY_ADDRESS": f"{LOOPBACK}:9"
    }  # no cluster answers at this address, or Ray is not installed
    walk.type(
        "sinew eval blocks --episodes 2000 --shards 6 --hosts ray --out runs/ray",
        status=1,
        says=("error: --hosts",),
    )
    evaluated(walk.type("sinew eval blocks --episodes 8 --shards 2 --batch 4"), 0.8)


def learning(walk: Walk) -> None:
    blocks(walk)
    with walk.server(
        "sinew serve policy.gguf --record records/"
    ):  # the robot sends a request in every second step
        walk.run(
            f"sinew run {NATIVE} --robot dry --prompt 'move the red cube' --hz 20 --replan 1 --seconds 4"
        )
    walk.program(
        0, after="assert policy.version == 1\nsinew.load('tuned.gguf').infer(policy.dummy_observation())"
    )
    walk.type("sinew recording dataset blocks build/episodes --episodes 2 --successes")
    written(walk, "build/episodes", 2)
    walk.type(
        "sinew recording dataset expert build/demonstrations --env sinew/Blocks-v0 --episodes 50",
        instead=("50", "3"),
    )
    written(walk, "build/demonstrations", 3)
    walk.environment |= {
        "SINEW_SIMS": str(walk.folder / "sims")
    }  # the interpreters of this checkout would play
    walk.type(
        "sinew recording dataset expert build/libero --env libero_object/3",
        status=1,
        says=("error: libero is not installed; run `sinew eval --setup libero`",),
    )
    walk.type("sinew recording dataset records/ build/recorded --hz 10 --bundle policy.gguf")
    written(walk, "build/recorded", 1)


def trials(walk: Walk) -> None:
    for name in ("A.gguf", "B.gguf"):
        walk.copy(ASSETS / "pen.gguf", name)
    walk.type(
        "sinew trials A.gguf --compare B.gguf --robot pen --scenes 2 --out runs/pen",
        says=("2 scenes; 2 were played. The plan was kept.",),
    )
    walk.leaves(
        "sinew trials tcp://server:5555 --robot my_robot:Arm --scenes 20 --seconds 60 --out runs/arm --frames frames/",
        "needs a person at the keyboard; eval/tests/test_trials.py simulates the keyboard",
    )


def batches(walk: Walk) -> None:
    blocks(walk)
    with walk.serving("sinew serve policy.gguf --max-batch auto"):
        won(
            walk.type(
                "sinew run tcp://10.0.0.5:5555,tcp://10.0.0.6:5555 --robot ...",
                instead=("--robot ...", GYM),
            ),
            # the load of this machine decides in real time, so one success is enough; README.md requires eight of ten
            1,
            of=5,
        )
        walk.program(0, after="assert client.metadata()['policy']['name'] == 'blocks'")
    walk.type("sinew perf calibrate policy.gguf --engine plan")
    walk.type("sinew perf fleet policy.gguf --hz 10 --deadline-ms 100", says=("robots at 10 Hz",))


def several_policies(walk: Walk) -> None:
    for name in ("a.gguf", "b.gguf", "c.gguf"):
        walk.copy(ASSETS / "blocks.gguf", name)
    walk.copy(ASSETS / "blocks-rtc.gguf", "tiny.gguf")
    walk.write("key", "a key of twenty letters")
    with walk.serving(
        "sinew serve a.gguf --policy b=b.gguf --policy tiny=org/name --wire native --wire http --api-key-file key",
        instead=("org/name", "tiny.gguf"),
    ):
        walk.type(
            """curl -H "X-API-Key: $(cat key)" -X PUT -d '{"source": "c.gguf"}' http://127.0.0.1:8000/v1/policies/b""",
            says=('"name": *"b"',),
        )
        walk.type(
            """curl -H "X-API-Key: $(cat key)" -X PUT -d '{"source": "c.gguf", "accept": ["units", "control_hz"]}' http://127.0.0.1:8000/v1/policies/b""",
            says=('"name": *"b"',),
        )
        walk.type('curl -H "X-API-Key: $(cat key)" -X DELETE http://127.0.0.1:8000/v1/policies/b')


def edge_and_cloud(walk: Walk) -> None:
    blocks(walk)
    walk.copy(ASSETS / "blocks-rtc.gguf", "tiny.gguf")
    with walk.server("sinew serve policy.gguf --max-batch auto"):
        won(
            walk.type(
                "sinew run tcp://cloud:5555 --set edge_adapter=sinew/assets/blocks-edge.safetensors"
                " --config examples/modes/cloud-adapter.toml ...",
                instead=("...", GYM),
            ),
            1,  # one success is enough, because the adapter refines answers that are seconds late (76 of 100 succeed)
            of=5,
        )
        assisted = walk.type(
            "sinew run tiny.gguf --config examples/modes/assist.toml --set assist=tcp://cloud:5555 --robot ...",
            instead=("--robot ...", GYM),
        )
        won(
            assisted, 1, of=5
        )  # on a busy machine, the time limit of the mode may pass; the loop then holds and continues
        assert assisted.result["assist"]["answered"] > 0, assisted
        assert "chunks from the far policy" in assisted.text, assisted
    with walk.serving("sinew serve policy.gguf --engine plan --context bf16 --context int8"):
        won(
            walk.type(
                "sinew run policy.gguf --config examples/modes/split.toml --set split=tcp://box:5555/context.bf16"
                " --robot ...",
                instead=("--robot ...", GYM),
            ),
            1,
            of=5,
        )
        walk.program(
            0,
            before=ROBOT.replace("camera1", "front")
            .replace("camera2", "wrist")
            .replace("zeros(6", "zeros(4"),
            after="assert robot.infer(observation).actions.shape == (32, 4)",
        )
    evaluated(
        walk.type(
            "sinew eval blocks --latency 2000ms --edge-adapter sinew/assets/blocks-edge.safetensors",
            adds="--episodes 10",
        ),
        0.3,
    )


def cluster(walk: Walk) -> None:
    """Run the page's configuration on a Ray cluster of this machine, with fewer replicas."""
    line = "sinew fleet up fleet.yaml --wire native --wire http --api-key-file key"
    if not walk.has("ray"):
        walk.leaves(
            "sinew fleet up fleet.yaml --wire native --wire http --api-key-file key",
            "needs Ray (the extra `ray`); pass --python with an environment that has it",
        )
        return
    blocks(walk)
    walk.copy(ASSETS / "blocks.gguf", "b.gguf")
    walk.write("key", "a key of twenty letters")
    (configuration,) = programs("docs/ray.md", "yaml")
    for written, here in (
        ("/models/policy.gguf", f"{walk.folder}/policy.gguf"),
        ("/models/b.gguf", f"{walk.folder}/b.gguf"),
        ("min: 2, max: 8", "min: 1, max: 1"),
        ("cpus: 2", "cpus: 1"),
        ("replicas: 2}", "replicas: 1}"),
    ):
        assert written in configuration, written
        configuration = configuration.replace(written, here)
    walk.write("fleet.yaml", configuration)
    with walk.serving(line):
        for name in ("", "/b"):
            walk.run(f"SINEW_API_KEY=$(cat key) sinew bench {NATIVE}{name} --runs 3")
    walk.write("fleet.yaml", configuration.replace("# address: auto", "address: auto"))
    walk.run(line, status=1, says=("address: expected a Ray cluster that runs, got none at 'auto'",))


def gpu(walk: Walk) -> None:
    """Run the page on a machine without a GPU, and unpack the archive for a machine with a GPU."""
    here = f"make -C {ROOT} PYTHON_GPU={walk.python}"
    walk.type("make gpu", instead=("make", here), status=2, says=("nothing was measured",))
    walk.type("python3 -m benchmarks.gpu --help", says=("--budget",))
    walk.type("make gpu-carry", instead=("make", here), says=(r"files, [\d.]+ MiB packed",))
    (walk.folder / "there").mkdir()
    walk.type(
        "tar xzf carry.tgz && cd sinew && export TRITON_CACHE_DIR=/tmp/tc",
        instead=("tar xzf carry.tgz && cd", f"cd there && tar xzf {ROOT}/build/gpu/carry.tgz && cd"),
        adds="&& python3 -m benchmarks.gpu",
        status=1,
        says=("nothing was measured",),
    )
    walk.leaves("python3 -m benchmarks.gpu --budget 480 --pack --out out", "runs as a part of the line above")
    needs_a_run = ("make gpu-carry CARRY_ARGS", "python3 -m benchmarks.gpu --base", "tar xzf nvidia-")
    for line in walk.lines:
        if "GPU_ARGS" in line:
            walk.leaves(line, "needs a GPU")
        elif line.startswith(needs_a_run):
            walk.leaves(line, "tests/engine/cuda/test_gpu_parts.py compares two trees and packs a run")
        elif line not in walk.walked:
            walk.leaves(
                line,
                "needs the wheel of Triton; tests/engine/cuda/test_gpu_ahead.py tests the package of kernels",
            )


def hardening(walk: Walk) -> None:
    for line in walk.lines:
        walk.leaves(line, "takes minutes to hours; the tests run a part of it")


def jetson(walk: Walk) -> None:
    """Run the table's line for each policy, and compare the output with the table. A dash means that the policy does
    not fit."""
    line = "sinew perf run smolvla --hardware orin-nano --hardware orin-nx --hardware agx-orin --hardware thor-measured"
    rows = re.findall(r"^\| (\S.*?) ((?:\| (?:\d+|-) ){4})\|$", (ROOT / walk.page).read_text(), re.MULTILINE)
    assert len(rows) == 8, rows
    for name, printed in rows:
        family = name.lower().replace(" ", "-").replace("evo-1", "evo1")
        boards = walk.type(line, instead=("smolvla", family)).result["machines"]
        found = [f"{board['ms']:.0f}" if board["fits"] else "-" for board in boards]
        assert found == printed.replace("|", "").split(), (name, found)
    walk.type("sinew perf fit pi0 --hardware orin-nano --alone", says=("fits with",))
    blocks(walk)
    # The walk adds its own --json to each line.
    report = walk.type("sinew bench policy.gguf --json orin.json", instead=(" --json orin.json", "")).result
    for name in ("orin.json", "workstation.json"):
        (walk.folder / name).write_text(json.dumps(report))
    shown = walk.type("sinew perf tiers --report orin.json --report workstation.json").result
    assert [row["policy"] for row in shown["rows"]] == ["blocks", "blocks"], shown


def low_bit(walk: Walk) -> None:
    blocks(walk)
    walk.type(
        "sinew quantize policy.gguf --recipe vision=q4_0,language=q4_0,head=int8 --out small.gguf",
        says=("gate .*success",),
    )
    walk.type("sinew quantize policy.gguf --search --budget 300MB --out found.gguf", instead=("300MB", "2MB"))
    assert (walk.folder / "found.gguf").stat().st_size <= 2_000_000
    walk.type("sinew eval small.gguf --gate GATE", instead=("GATE", "blocks"), says=("gate",))
    ranked = walk.type("sinew skip policy.gguf").result["rows"]
    assert ranked[0]["layers"] == "vision=1", ranked
    walk.type("sinew skip policy.gguf --layers vision=1 --out short.gguf")
    walk.type(
        "sinew eval policy.gguf --env sinew/Blocks-v0 --compare short.gguf --replan 8 --episodes 40",
        instead=("--episodes 40", "--episodes 3"),
    )
    walk.run("sinew perf fit small.gguf --engine cpu --device cpu --cameras 2", says=("fits with",))
    walk.type(
        "sinew quantize policy.gguf --recipe head=int8 --out small.gguf", instead=("small.gguf", "head.gguf")
    )
    walk.leaves("sinew serve small.gguf --engine cuda", "this line needs a GPU")


def eval_package(walk: Walk) -> None:
    walk.leaves(
        "pip install -c constraints.txt ./packages/sinew-client '.[onnx]' ./eval",
        "`make installs` checks this line; the line in README.md made this environment",
    )
    walk.type("sinew demo act --episodes 20", instead=("--episodes 20", "--episodes 2 --sweep-episodes 0"))
    walk.type("sinew eval blocks --episodes 100 --out build/eval", instead=("100", "4"))
    walk.type("sinew leaderboard build/eval")
    for name in ("A.gguf", "B.gguf"):
        walk.copy(ASSETS / "pen.gguf", name)
    walk.type(
        "sinew trials A.gguf --compare B.gguf --robot pen --scenes 20 --out runs/pen",
        instead=("20", "2"),
        says=("2 scenes; 2 were played. The plan was kept.",),
    )
    walk.leaves(
        "sinew recording dataset records/ build/recorded --hz 10 --bundle policy.gguf",
        "the story of docs/recordings.md runs this line with a recording",
    )


def perf_package(walk: Walk) -> None:
    walk.leaves(
        "pip install -c constraints.txt ./packages/sinew-client . ./perf",
        "`make installs` checks this line; the line in README.md made this environment",
    )
    walk.type("sinew perf run pi0.5 --hardware agx-orin --hardware h200", says=("AGX Orin", "H200"))
    walk.type("sinew perf fit pi0.5 --hardware orin-nano", status=1, says=("does not fit",))
    assert walk.type("sinew perf need --rate 30 --model pi0.5 --cameras 3").result["found"]


def perf(walk: Walk) -> None:
    arm_policy(walk)
    walk.type(
        "sinew perf run pi0.5 --hardware agx-orin --hardware h200", says=("AGX Orin", "H200", "end to end")
    )
    walk.type("sinew perf run policy.gguf --cameras 2 --dtype vision=fp8,language=fp8 --plot roof.png")
    assert (walk.folder / "roof.png").stat().st_size > 10_000
    need = walk.type("sinew perf need --rate 30 --model pi0.5 --cameras 3").result
    assert need["found"], need
    assert all(each["hz"] >= 30 for each in need["found"]), need
    walk.type(
        "sinew eval pen --replan 2 --episodes 100 --sweep handover=aligned,naive"
        " --sweep latency=0ms,33ms,67ms,100ms,133ms,167ms,200ms,233ms,267ms --out runs/pen",
        instead=(
            (
                "--episodes 100 --sweep handover=aligned,naive"
                " --sweep latency=0ms,33ms,67ms,100ms,133ms,167ms,200ms,233ms,267ms"
            ),
            "--episodes 8 --sweep latency=0ms,67ms",
        ),
    )
    kept = walk.type(
        "sinew perf need --success 0.95 --report runs/pen/report.json --model pi0.5 --hardware rtx4090,h100"
        " --network wifi7,5g --plot pen.png",
        instead=("--success 0.95", "--success 0.6"),
    ).result
    assert any(row["enough"] for row in kept["found"]), kept
    assert (walk.folder / "pen.png").stat().st_size > 10_000
    fewer = ("--episodes 200", "--episodes 12")
    walk.type(
        "sinew eval pen --replan 2 --handover aligned --latency 50ms --episodes 200 --out runs/robot",
        instead=fewer,
    )
    walk.type(
        "sinew eval pen --replan 2 --handover aligned --latency 100ms --episodes 200 --out runs/edge",
        instead=fewer,
    )
    walk.type(
        "sinew eval pen --replan 2 --handover aligned --latency normal:125,20ms --episodes 200 --out runs/cloud",
        instead=fewer,
    )
    chosen = walk.type(
        "sinew perf choose --mode robot=runs/robot --mode edge=runs/edge --mode cloud=runs/cloud --cost robot=1"
        " --cost edge=0.3 --cost cloud=0.1 --available edge=0.99 --available cloud=0.97 --failure-cost 5",
        instead=("--failure-cost 5", "--failure-cost 0.01"),
    ).result
    assert chosen["chosen"] == "cloud", chosen  # a failure costs almost nothing
    line = "sinew perf scenario pi0 --device agx-orin --server h200 --network wifi7 --codec jpeg"
    scenario = walk.type(line).result
    assert {"robot", "server", "split"} <= {row["where"] for row in scenario["rows"]}, scenario
    (fast,) = [
        each
        for each in walk.type("sinew perf stream pi0 --camera-hz 30 --hz 480").result["machines"]
        if each["machine"] == "h200"
    ]
    assert fast["reached"], fast
    gains = walk.type("sinew perf gains pi0 --hardware agx-orin --server h200").result
    assert [row["name"] for row in gains["taken"]][:2] == ["bf16", "engine cuda"], gains
    assert gains["under"][0]["name"] == "all on H200 SXM over WiFi 7", gains
    walk.type("sinew perf fit pi0.5 --hardware orin-nano", status=1, says=("does not fit",))
    walk.type(
        "sinew perf run pi0 --hardware rtx4090-boosted --cameras 2 --chunk 63 --prompt-tokens 0 "
        "--traffic weights --operators",
        says=("512x2048x32768",),
    )
    walk.type("sinew perf sync", says=("one by one",))
    walk.type("sinew perf tiers", says=("GR00T-N1.5",))
    walk.type("sinew perf calibrate policy.gguf")
    walk.run("sinew perf predict policy.gguf", says=("head",))
    walk.run("sinew perf calibrate policy.gguf --engine plan")  # with engine plan, as docs/batches.md does
    walk.run("sinew perf fleet policy.gguf --hz 10 --deadline-ms 100", says=("robots at 10 Hz", "predicted"))
    walk.run("sinew perf machines", says=("orin-nano", "wifi7"))
    (board,) = programs(walk.page, "toml")
    walk.write("board.toml", board)
    walk.run("sinew perf run pi0 --data board.toml --hardware my-board", says=("my-board", "end to end"))
    walk.run("sinew perf fit pi0 --data board.toml --hardware my-board --no-search", says=("fits with",))


def perf_costs(walk: Walk) -> None:
    arm_policy(walk)
    walk.program(
        0,
        after="for found in (published, own):\n"
        "    assert [stage.name for stage in found] == ['vision', 'prefix', 'head'], found\n"
        "    assert all(stage.operators for stage in found), found",
    )
    walk.type("sinew perf calibrate policy.gguf", says=("band of predictions",))
    walk.type("sinew perf predict policy.gguf", says=("head",))


def plan(walk: Walk) -> None:
    arm_policy(walk)
    walk.type("sinew inspect policy.gguf --plan", says=("pack-qkv",))
    walk.type("sinew bench policy.gguf --engine plan", says=("head",))
    walk.program(
        0,
        before="import sinew\nmodel = sinew.load('policy.gguf', engine='eager').engine.model",
        after="""
assert [o.status for o in plan.outcomes if o.name == "pack-qkv"] == ["applied"], plan.outcomes
assert {o.status for o in plan.outcomes if o.name != "pack-qkv"} <= {"off", "built in", "not applicable"}, plan.outcomes
everything = Plan.of(model, steps=10).outcomes
assert sum(o.status == "applied" for o in everything) > 3, everything
for verb in ("embed_images", "read", "embed_time", "act"):
    assert callable(getattr(plan.model, verb)), verb
""",
    )


def ros(walk: Walk) -> None:
    """Run the page over DDS: a server, the bridge in the robot's own environment, and a robot with topics only."""
    blocks(walk)
    walk.run("python -m venv robot")
    bare = "pip install ./packages/sinew-client './packages/sinew_ros[dds,bag]'"
    serve = "sinew serve policy.gguf"
    if walk.page == "docs/ros.md":
        walk.type(bare, instead=("pip", "robot/bin/pip"))
        serve = walk.meant("sinew serve policy.gguf --host 0.0.0.0", ("0.0.0.0", LOOPBACK))
    else:
        walk.run(f"robot/bin/{bare}")
    walk.environment |= {"CYCLONEDDS_URI": ONE_MACHINE, "ROS_DOMAIN_ID": str(100 + os.getpid() % 100)}
    with walk.server(f"{serve} --engine plan"):
        walk.type(
            "sinew-ros contract tcp://gpu:5555 > robot.yaml",
            instead=("sinew-ros", "robot/bin/sinew-ros"),
        )
        contract = (walk.folder / "robot.yaml").read_text()
        for given, filled in TOPICS.items():
            assert re.search(given, contract), f"{given!r} is not in the contract\n{contract}"
            contract = re.sub(given, filled, contract)
        walk.write("robot.yaml", contract)
        walk.run(
            "robot/bin/sinew-ros run robot.yaml", status=1, says=("source an installation of ROS 2 first",)
        )
        here = ("sinew-ros", "robot/bin/sinew-ros")
        own = walk.page == "docs/ros.md"
        drive = "sinew-ros run robot.yaml --transport dds" + " --record monday" * own
        with walk.beside(walk.meant(drive, here)) as bridge:
            twin = walk.run(f"python -c '{TWIN}'", says=('"successes"',))
        if own:
            assert json.loads(bridge.text.splitlines()[-1])["bag"]["failed"] == 0
            played = walk.type("sinew-ros run robot.yaml --transport bag:monday", instead=here)
            assert json.loads(played.text.splitlines()[-1])["control"]["chunks"] > 0
            answering = "sinew-ros serve tcp://gpu:5555 --hz 20 --transport dds"
            with walk.beside(walk.meant(answering, here)) as calls:
                walk.run(f"robot/bin/python -c '{CALL}'", says=("bad_observation|InvalidObservation",))
            assert '"failed": 1' in calls.text
            managed = "sinew-ros run robot.yaml --transport dds --lifecycle"
            with walk.beside(walk.meant(managed, here)) as node:
                walk.run(f"robot/bin/python -c '{MANAGE}'", says=("configure True", "activate True"))
            assert '"state": "finalized"' in node.text
            with walk.beside(walk.meant("sinew-ros run robot.yaml --transport dds --action", here)) as driven:
                # The robot has ended, so there are no observations. The node holds until the goal reaches its time
                # limit.
                asked = 'sinew-ros goal "stack them" --time-limit 30'
                walk.type(asked, instead=here, adds="--hold-limit 1", status=1, says=("hold limit",))
            assert '"hold limit": 1' in driven.text
    moved = json.loads(twin.text.splitlines()[-1])
    told = json.loads(bridge.text.splitlines()[-1])
    assert moved["successes"] > 0, (moved, told)
    assert moved["trajectories"] > 0, (moved, told)
    for line in walk.lines:
        if line not in walk.walked:
            walk.leaves(
                line, f"{ROS}, which no package index has; the story starts the same node over DDS above"
            )


def sim(walk: Walk) -> None:
    evaluated(walk.type("sinew eval blocks --episodes 2"), 0.5)
    walk.program(0, after="assert info['is_success']")
    walk.type(
        "python -m research.policies.blocks --cpu-seconds 3000 --out runs/blocks",
        instead=("3000", "20"),
        adds="--episodes 40",  # 40 of 3,600 episodes, which would take eight minutes of processor time
        timeout=600,
    )
    played(walk.type("sinew eval runs/blocks/blocks.gguf --episodes 200", instead=("200", "2")), 2)
    walk.type("python -m research.policies.pen    --cpu-seconds 200  --out runs/pen", instead=("200 ", "20 "))
    played(walk.type("sinew eval runs/pen/pen.gguf --env sinew/Pen-v0 --replan 2", adds="--episodes 2"), 2)


def stream(walk: Walk) -> None:
    blocks(walk)
    my_robot(walk, ("front", "wrist"), 4)
    with walk.serving("sinew serve policy.gguf --engine plan"):
        streamed(
            walk.type(
                "sinew run tcp://server:5555 --stream --robot my_robot:Arm --hz 240",
                adds="--prompt 'pick up the red block' --seconds 5",
            )
        )
    streamed(
        walk.run("sinew run policy.gguf --stream --robot dry --prompt 'pick up the red block' --seconds 5")
    )
    egg = walk.type("sinew run egg --stream --robot gym:sinew/Egg-v0 --episodes 5")
    streamed(egg)
    won(egg, 4, of=5)
    evaluated(
        walk.type(
            "sinew eval egg --env sinew/Egg-v0 --stream 33:2.1 --episodes 100",
            instead=("100", "10"),
        ),
        0.9,
    )
    walk.copy(FIXTURES / "pi05-2cam" / "checkpoint", "my_pi05")
    walk.copy(FIXTURES / "pi05-2cam" / "arch.json", "arch.json")
    # the checkpoint has miniature widths, which have no name
    walk.type("sinew convert my_pi05/ pi05.gguf --set lm_head=true", adds="--arch arch.json")
    walk.write("question.json", f"{QUESTION}\n")
    with walk.serving("sinew serve pi05.gguf --wire native --wire http"):
        walk.program(0, before=PI05, after="assert chunk.text and chunk.actions.shape == (50, 7)")
        walk.type("curl -d @question.json http://127.0.0.1:8000/vqa", says=('"text": ',))


def adapter_files(walk: Walk) -> None:
    """Write two adapters of that checkpoint, and the language model next to it."""
    arm(walk)
    for seed, name in enumerate(("kitchen", "lab"), start=1):
        write_folder("smolvla-2cam", walk.folder / name, seed, ATTENTION)


def sources(walk: Walk) -> None:
    adapter_files(walk)
    walk.type(
        "sinew convert my_smolvla/ policy.gguf --vlm SmolVLM2-500M-Video-Instruct/", says=("smolvla, .* MB",)
    )
    walk.type("sinew convert my_smolvla/ base.gguf --vlm SmolVLM2-500M-Video-Instruct/")
    line = "sinew convert kitchen/ kitchen.gguf --base my_smolvla/ --no-merge --vlm SmolVLM2-500M-Video-Instruct/"
    made = walk.type(line)
    assert made.result["bytes"] < 200_000, made
    walk.run(line.replace("kitchen", "lab"))
    walk.run("sinew inspect kitchen.gguf", says=("adapter of",))
    with walk.serving(
        "sinew serve base.gguf --adapter kitchen=kitchen.gguf --adapter lab=lab.gguf",
        says=("adapter  kitchen",),
    ):
        walk.program(0, before=ROBOT)


def certificate(walk: Walk) -> None:
    """Write a certificate of this machine: cert.pem and key.pem."""
    walk.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 1 -subj /CN=localhost"
        " -addext subjectAltName=DNS:localhost"
    )


def tutorial_lerobot(walk: Walk) -> None:
    run = "outputs/train/pick-cube/checkpoints"
    walk.copy(FIXTURES / "smolvla-2cam" / "checkpoint", f"{run}/000200/pretrained_model")
    walk.copy(FIXTURES / "smolvla-2cam" / "vlm", f"{run}/000200/vlm")
    (walk.folder / run / "last").symlink_to("000200")
    walk.write("etc-key", "a key of twenty letters")
    walk.type("sinew inspect outputs/train/pick-cube", says=("camera1",))
    joints = {"dtype": "float32", "shape": [6], "names": [f"joint{number}.pos" for number in range(6)]}
    info = {"fps": 30, "features": {"action": joints, "observation.state": joints}}
    walk.write("data/pick-cube/meta/info.json", json.dumps(info))
    walk.type("sinew convert outputs/train/pick-cube policy.gguf --dataset data/pick-cube --motion absolute")
    walk.run("sinew inspect policy.gguf", says=("joint5.pos",))
    walk.run("rm policy.gguf")
    assert walk.type("sinew doctor outputs/train/pick-cube").result["ok"]
    proved = walk.type("sinew validate outputs/train/pick-cube --out build/pick-cube")
    assert proved.result["passed"], proved
    with walk.serving("sinew serve outputs/train/pick-cube --rename front=camera1 --rename wrist=camera2"):
        drove(
            walk.type(
                'sinew run tcp://127.0.0.1:5555 --robot dry --prompt "pick up the cube" --hz 30 --seconds 10',
                instead=("10", "3"),
            )
        )
    certificate(walk)
    with walk.serving(
        "sinew serve outputs/train/pick-cube --host 0.0.0.0 --api-key-file /etc/sinew/key"
        " --tls-cert cert.pem --tls-key key.pem",
        instead=("0.0.0.0 --api-key-file /etc/sinew/key", f"{LOOPBACK} --api-key-file etc-key"),
    ):
        asked = f"sinew bench {NATIVE.replace('tcp://', 'tls://').replace(LOOPBACK, 'localhost')} --runs 3"
        walk.run(f"SINEW_API_KEY=$(cat etc-key) SSL_CERT_FILE=cert.pem {asked}")
    walk.leaves(
        """sinew run tcp://127.0.0.1:5555 --robot lerobot:so101_follower --robot-options '{"port": "/dev/ttyACM0", """
        """"id": "arm"}' --prompt "pick up the cube" --hz 30 --limits limits.toml"""
        " --record run.jsonl",
        ARM,
    )
    with walk.serving("sinew serve outputs/train/pick-cube --record records/"):
        walk.run(f"sinew bench {NATIVE} --runs 5")
    mcap = walk.type("sinew recording mcap records/ run.mcap --bundle outputs/train/pick-cube --hz 30")
    assert mcap.result["bytes"] > 1000, mcap
    with walk.server("sinew serve outputs/train/pick-cube"):
        walk.type(
            "sinew recording replay records/ tcp://127.0.0.1:5555",
            says=("8 records: .* 0 beyond.*; 0 answered with an error",),
        )
    walk.type("sinew bench outputs/train/pick-cube", says=("vision", "head"))
    walk.type("sinew quantize outputs/train/pick-cube --recipe vision=int8,language=int8 --out small.gguf")
    assert walk.type("sinew validate small.gguf --out build/small").result["passed"]
    with fake_hub({}, home=walk.folder / "hub") as hub:
        walk.environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
        walk.type(
            "sinew hub push small.gguf my-lab/pick-cube --report build/small/report.json --license apache-2.0"
        )
        walk.type("sinew hub pull my-lab/pick-cube --out policy.gguf")
    assert (walk.folder / "policy.gguf").read_bytes() == (walk.folder / "small.gguf").read_bytes()


def tutorial_openpi(walk: Walk) -> None:
    walk.leaves(
        "pip install -c constraints.txt './packages/sinew-client' '.[torch,jax,sentencepiece]' ./perf",
        "`make installs` checks this line; the line in README.md made this environment",
    )
    write_checkpoint(FIXTURES, walk.folder / "made", "pi05_droid")
    walk.copy(walk.folder / "made" / "pi05_droid", "checkpoints/pi05_droid/29999")
    walk.type(
        "sinew convert checkpoints/pi05_droid/29999 pi05.gguf --openpi-config pi05_droid"
        " --tokenizer paligemma_tokenizer.model",
        # PaliGemma's own tokenizer is not available here. The checkpoint has miniature widths, which have no name.
        instead=("--tokenizer paligemma_tokenizer.model", "--arch made/arch.json"),
    )
    walk.type("sinew inspect pi05.gguf", says=("droid",))
    assert walk.type("sinew validate pi05.gguf --out build/pi05").result["passed"]
    my_robot(walk, ("base_0_rgb", "left_wrist_0_rgb"), 8)
    openpi_client(walk)
    walk.run("python -c 'import openpi_client.action_chunk_broker, openpi_client.image_tools'")
    with walk.serving("sinew serve pi05.gguf --wire openpi --wire native"):
        walk.program(0, before=OPENPI, after="assert chunk.shape == (15, 8)")
        drove(
            walk.type(
                'sinew run tcp://127.0.0.1:5555 --robot dry --prompt "put the cup on the plate" --hz 15 --seconds 10',
                instead=("10", "3"),
            )
        )
        drove(
            walk.type(
                'sinew run tcp://127.0.0.1:5555 --robot my_robot:Arm --prompt "put the cup on the plate" --hz 15'
                " --handover rtc:ramp --replan 8",
                adds="--seconds 5",
            )
        )
    walk.type("sinew bench pi05.gguf", says=("vision", "head"))
    walk.type("sinew perf run pi05.gguf --hardware h200", says=("H200 SXM", "end to end"))
    assert walk.type("sinew doctor pi05.gguf").result["ok"]


def tutorial_quantise(walk: Walk) -> None:
    walk.type(
        "sinew quantize blocks --recipe vision=int8,language=int8,head=fp32 --out build/blocks-int8.gguf"
    )
    walk.type("sinew inspect build/blocks-int8.gguf", says=("int8",))
    assert walk.type("sinew validate build/blocks-int8.gguf --engine cpu --out build/validate").result[
        "passed"
    ]
    evaluated(
        walk.type(
            "sinew eval blocks --compare build/blocks-int8.gguf --episodes 100 --out build/compare",
            instead=("100", "20"),
        ),
        0.8,
    )
    walk.type("sinew eval build/blocks-int8.gguf --gate blocks")
    walk.type("sinew quantize blocks --search --budget 2MB --out build/blocks-2mb.gguf")
    assert (walk.folder / "build" / "blocks-2mb.gguf").stat().st_size <= 2_000_000
    walk.type(
        "sinew recording dataset build/blocks-int8.gguf build/episodes --episodes 20", instead=("20", "3")
    )
    written(walk, "build/episodes", 3)


def plugin(walk: Walk) -> None:
    for line in walk.lines:
        walk.leaves(
            line,
            "needs another environment (make lerobot); tests/serve/test_lerobot_plugin.py runs the lines of this page",
        )


def client(walk: Walk) -> None:
    arm_policy(walk)
    with walk.server("sinew serve policy.gguf"):
        walk.program(0, before=ROBOT, after="assert chunk.actions.shape == (50, 6)")


def language(walk: Walk) -> None:
    """Run the clients in C++, Rust and JavaScript with a server. Each line of their output must be one action."""
    arm_policy(walk)
    # the home folder of this page does not contain rustup
    rustup = os.environ.get("RUSTUP_HOME", f"{os.environ['HOME']}/.rustup")
    walk.environment |= {"CARGO_TARGET_DIR": str(walk.folder / "target"), "RUSTUP_HOME": rustup}
    pixels = b"P6\n64 48\n255\n" + bytes(64 * 48 * 3)
    for name in ("front.ppm", "wrist.ppm"):
        (walk.folder / name).write_bytes(pixels)
    with walk.server("sinew serve policy.gguf"):
        for line in walk.lines:
            if (tool := shlex.split(line)[0]) != "./ask" and shutil.which(tool) is None:
                walk.leaves(line, f"there is no {tool} here")
                return
            asked = walk.type(line)
    rows = [row.split() for row in asked.text.splitlines() if row.count(" ") == 5 and "warning" not in row]
    assert len(rows) == 50, asked.text
    assert all(abs(float(number)) < 1e6 for row in rows for number in row), asked.text


def protocol_lerobot(walk: Walk) -> None:
    """Run LeRobot's client with the command that the server prints, with the page's flags and a simulated arm."""
    for line in walk.lines:
        if line.startswith("python "):
            why = f"{ARM}; the same flags run below with a simulated arm"
            walk.leaves(line, why)
    if (release := lerobot_folder(RELEASES[-1])) is None:
        print(
            f"  LeRobot {RELEASES[-1]} is not in {CLIENTS.parents[1].name}, so its lines do not run; run make clients"
        )
        walk.leaves("sinew serve policy.gguf --wire lerobot", "its client is not here")
        return
    arm_policy(walk)
    with walk.serving("sinew serve policy.gguf --wire lerobot") as server:
        (printed,) = re.findall(r"python (-m lerobot\S+ \\\n(?:.*\\\n)*.*)", server.text)
        words = shlex.split(printed.replace("\\\n", " "))
        flags = [word.partition("=")[0] for word in words]
        assert flags == [word.partition("=")[0] for word in shlex.split(line)[1:]], printed
        own = {"--robot.type": "without_hardware"}
        words = [
            f"{flag}={own[flag]}" if flag in own else word for flag, word in zip(flags, words, strict=True)
        ]
        walk.run(
            f"ROBOT_LOG=robot.json ROBOT_STEPS=40 PYTHONPATH={release} {CLIENTS}"
            f" {ROOT}/tests/serve/lerobot_robot.py {shlex.join(words[2:])} > client.txt 2>&1; tail -n 3 client.txt",
            says=(
                "KeyboardInterrupt",
            ),  # the simulated arm ends LeRobot's loop with this exception, as a user would
        )
    seen = json.loads((walk.folder / "robot.json").read_text())
    assert len(seen["executed"]) == 40, seen


def protocol_lerobot_remote(walk: Walk) -> None:
    """Run the page's program. LeRobot 0.7 was not on the index, so tests/serve/lerobot_remote_client.py replaces it."""
    for line in walk.lines:
        if line.startswith("lerobot-rollout "):
            walk.leaves(line, "LeRobot 0.7 was not on the index")
    walk.run("python -m pip install -q eclipse-zenoh msgpack")
    with walk.serving("sinew serve blocks-rtc --wire lerobot-remote") as server:
        flags = [word.partition("=")[0] for word in shlex.split(line.replace("\\\n", " "))]
        (printed,) = re.findall(r"lerobot-rollout (\S+ \\\n(?:.*\\\n)*.*)", server.text)
        assert [word.partition("=")[0] for word in shlex.split(printed.replace("\\\n", " "))] == flags[1:], (
            printed
        )
        walk.program(0, after="assert offered['modes'] == ['chunk', 'rtc_guided', 'rtc_trained']")


def protocols(walk: Walk) -> None:
    blocks(walk)
    walk.write("key.txt", "a key of twenty letters")
    certificate(walk)
    with walk.serving("sinew serve policy.gguf"):
        walk.run(f"sinew bench {NATIVE} --runs 3")
    with walk.serving("sinew serve policy.gguf --wire openpi --wire http --wire groot --wire lerobot:8081"):
        pass
    with walk.serving("sinew serve policy.gguf --wire native:ipc:///tmp/sinew.sock"):
        line = "sinew bench ipc:///tmp/sinew.sock --runs 3"
        walk.run(line, says=("raw, in the message",))  # frames of 64 x 64 are too small for shared memory
        walk.run(f"{line} --image-size 480x640", says=("raw, shared memory",))
    with walk.serving(
        "sinew serve policy.gguf --host 0.0.0.0 --api-key-file key.txt --tls-cert cert.pem --tls-key key.pem",
        instead=("0.0.0.0", LOOPBACK),
    ):
        walk.run(f"SINEW_API_KEY=$(cat key.txt) sinew bench {NATIVE} --runs 3")


def recordings(walk: Walk) -> None:
    blocks(walk)
    with walk.serving("sinew serve policy.gguf --record records/"):
        walk.run(f"sinew bench {NATIVE} --runs 3")
        walk.type("sinew recording replay records/ tcp://127.0.0.1:5555", says=("records: ", " 0 beyond"))
    with walk.serving("sinew serve --replay records/"):
        walk.run(f"sinew bench {NATIVE} --runs 3")
    walk.type(
        "sinew run pen --robot gym:sinew/Pen-v0 --replan full --episodes 15 --record run.jsonl --frames frames/"
    )
    advice = walk.type(
        "sinew recording advise run.jsonl --frames frames/ --policy pen --episodes 15 --plot ages.png"
    )
    (replan,) = (each for each in advice.result["advice"] if each["topic"] == "replan interval")
    # On a busy machine, answers are late, so a shorter interval is advised, or none is short enough.
    short = replan["flags"] in ("--replan 8", "--replan 4", "--replan 2")
    assert short or "because an answer takes" in replan["reason"], advice.result


def protocol_native(walk: Walk) -> None:
    with walk.serving("sinew serve blocks --wire native"):
        walk.program(0, after="assert chunk.actions.shape == (32, 4)")


def protocol_openpi(walk: Walk) -> None:
    openpi_client(walk)
    with walk.serving("sinew serve blocks --wire openpi"):
        walk.program(0, after="assert answer['actions'].shape == (32, 4)")


def protocol_http(walk: Walk) -> None:
    with walk.serving("sinew serve blocks --wire http"):
        walk.program(0, after="assert len(answer['actions']) == 32")


def protocol_groot(walk: Walk) -> None:
    """Run the page with a replacement for NVIDIA's package, which sends the same messages."""
    walk.copy(ROOT / "tests" / "serve" / "groot_client.py", "gr00t/policy/server_client.py")
    with walk.serving("sinew serve blocks --wire groot"):
        walk.program(
            0,
            before="import sys; sys.path.insert(0, '.')",
            after="assert actions['actions'].shape == (1, 32, 4)",
        )


def protocol_others(walk: Walk) -> None:
    with walk.serving("sinew serve blocks --wire http"):
        walk.program(0, after="assert len(actions) == 32 and actions[0]['shape'] == [4]")
    walk.run("python -m pip install -q websockets")
    with walk.serving("sinew serve blocks --wire evo1"):
        walk.program(1, after="assert (len(actions), len(actions[0])) == (32, 24)")
    walk.leaves(
        "sinew serve policy.gguf --wire vla-eval --max-batch auto --rename agentview=image --rename wrist=image2",
        "the cameras of a policy for LIBERO; tests/serve/test_vla_eval_wire.py plays with vla-eval's own orchestrator",
    )


def wiring(walk: Walk) -> None:
    blocks(walk)
    my_robot(walk, ("front", "wrist"), 4)
    grey = walk.type("sinew doctor policy.gguf --observe my_robot:Arm", status=1)
    assert {check["kind"] for check in grey.result["checks"]} >= {"one colour"}, grey
    walk.leaves(
        "sinew doctor policy.gguf --observe lerobot:so101_follower --robot-options"
        """ '{"port": "/dev/ttyACM0"}' --seconds 5""",
        ARM,
    )
    with walk.server("sinew serve policy.gguf --record records/"):
        won(walk.run(f"sinew run {NATIVE} --robot gym:sinew/Blocks-v0 --episodes 5"), 4, of=5)
    walk.write(
        "arm.toml", "still = [0.0, 0.0, 0.0, 1.0]\n"
    )  # the state does not contain the gripper's command
    # The simulated bus returns the last command, which is a delta action here, so it follows no command.
    walk.type(
        "sinew doctor policy.gguf --observe my_robot:Arm --limits arm.toml --delays --out delays.toml",
        instead=("--delays --out", "--delays --seconds 6 --out"),
        status=1,
        says=("the robot moves by at most", "command to state"),
    )
    # Without a measured delay, there is no file.
    walk.write(
        "delays.toml", "[run]\ncamera_delay = 0.083\n[perf.stream]\ncamera_ms = 66\nactuation_ms = 46\n"
    )
    walk.type(
        'sinew --config delays.toml run policy.gguf --robot my_robot:Arm --prompt "sort the blocks"',
        instead=("my_robot:Arm", "my_robot:Arm --seconds 3"),
    )
    walk.type(
        "sinew --config delays.toml perf stream pi0 --hardware agx-orin",
        status=1,
        says=("includes 66 ms of the camera and 46 ms of the actuator",),
    )
    right = walk.type("sinew doctor policy.gguf --observe records/")
    assert right.result["ok"], right
    swapped = walk.type(
        "sinew doctor blocks --observe blocks --rename front=wrist --rename wrist=front", status=1
    )
    assert [check["kind"] for check in swapped.result["checks"]][:2] == ["swapped", "swapped"], swapped
    walk.run("sinew doctor policy.gguf --learn records/ --out policy-seen.gguf")


STORIES: dict[str, Story] = {
    "README.md": readme,
    "docs/adding-a-model.md": adding_a_model,
    "docs/batches.md": batches,
    "docs/bundle.md": bundle,
    "docs/commands.md": commands,
    "docs/control.md": control,
    "docs/dashboard.md": dashboard,
    "docs/deployment.md": deployment,
    "docs/edge-and-cloud.md": edge_and_cloud,
    "docs/install.md": install,
    "docs/engines.md": engines,
    "docs/eval-suites.md": suites,
    "docs/eval-compare.md": policies_compared,
    "docs/eval-evidence.md": evidence,
    "docs/eval-farm.md": farm,
    "docs/eval-learning.md": learning,
    "docs/eval-trials.md": trials,
    "docs/eval.md": evaluation,
    "docs/gpu.md": gpu,
    "docs/guidance.md": guidance,
    "docs/hardening.md": hardening,
    "docs/jetson.md": jetson,
    "docs/kinematics.md": kinematics,
    "docs/late-answers.md": late_answers,
    "docs/limits.md": limits,
    "docs/low-bit.md": low_bit,
    "docs/quick-start.md": quick_start,
    "docs/perf.md": perf,
    "docs/perf-costs.md": perf_costs,
    "docs/plan.md": plan,
    "docs/protocol-groot.md": protocol_groot,
    "docs/protocol-http.md": protocol_http,
    "docs/protocol-lerobot.md": protocol_lerobot,
    "docs/protocol-lerobot-remote.md": protocol_lerobot_remote,
    "docs/protocol-native.md": protocol_native,
    "docs/protocol-openpi.md": protocol_openpi,
    "docs/protocol-others.md": protocol_others,
    "docs/protocols.md": protocols,
    "docs/ray.md": cluster,
    "docs/recordings.md": recordings,
    "docs/ros.md": ros,
    "docs/several-policies.md": several_policies,
    "docs/sim.md": sim,
    "docs/sources.md": sources,
    "docs/stream.md": stream,
    "docs/takeover.md": takeover,
    "docs/tutorial-lerobot.md": tutorial_lerobot,
    "docs/tutorial-openpi.md": tutorial_openpi,
    "docs/tutorial-quantise.md": tutorial_quantise,
    "docs/wiring.md": wiring,
    "packages/lerobot_policy_sinew/README.md": plugin,
    "eval/README.md": eval_package,
    "perf/README.md": perf_package,
    "packages/sinew-client/README.md": client,
    "packages/sinew-cpp/README.md": language,
    "packages/sinew-js/README.md": language,
    "packages/sinew-rust/README.md": language,
    "packages/sinew_ros/README.md": ros,
}
