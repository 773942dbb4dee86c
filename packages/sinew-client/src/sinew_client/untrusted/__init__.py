"""Safe readers for untrusted files and messages. All code of Sinew reads files with this package.

Each reader checks sizes, depth and counts before it allocates memory, and opens only regular files. It returns plain
values, or raises OSError for the file system and :class:`UntrustedError` for the content. It never raises
RecursionError, OverflowError, UnicodeError or MemoryError, never runs code from a file, and prints at most a few
characters of the content. The limits are arguments with defaults. ``tests/untrusted/test_raw_reads.py`` detects code
that reads files without this package.
"""

from sinew_client.untrusted.archives import Archive as Archive
from sinew_client.untrusted.archives import Npz as Npz
from sinew_client.untrusted.archives import open_archive as open_archive
from sinew_client.untrusted.archives import open_npz as open_npz
from sinew_client.untrusted.archives import read_npz as read_npz
from sinew_client.untrusted.arrays import parse_npy as parse_npy
from sinew_client.untrusted.arrays import raw_array as raw_array
from sinew_client.untrusted.arrays import read_npy as read_npy
from sinew_client.untrusted.files import MAX_BYTES as MAX_BYTES
from sinew_client.untrusted.files import open_lock as open_lock
from sinew_client.untrusted.files import open_regular as open_regular
from sinew_client.untrusted.files import read_bytes as read_bytes
from sinew_client.untrusted.files import read_text as read_text
from sinew_client.untrusted.messages import unpack_msgpack as unpack_msgpack
from sinew_client.untrusted.texts import TornLineError as TornLineError
from sinew_client.untrusted.texts import parse_json as parse_json
from sinew_client.untrusted.texts import parse_toml as parse_toml
from sinew_client.untrusted.texts import parse_yaml as parse_yaml
from sinew_client.untrusted.texts import read_json as read_json
from sinew_client.untrusted.texts import read_jsonl as read_jsonl
from sinew_client.untrusted.texts import read_toml as read_toml
from sinew_client.untrusted.texts import read_yaml as read_yaml
from sinew_client.untrusted.words import UntrustedError as UntrustedError
from sinew_client.untrusted.words import named as named
from sinew_client.untrusted.words import shown as shown
