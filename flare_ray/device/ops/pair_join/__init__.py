"""The input of a drafter over pairs: the next token's embedding beside a hidden state."""
