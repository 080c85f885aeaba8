"""Workers. Each runs one rank of a role: actor, critic, implicit reward model, reward model or teacher."""
