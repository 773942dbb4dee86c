"""Transports: sockets, connections and TLS. They move bytes and know no protocol."""
