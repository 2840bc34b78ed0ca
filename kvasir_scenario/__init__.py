"""What both shells read and write: scenario files, workloads and traces, reports and tables."""
