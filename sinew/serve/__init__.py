"""The server: a wire decodes requests, the scheduler runs them one at a time, the loop moves bytes.

``sinew.serve(policy)``, of the package itself, is :func:`sinew.serve.wires.server.serve`.
"""

import sys

from sinew.core.called import CalledPackage

_CALLED = "sinew.serve.wires.server:serve"
sys.modules[__name__].__class__ = CalledPackage
