"""Load over HTTP, on real servers: what the server adds to the engine, and what it does when too much is asked."""
