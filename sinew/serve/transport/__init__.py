"""Transports: sockets, connections and TLS. A transport moves bytes, for any protocol."""
