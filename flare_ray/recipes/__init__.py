"""Model families, one folder each; `declaration` is what they fill in, `fields` reads a config.json,
`registry` finds them."""
