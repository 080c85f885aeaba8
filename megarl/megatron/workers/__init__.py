"""One rank of each role: actor, critic, implicit reward model, reward model."""
