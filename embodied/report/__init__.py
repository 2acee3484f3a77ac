"""Output for people: metrics, progress and videos."""
