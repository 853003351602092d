"""The OpenAI Responses API over the same engine, without storage: its bodies become chat
requests."""
