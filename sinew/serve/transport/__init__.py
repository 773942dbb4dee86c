"""Transports: sockets, connections and TLS. A transport moves bytes and knows no protocol."""
