"""What hub, relay, worker and stage agree on: HTTP bodies, relay frames, identities."""
