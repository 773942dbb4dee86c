"""The server: a wire decodes requests, the scheduler runs them one at a time, the loop moves bytes.

``sinew.serve(policy)``, of the package itself, makes a :class:`sinew.serve.wires.server.Server`.
"""

from sinew.core import called

called.call(__name__, "sinew.serve.wires.server:Server")
