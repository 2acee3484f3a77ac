"""What a person reads: metrics, progress, statistics and videos."""
