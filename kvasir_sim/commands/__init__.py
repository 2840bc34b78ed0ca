"""Subcommands of `kvasir-sim`, one module each, imported when called."""
