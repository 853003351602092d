"""Which tokens a row attends to: keys pooled over runs of tokens, scored, best pools taken."""
