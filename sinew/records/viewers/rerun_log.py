"""Write inputs and outputs of policies as entities of Rerun, into a file or to a running viewer."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from sinew_client.addresses import split_scheme

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError

JPEG_QUALITY = 85  # without JPEG, Rerun stores raw pixels, with megabytes for each picture
# A viewer must answer within this time. Check it first, because Rerun stores all data in memory until a viewer
# connects.
REACH_S = 1.0
SEND_S = 5.0  # a viewer must accept logged data within this time
SCHEMES = ("rerun", "rerun+http", "rerun+https")


def target_of(text: str) -> Path | str:
    """Return the target of a recording: a path that ends in .rrd, or the address of a running viewer.

    Raises :class:`SinewError` for any other text and for an existing file, :class:`MissingPackageError` without
    rerun-sdk.
    """
    _package()
    if not split_scheme(text)[0]:
        path = Path(text)
        if path.suffix != ".rrd":
            raise SinewError(_expected(text))
        if path.exists():
            raise SinewError(f"{path}: the file already exists; choose a new one")
        return path
    try:
        parts = urlsplit(text)
        good = parts.scheme in SCHEMES and parts.hostname and parts.port and parts.path == "/proxy"
    # urlsplit raises ValueError for an invalid port.
    except ValueError:
        good = False
    if not good:
        raise SinewError(_expected(text))
    return text


def _package() -> Any:
    try:
        import rerun
    except ImportError:
        raise MissingPackageError("a Rerun recording", "rerun") from None
    return rerun


def _expected(text: str) -> str:
    return (
        "rerun: expected a file NAME.rrd, or the address of a running viewer, rerun+http://HOST:9876/proxy,"
        f" got {text!r}"
    )


class RerunLog:
    """A Rerun recording. One thread writes it.

    Args:
        target: The result of :func:`target_of`.
        simulated: True for times in seconds since the start of the recording, on the timeline ``time``. False for
            seconds since the epoch, on the timeline ``wall``.

    Attributes:
        counts: Entity -> number of entries.

    Raises:
        MissingPackageError: rerun-sdk is not installed.
        SinewError: The file cannot be created, or no viewer answers.
    """

    def __init__(self, target: Path | str, *, simulated: bool = False):
        self._rerun = _package()
        self._stream: Any = None
        self._id = uuid.uuid4()  # one id for the whole run, so that a restarted viewer shows one recording
        self._simulated = simulated
        self.target = target
        self.counts: dict[str, int] = {}
        if isinstance(target, Path) and target.exists():
            raise SinewError(f"{target}: the file already exists; choose a new one")
        try:
            self._open()
        except OSError as error:
            raise SinewError(
                f"rerun: {error}; start a viewer there with `rerun`, or pass a file NAME.rrd"
                if self.live
                else f"{target}: {error.strerror or error}"
            ) from error

    @property
    def live(self) -> bool:
        """Return True if the target is a running viewer."""
        return not isinstance(self.target, Path)

    def at(self, seconds: float, **numbers: int) -> None:
        """Set the time of the next entries, and their positions on further timelines (``numbers``) by name.

        Raises:
            OSError: The viewer does not answer.
        """
        self._open()
        if self._simulated:
            self._stream.set_time("time", duration=seconds)
        else:
            self._stream.set_time("wall", timestamp=seconds)
        for name, number in numbers.items():
            self._stream.set_time(name, sequence=number)

    def pictures(self, root: Sequence[str], images: Mapping[str, Any]) -> None:
        """Log frames, uint8 or float in [0, 1], [h, w, 3], as ``camera/NAME``."""
        for name, frame in images.items():
            picture = self._rerun.Image(_pixels(np.asarray(frame))).compress(JPEG_QUALITY)
            self._log([*root, "camera", name], picture)

    def values(self, root: Sequence[str], kind: str, names: Sequence[str], values: Any) -> None:
        """Log a vector as one entity ``KIND/NAME`` per number. If the number of names differs from the vector's length,
        indices are used as names.

        Args:
            root: Prefix of the entities.
            kind: Kind of the numbers, such as "state".
            names: Name of each number.
            values: The vector.
        """
        vector = np.asarray(values, np.float64).reshape(-1)
        for name, value in zip(_names(names, len(vector)), vector, strict=True):
            self._log([*root, kind, name], self._rerun.Scalars(float(value)))

    def rows(
        self, root: Sequence[str], kind: str, names: Sequence[str], times: np.ndarray, rows: np.ndarray
    ) -> None:
        """Log a matrix as one series of numbers per column, with the name ``KIND/NAME``.

        Args:
            root: Prefix of the entities.
            kind: Kind of the numbers, such as "action".
            names: Name of each column.
            times: Time of each row in seconds, [n].
            rows: The matrix, [n, D].
        """
        if not len(times):
            return
        self._open()
        column = (
            self._rerun.TimeColumn("time", duration=times)
            if self._simulated
            else self._rerun.TimeColumn("wall", timestamp=times)
        )
        for name, values in zip(_names(names, rows.shape[1]), rows.T, strict=True):
            entity = [*root, kind, name]
            self._stream.send_columns(
                self._rerun.new_entity_path(entity),
                indexes=[column],
                columns=self._rerun.Scalars.columns(scalars=values.astype(np.float64)),
            )
            self._count(entity, len(times))

    def number(self, root: Sequence[str], entity: str, value: float) -> None:
        """Add one number to the entity ``entity``, at the time of :meth:`at`."""
        self._log([*root, entity], self._rerun.Scalars(float(value)))

    def text(self, root: Sequence[str], entity: str, text: str, level: str = "INFO") -> None:
        """Add a line of text to the entity ``entity``, at the time of :meth:`at`. ``level`` is the log level that the
        viewer shows.
        """
        # Text from JSON may contain surrogates, which cannot be encoded.
        plain = text.encode(errors="backslashreplace").decode()
        self._log([*root, entity], self._rerun.TextLog(plain, level=level))

    def arrange(self, root: Sequence[str], cameras: Iterable[str], plots: Iterable[str]) -> None:
        """Set the layout of the viewer: pictures on the left, and one plot for each kind of entity on the right. A
        person may rearrange it.

        Args:
            root: Prefix of the entities.
            cameras: Names of the cameras.
            plots: Kinds of entities to plot.
        """
        import rerun.blueprint as layout

        path = self._rerun.new_entity_path
        pictures = [layout.Spatial2DView(origin=path([*root, "camera", name]), name=name) for name in cameras]
        curves = [layout.TimeSeriesView(origin=path([*root, kind]), name=kind) for kind in plots]
        self._stream.send_blueprint(
            layout.Blueprint(
                layout.Horizontal(layout.Vertical(*pictures), layout.Vertical(*curves), column_shares=[2, 3])
            )
        )

    def send(self) -> None:
        """Wait until the viewer has accepted all entries. If the target is a file, return at once.

        Raises:
            OSError: The viewer has not accepted the entries in time.
        """
        if not self.live or self._stream is None:
            return
        try:
            self._stream.flush(timeout_sec=SEND_S)
        # Rerun's bindings may raise any error.
        except Exception as error:
            self._stream = None
            raise OSError(f"the viewer at {self.target} accepts no data ({error})") from error

    def close(self) -> None:
        """Write all entries, and end the recording."""
        if self._stream is not None:
            self._stream.disconnect()
        self._stream = None

    def abandon(self) -> None:
        """Let the process end even if a viewer has stopped reading and blocks the end of the recording."""
        self._rerun.unregister_shutdown()

    def discard(self) -> None:
        """End the recording and remove its file."""
        self.close()
        if isinstance(self.target, Path):
            self.target.unlink(missing_ok=True)

    def _open(self) -> None:
        """Connect to the target, or connect again after a viewer has disconnected.

        Raises:
            OSError: No viewer answers.
        """
        if self._stream is not None:
            return
        if not isinstance(self.target, Path):
            parts = urlsplit(self.target)
            try:
                socket.create_connection((parts.hostname or "", parts.port or 0), REACH_S).close()
            except OSError as error:
                raise OSError(
                    f"no viewer answers at {parts.hostname}:{parts.port} ({error.strerror or error})"
                ) from None
        stream = self._rerun.RecordingStream("sinew", recording_id=self._id)
        if not stream.is_enabled():
            raise SinewError("rerun: the environment variable RERUN turns recording off; unset it")
        if isinstance(self.target, Path):
            # Raises a clear error if the folder is missing, which Rerun does not.
            self.target.open("xb").close()
            stream.save(self.target)
        else:
            stream.connect_grpc(self.target)
        self._stream = stream

    def _log(self, entity: Sequence[str], what: Any) -> None:
        self._stream.log(list(entity), what)
        self._count(entity, 1)

    def _count(self, entity: Sequence[str], many: int) -> None:
        name = "/".join(entity)
        self.counts[name] = self.counts.get(name, 0) + many


def _pixels(frame: np.ndarray) -> np.ndarray:
    """Return a frame as uint8 [h, w, 3]. Floats in [0, 1] are converted."""
    return frame if frame.dtype == np.uint8 else (frame * 255).round().clip(0, 255).astype(np.uint8)


def _names(names: Sequence[str], size: int) -> Sequence[str]:
    return names if len(names) == size else [str(index) for index in range(size)]
