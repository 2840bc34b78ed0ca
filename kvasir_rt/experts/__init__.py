"""The stage's side of remote experts: what is sent, who answers, how it enters the sum."""
