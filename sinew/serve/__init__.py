"""The server: a wire decodes requests, the scheduler runs them one at a time, the loop moves bytes.

``sinew.serve(policy)``, of the package itself, is :func:`sinew.serve.wires.server.serve`.
"""

from sinew.core import called

called.call(__name__, "sinew.serve.wires.server:serve")
