"""The dashboard: a static web page that shows the server's inputs, answers and latencies over server-sent events."""
