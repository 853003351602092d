"""Drafts that are copied from text instead of being drawn by a drafter (contract: H1, H2, H3).

ring         committed generated tokens of all requests, per tenant           (H1)
own_text     a request's own prompt and output                                (H3)
prediction   what its client expects as output                                (H3)
copies       which of them a request's next round copies from, or none        (H2, C1)
"""
