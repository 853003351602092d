"""Model families, one folder each; `declaration` is what they fill in, `fields` reads their
config.json, `reading` their tensors, `registry` finds them."""
