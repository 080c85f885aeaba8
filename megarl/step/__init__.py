"""The parts of one RL step that `train.py` calls: rollouts, scores, baselines, dispatch."""
