"""Ray shells over plain classes: engine, ranks, channel, placement, health."""
