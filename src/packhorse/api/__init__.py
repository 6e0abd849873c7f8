"""OpenAI's formats: bodies in, bodies out. Batch files use them, and so does any server."""
