"""What a policy acts in: the protocol of environments, tasks of one turn, and the processes that run users' code."""
