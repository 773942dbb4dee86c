"""The live view of ``sinew run``, and its keys."""

from __future__ import annotations

import logging
import os
import select
import sys
import termios
import threading
import tty
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from sinew_client.control import Command, CommandListener, Controller, Loop
from sinew_client.control.facts import facts_of

from sinew.cli.run_robot import episodes_text

if TYPE_CHECKING:
    from sinew_client.arm.takeover import Takeover

log = logging.getLogger(__name__)


class Keys:
    """Reads single keys from the keyboard on a thread of its own.

    Space pauses or continues, ``p`` begins an instruction, ``q`` stops, and ``takeover_key`` takes over or gives
    back.

    Attributes:
        typing: The instruction so far; None while no instruction is typed.
    """

    def __init__(self, loop: Loop, takeover: Takeover | None = None, takeover_key: str = "t"):
        self.loop, self.takeover, self.takeover_key = loop, takeover, takeover_key
        self.typing: str | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._read, name="sinew-keys", daemon=True)

    def __enter__(self) -> Keys:
        self._before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._end.set()
        self._thread.join()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        while not self._end.is_set():
            if select.select([sys.stdin], [], [], 0.1)[0]:
                try:
                    data = os.read(sys.stdin.fileno(), 64)
                except OSError:  # Linux raises this if the other end of the terminal is closed
                    data = b""
                if not data:
                    log.warning("the keyboard is not available any more, so the robot holds")
                    self.quit()  # without a keyboard, the user could not pause or stop the robot
                    return
                for key in data.decode(errors="ignore"):
                    self.press(key)

    def quit(self) -> None:
        self.loop.stop()

    def typed(self, text: str) -> None:
        """Use a line that the user has typed as the new instruction."""
        self.loop.say(text)

    def press(self, key: str) -> None:
        """Perform the action that belongs to a pressed key, such as a pause."""
        if self.typing is not None:
            if key in "\r\n":
                text, self.typing = self.typing.strip(), None
                if text:
                    self.typed(text)
            elif key == "\x1b":
                self.typing = None
            else:
                self.typing = self.typing[:-1] if key in "\x7f\b" else self.typing + key
        elif key == " ":
            if self.loop.controller.paused:
                self.loop.resume()
            else:
                self.loop.pause()
        elif key == "p":
            self.typing = ""
        elif key == "q":
            self.quit()
        elif key == self.takeover_key and self.takeover is not None:
            if self.loop.controller.driver == "policy":
                self.takeover.take_over()
            else:
                self.takeover.hand_back()


class RunView:
    """Draws a run while it lasts, for :func:`sinew.cli.terminal.drawn`."""

    def __init__(self, loop: Loop, keys: Keys):
        self.loop, self.keys = loop, keys
        self._command: Command | None = None
        self._events: list[str] = []
        CommandListener(self._see).attach(loop)

    def _see(self, command: Command) -> None:
        last, self._command = self._command, command
        if command.row is None and (last is None or last.reason != command.reason):
            self._events = [*self._events[-4:], f"step {command.step}: holds: {command.reason}"]
        elif command.row is not None and last is not None and last.row is None:
            self._events = [*self._events[-4:], f"step {command.step}: goes on"]

    def picture(self) -> Panel:
        loop, command, controller = self.loop, self._command, self.loop.controller
        takeover = self.keys.takeover
        assert isinstance(controller, Controller)
        state = (
            "paused" if controller.paused else "holds" if command is None or command.row is None else "moves"
        )
        colour = {"paused": "yellow", "holds": "red", "moves": "green"}[state]
        if takeover is not None and not controller.paused:
            who = {
                "policy": "policy drives",
                "human": "human drives",
                "aligning": "is aligned",
                "returning": "returns to its rest pose",
            }[controller.driver]
            state += f", {who}"
        facts = Table.grid(padding=(0, 2))
        facts.add_row("instruction", Text(loop.prompt or "-"))
        if (own := facts_of(loop.robot).task()) and own != loop.prompt:
            facts.add_row("the robot's own", Text(own, style="dim"))
        if episodes := episodes_text(facts_of(loop.robot)):
            facts.add_row("episodes", Text(episodes))
        if self.keys.typing is not None:
            facts.add_row("new instruction", Text(f"{self.keys.typing}_", style="bold"))
        facts.add_row("state", Text(state, style=f"bold {colour}"))
        remaining = controller.trajectory.left(command.step + 1) if command is not None else 0
        size = max(controller.player.size, 1)
        facts.add_row("rows left", ProgressBar(total=size, completed=min(remaining, size), width=30))
        age = (
            "-"
            if command is None or command.row is None
            else f"{1e3 * command.age / loop.settings.hz:.0f} ms"
        )
        delay = 1e3 * controller.delay.steps / loop.settings.hz
        facts.add_row("chunk age", f"{age}, the next one due {delay:.0f} ms after its request")
        if takeover is not None and takeover.detail:
            facts.add_row("leader", Text(takeover.detail, style="yellow"))
        if failed := str(controller.faults):
            facts.add_row("errors", Text(failed, style="red"))
        facts.add_row("steps", f"{loop.steps} at {loop.settings.hz:g} Hz, {loop.pace.late} late")
        holds = controller.held
        facts.add_row("held", f"{sum(holds.values())} steps, clipped {controller.clipped_commands} commands")
        if command is not None and command.row is not None:
            facts.add_row("command", Text(" ".join(f"{value:+.3f}" for value in command.row[:8])))
        taken = "" if takeover is None else f"   {self.keys.takeover_key} takes over or gives back"
        help_line = Text(f"space pauses or continues   p instruction   q stops{taken}", style="dim")
        return Panel(Group(facts, Text("\n".join(self._events), style="dim"), help_line), title="sinew run")
