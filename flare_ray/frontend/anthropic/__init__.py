"""The Anthropic Messages API over the same engine: its bodies become chat requests."""
