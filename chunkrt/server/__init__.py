"""A server: OpenAI's HTTP API above one engine, whose requests share chunks."""
