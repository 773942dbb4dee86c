"""The server. A protocol decodes requests, the scheduler runs them, and an event loop moves the bytes.

You can call the package itself: ``sinew.serve(policy)`` creates a :class:`sinew.serve.wires.server.Server`.
"""

from sinew.core import called

called.call(__name__, "sinew.serve.wires.server:Server")
