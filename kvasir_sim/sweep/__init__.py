"""Many runs of one scenario: points, who runs them, and the table they end in."""
