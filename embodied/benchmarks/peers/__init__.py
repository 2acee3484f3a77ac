"""PPO of other libraries on our environments, for comparison: the least code that each library needs."""
