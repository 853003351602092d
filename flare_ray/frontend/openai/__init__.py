"""The OpenAI wire format: requests in, responses and errors out. Knows no web framework."""
