"""The swarm."""
