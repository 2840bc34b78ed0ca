"""How much load a ring carries, what would make it more, and the cheapest that carries it."""
