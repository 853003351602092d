"""Training of a drafter for a model that a package holds, which stays as it is.

Owns the network, the prompts, the text that the model writes itself, training, measures and card;
the clock, captured steps, Muon, stored forms and speculative generation are the harness's.
"""
