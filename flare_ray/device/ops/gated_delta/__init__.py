"""The gated delta rule: one decay per head and token, value heads in groups that share a key."""
