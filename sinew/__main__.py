"""``python -m sinew VERB`` is ``sinew VERB``."""

import sys

from sinew.cli import main

sys.exit(main())
