"""Pure values and pure decisions: no I/O, no clock, no chance; time and randomness come in as arguments."""
