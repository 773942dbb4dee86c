"""Play episodes in a simulator's own Python interpreter. Requests arrive as JSON lines on standard input. Answers
leave as JSON lines on standard output.

:mod:`sinew_eval.foreign.run` starts this file as a script. The interpreter has the simulator, gymnasium, numpy and
protobuf, but neither sinew nor torch. Sinew's packages are imported from the folders of the parent process, so that
no other package of the parent is visible.

The first request is the task. Every further request is ``{"variant": {...}, "seed": 0}``. The first answer is
``{"control_hz": 50.0}``, when the environment is ready. Then each request gets ``{"episode": {...}}``, or ``{"error":
"..."}`` for an error that the user can fix. If the task contains ``fps``, a request also contains a ``file`` for the
stored steps of the episode.
"""

import importlib.util
import json
import os
import sys
import threading
import time

PYTHON = (3, 10)  # oldest Python that can import the evaluation's code


def _adopt(name, folder):
    """Import the package ``name`` from ``folder``, which contains the package's modules."""
    first = os.path.join(folder, "__init__.py")  # noqa: PTH118 - the check below must run before most imports
    spec = importlib.util.spec_from_file_location(name, first, submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _end_with_parent():
    """End this process when its parent has ended. The parent may be killed during a long episode."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(client, core, evaluation):
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Simulators print to standard output. Write the answers to a copy of it, and redirect standard output to
    # standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message):
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    if sys.version_info < PYTHON:
        answer({"error": "{}: Python {}.{} or newer is needed".format(sys.executable, *PYTHON)})
        return
    # EGL draws without a display. MuJoCo reads the variable when it is imported.
    os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
    try:
        _adopt("sinew_client", client)
        _adopt("sinew", core)
        _adopt("sinew_eval", evaluation)
        from sinew.core import SinewError
        from sinew_client.untrusted import parse_json

        from sinew_eval.episodes.player import EpisodePlayer
        from sinew_eval.episodes.settings import Task, Variant
        from sinew_eval.episodes.watched import WatchedPlayer, write_moments
    except ModuleNotFoundError as error:
        answer({"error": f"{sys.executable} lacks {error.name}: pip install numpy protobuf gymnasium"})
        return

    player = None
    for line in sys.stdin:
        request = parse_json(line)
        try:
            if player is None:
                fps = request.pop("fps", None)
                task = Task(**request)
                player = EpisodePlayer(task) if fps is None else WatchedPlayer(task, fps)
                answer({"control_hz": player.adapter.control_hz})
                continue
            variant = Variant.from_dict(request["variant"])
            episode = player.play(variant, request["seed"])
            if isinstance(player, WatchedPlayer):
                write_moments(request["file"], player.watched.moments)
            answer({"episode": episode.to_dict()})
        except ModuleNotFoundError as error:
            answer({"error": f"{sys.executable} lacks {error.name}"})
            break
        except SinewError as error:
            answer({"error": str(error)})
            break
    if player is not None:
        player.close()


if __name__ == "__main__":
    main(*sys.argv[1:4])
