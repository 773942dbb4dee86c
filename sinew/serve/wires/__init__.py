"""One codec per client protocol. A wire turns bytes into requests and action chunks into bytes; it
opens no sockets, starts no threads, and does no preprocessing or inference."""
