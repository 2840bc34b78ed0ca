"""A worker: volunteers, fetches a slice of experts, dials the relay, computes, fades out."""
