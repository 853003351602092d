"""The demo of the Qwen3.8-Flash architecture: shape, training model, decoding, chat layout."""
