"""Model families, one folder each; `declaration` is what they fill in, `registry` finds them."""
