"""One stage's slice of a transformer: shape, weights, attention over slots or pages, experts."""
