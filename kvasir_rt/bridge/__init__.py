"""The OpenAI-compatible HTTP API of a ring: HTTP in, submissions and tokens out."""
