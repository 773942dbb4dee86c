"""The server. A protocol decodes requests, the scheduler runs them, and an event loop moves the bytes.

The package itself can be called: ``sinew.serve(policy)`` makes a :class:`sinew.serve.wires.server.Server`.
"""

from sinew.core import called

called.call(__name__, "sinew.serve.wires.server:Server")
