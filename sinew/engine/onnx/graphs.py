"""The folder of an export: three graphs, their weights, the tables of time embeddings, and the record
``graphs.json``."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from sinew_client.untrusted import UntrustedError, parse_json, read_bytes, read_json

from sinew.bundle.digests import DigestCache
from sinew.core import BundleError, machine
from sinew.core.fields import from_builtins, to_json, within
from sinew.steps.action_tokens.base import ActionTokens

STAGES = ("vision", "read", "step")
COMPONENT = "sinew.component"  # key of a node's metadata: the component that the node belongs to
# Key of the mark in a quantised graph's metadata. The mark states that a whole tensor of activations has one scale,
# so that the members of a batch would share it.
ONE_SCALE = "sinew.one_scale"
FORMAT = 5
MAX_RECORD = 1 << 22  # largest accepted size of graphs.json in bytes
# The largest accepted size of a graph in bytes, without its weights. Protobuf has the same limit.
MAX_GRAPH = 1 << 31
# The names of the files in the folder of an export.
FILES = re.compile(r"(?:vision|read|step)\.onnx(?:\.data)?|moments-\d+\.npy")
CONTROL = ("Loop", "Scan", "If")  # operators that no export contains and that may run forever
# Prefixes of the names in ``reads`` for an autoregressive head. Tensors that no generated token changes have names
# that begin with PROMPT.
CONTEXT, PROMPT = "context.", "context.prompt."
NEWEST = "context.spoken.token"  # The newest token has this name in ``said``, int64 [B].
Count = Annotated[int, within(0, 1000)]  # a number of views, solver steps or bits
# The fields that Sinew reads from an ONNX file: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
_PROTO = """
message ModelProto {
  GraphProto graph = 7;
}
message GraphProto {
  repeated NodeProto node = 1;
}
message NodeProto {
  bytes op_type = 4;
}
"""


@dataclass(frozen=True, slots=True)
class GraphSet:
    """The content of ``graphs.json``, the record of an export. An export has three graphs (stages): vision, read and
    step.

    Attributes:
        architecture: Name of the architecture.
        views: Number of camera views in the read stage's input.
        reads: Names of the tensors that the read stage returns and the step stage reads, in order.
        steps: Numbers of solver steps for which the export has a table of time embeddings.
        rewrites: Names of the rewrites that were applied to the model.
        recipe: The precision of each component, for quantised graphs.
        method: Method of the quantisation, as text.
        bits: Bits of int8 weights, or 0 without int8 weights.
        borrows: For each stage, the names of the bundle's tensors that it uses, if the graphs have no weights.
        sha256: Name of each other file in the folder -> its hash.
        said: For an autoregressive head, the names in ``reads`` of the tensors that one call of the step stage
            changes.
        speaks: For an autoregressive head, the meaning of its action tokens. The step stage generates one token per
            call.
        format: Version of the record.
    """

    architecture: str
    views: Count
    reads: tuple[str, ...]
    steps: tuple[Count, ...]
    rewrites: tuple[str, ...]
    recipe: dict[str, str] = field(default_factory=dict)
    method: str = ""
    bits: Count = 0
    borrows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    speaks: tuple[ActionTokens, ...] = ()
    format: int = FORMAT

    def save(self, directory: Path) -> None:
        """Write the record, with the hashes of the files in ``directory``."""
        plain = parse_json(to_json(replace(self, sha256=_hashes(directory))))
        record = json.dumps(plain, indent=2)
        (directory / "graphs.json").write_text(record + "\n", encoding="utf-8")

    def check(self, directory: Path) -> None:
        """Compare the files with their hashes, because altered weights would give wrong actions without an error.

        Files that were compared before and have not changed since then are not read again.

        Raises:
            BundleError: A file is altered, missing, or not part of the export.
        """
        hashes = _hashes(directory)
        for name in sorted(hashes.keys() | self.sha256.keys()):
            if hashes.get(name) != self.sha256.get(name):
                what = (
                    "was changed after the export" if name in hashes and name in self.sha256 else "is missing"
                )
                if name not in self.sha256:
                    what = "does not belong to this export"
                raise BundleError(f"{directory / name}: {what} (graphs.json has its SHA-256); export again")
        for stage in STAGES:
            check_operators(directory / f"{stage}.onnx")

    @classmethod
    def load(cls, directory: Path) -> GraphSet:
        """Read ``graphs.json``, the record of an export, and check it.

        Raises:
            BundleError: The record is damaged, or no export wrote it.
        """
        path = directory / "graphs.json"
        try:
            content = read_json(path, MAX_RECORD)
        except (OSError, UntrustedError) as error:
            raise BundleError(
                f"{path}: expected the record of an export, got {error!r}; export again"
            ) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            version = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise BundleError(f"{path}: expected format {FORMAT}, got {version!r}; export again")
        graphs: GraphSet = from_builtins(content, cls, f"{path}: record")
        if unknown := set(graphs.borrows) - set(STAGES):
            raise BundleError(
                f"{path}: borrows: expected stages from {', '.join(STAGES)}, got {', '.join(sorted(unknown))}"
            )
        if len(set(graphs.reads)) != len(graphs.reads):
            raise BundleError(f"{path}: reads: expected different names, got a name twice; export again")
        if len(graphs.speaks) > 1 or bool(graphs.speaks) != bool(graphs.said):
            raise BundleError(
                f"{path}: said and speaks must both be present (one entry in speaks), or both be"
                " empty; export again"
            )
        if not set(graphs.said) <= set(graphs.reads) or (graphs.said and NEWEST not in graphs.said):
            raise BundleError(f"{path}: said: expected names from reads, including {NEWEST}; export again")
        return graphs


def _hashes(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of an export.

    Raises:
        BundleError: A file cannot be read.
    """
    names = sorted(path.name for path in directory.iterdir() if FILES.fullmatch(path.name))
    memo = DigestCache(directory, machine.cache_folder("digests"))

    def digest(name: str) -> str:
        with BundleError.at(directory / name, OSError):
            return memo.digest(directory / name)

    with ThreadPoolExecutor(4) as threads:
        hashes = dict(zip(names, threads.map(digest, names), strict=True))
    memo.keep()
    return hashes


