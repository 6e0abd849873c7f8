"""The engine behind HTTP: OpenAI's API for one model, in one process."""
