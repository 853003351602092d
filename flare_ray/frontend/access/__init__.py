"""Who may ask, and how much: API keys and rate limits."""

from flare_ray.frontend.access.door import Access, Caller
from flare_ray.frontend.access.ledger import Ledger, LocalLedger

__all__ = ["Access", "Caller", "Ledger", "LocalLedger"]
