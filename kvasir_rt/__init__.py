"""Real-time shells around `kvasir_core`: stages, bridge, hub, relay, workers."""
