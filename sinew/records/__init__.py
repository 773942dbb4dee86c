"""Recordings of requests and answers: a server writes them, and other commands read them."""