def check_operators(path: Path) -> None:
    """Check that a graph contains only operators that an export writes.

    Raises:
        BundleError: The graph contains operators that no export writes and that may run forever.
    """
    with BundleError.at(path, OSError, UntrustedError):
        data = read_bytes(path, MAX_GRAPH)
    for name in CONTROL:
        # The file stores an operator's name as field 4 (op_type). If the file does not contain the bytes of this field,
        # it does not contain the operator, and need not be parsed.
        if bytes([0x22, len(name)]) + name.encode() in data and name in set(operators(path, data)):
            raise BundleError(
                f"{path}: Sinew does not run graphs with the operator {name}, which may never end;"
                " export again"
            )


def operators(path: Path, data: bytes) -> list[str]:
    """Return the operator type of each node of an ONNX graph, such as "MatMul"."""
    from google.protobuf.message import DecodeError
    from sinew_client import schema

    kinds = schema.classes(schema.file_descriptor(schema.read_messages(_PROTO), "onnx"))
    try:
        nodes = kinds["ModelProto"].FromString(data).graph.node
    except DecodeError:
        raise BundleError(f"{path}: this file is not a valid ONNX graph; export again") from None
    return [node.op_type.decode("utf-8", "replace") for node in nodes]


def renewed(name: str) -> str:
    """Return the name of the step stage's output that contains the new value of the tensor ``name`` of ``said``."""
    return f"next.{name}"


def table_path(directory: Path, steps: int) -> Path:
    return directory / f"moments-{steps}.npy"
