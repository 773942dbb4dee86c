"""The server for policies. A protocol's code decodes requests, a scheduler for each policy runs them, and an event
loop sends and receives the bytes.

You can call the package itself: ``sinew.serve(policy)`` creates a :class:`sinew.serve.wires.server.Server`.
"""

from sinew.core import called

called.call(__name__, "sinew.serve.wires.server:Server")
