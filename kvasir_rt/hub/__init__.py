"""The hub: demand market, wiring, slices. `command.py` runs it, `service.py` is its middle."""
