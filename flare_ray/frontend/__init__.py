"""HTTP: validation, templates, tokenisation, parsers, server-sent events, routing."""
