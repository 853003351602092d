"""The seed, domain and offset law of every random draw (contract: S4, S5, S6).

Integer arithmetic only, so the controller and every rank compute the same keys without a device.

    key    = splitmix64(request seed xor domain constant): the 64-bit Philox key
    offset = 12 * N, N = consumed tokens when the round starts

A round with K <= 7 drafts uses draws offset .. offset + K + 1 <= offset + 8 of a domain, so rounds
never overlap and resume, retry and replay carry no generator state. Philox subsequence is 0 for
every request: lanes are interchangeable.

    domain   draws at a round that starts with N consumed tokens
    DRAFT    12 N + k draws draft k
    ACCEPT   chain tests from 12 N, then the final draw (K tests + 1 if all are accepted, K + 2
             draws after a rejection)
    SAMPLE   12 N: rounds or lanes that verify no draft; the first output token of a prompt of P
             tokens uses 12 (P - 1), as if the last prompt token had been the pending token of a
             round with P - 1 consumed
    EXPLORE  reserved for the controller's funded probes

Source: mtp-design, sampling correctness; Steele, Lea and Flood 2014 (SplitMix64); Salmon et al.
2011 (Philox).
"""

from __future__ import annotations

import enum

MASK64 = (1 << 64) - 1
OFFSET_STRIDE = 12
"""Draws reserved per consumed token in each domain; K + 2 <= 9 are used at most."""


class RngDomain(enum.IntEnum):
    """Stream purpose; the value indexes the per-slot key columns on the device."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2
    EXPLORE = 3


# Arbitrary odd 64-bit constants, fixed for ever: changing one changes every seeded text.
_DOMAIN_CONSTANT = {
    RngDomain.DRAFT: 0x6A09E667F3BCC909,
    RngDomain.ACCEPT: 0xBB67AE8584CAA73B,
    RngDomain.SAMPLE: 0x3C6EF372FE94F82B,
    RngDomain.EXPLORE: 0xA54FF53A5F1D36F1,
}


def splitmix64(x: int) -> int:
    """One SplitMix64 step: a bijection on 64-bit integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one of several choices for a prompt: choice 0 has the request's own (S4)."""
    return splitmix64((seed & MASK64) ^ (choice << 32)) if choice else seed & MASK64


def stream_key(seed: int, domain: RngDomain) -> int:
    """Philox key of one request's stream in `domain`, in [0, 2**64)."""
    return splitmix64((seed & MASK64) ^ _DOMAIN_CONSTANT[domain])


def round_offset(consumed_tokens: int) -> int:
    """First draw of a round that starts with `consumed_tokens` consumed."""
    return OFFSET_STRIDE * consumed_tokens


def as_int64(value: int) -> int:
    """The signed 64-bit reading of an unsigned key, for int64 device tensors."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value
