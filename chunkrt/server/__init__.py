"""An HTTP server with OpenAI's API on top of one engine; concurrent requests are batched into the same chunks."""
