"""The parts of an RL step that `train.py` calls: rollouts, scores, baselines, dispatch."""
