"""Page accounting of one engine: who holds which 64-token page (contract: M1)."""
