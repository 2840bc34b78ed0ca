"""How much load a ring carries, what would make it more, and the cheapest that carries it."""

SEEDS = 5
SEEDS_MAX = 100
PRECISION = 0.02  # Seeds differ by more, and growth below 3 % is not called growth.
PRECISION_LEAST, PRECISION_MOST = 0.001, 0.5
STAGES = 16  # Of the longest ring that is considered.
