"""Runtime: ranks, signals, the heartbeat and the console of a run."""
