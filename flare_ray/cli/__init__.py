"""The flare-ray command and the in-process LLM."""
