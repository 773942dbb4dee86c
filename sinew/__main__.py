"""Run the command line: ``python -m sinew VERB`` is the same as ``sinew VERB``."""

import sys

from sinew.cli import main

sys.exit(main())
