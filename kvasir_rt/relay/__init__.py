"""Carries frames between workers and coordinators, both of whom dialled out (law M9)."""
